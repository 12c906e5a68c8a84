"""A decoded medium to the towers' inputs, with the checkpoint's own settings. Knows nothing of batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.encoder.families import schemes_of
from services.encoder.features import Inputs
from services.encoder.pixels import copying_nothing, view
from services.models.checkpoint import Checkpoint
from services.models.hf import transformers
from services.models.media import Grid, ItemPlan, Modality

# uint8 [height, width, 3] or [frames, height, width, 3]; or one channel of float32 samples at the model's rate.
Decoded = np.ndarray

# The classes that AutoProcessor would choose from; the whole processor also needs what only text is prepared with.
_AUTO = {Modality.IMAGE: "AutoImageProcessor", Modality.AUDIO: "AutoFeatureExtractor", Modality.VIDEO: "AutoVideoProcessor"}


@dataclass(frozen=True)
class Prepared:
    """One item, ready for the towers.

    Attributes:
        modality: what it is.
        inputs: tensors by the names that the towers take.
        grid: how its rows will be arranged.
        patches: what it costs in a batch.
    """

    modality: Modality
    inputs: Inputs
    grid: Grid
    patches: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class Preprocessor:
    """Prepares items one by one; safe to call from several threads.

    Args:
        checkpoint: whose processors prepare.
        modalities: what will be prepared.
    """

    def __init__(self, checkpoint: Checkpoint, modalities: Collection[Modality]) -> None:
        self._checkpoint = checkpoint
        self._schemes = schemes_of(checkpoint.family.model_type)
        self._processors: dict[Modality, Any] = {}
        for modality in modalities:
            processor = getattr(transformers, _AUTO[modality]).from_pretrained(checkpoint.path, local_files_only=True)
            self._processors[modality] = processor if modality is Modality.AUDIO else copying_nothing(processor)

    def check_size(self, width: int, height: int) -> None:
        """Raise a ValueError whose text a client may see if the model cannot take a picture of this size."""
        self._checkpoint.plan_image(width, height)

    def __call__(self, medium: Decoded, plan: ItemPlan) -> Prepared:
        """The towers' inputs for what was decoded."""
        if plan.modality is Modality.VIDEO:
            assert len(medium) == len(plan.frames), f"{len(medium)} frames were decoded of {len(plan.frames)} planned"
        scheme = self._schemes[plan.modality]
        seen = medium if plan.modality is Modality.AUDIO else view(medium)
        inputs = scheme.prepare(self._processors[plan.modality], seen, plan)
        return Prepared(plan.modality, inputs, scheme.grid(inputs, plan, self._checkpoint.config), plan.patches)
