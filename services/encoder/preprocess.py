"""A decoded medium to the towers' inputs, by the checkpoint's own processors. Knows nothing of batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from services.encoder.families import schemes_of
from services.encoder.features import Inputs
from services.models.checkpoint import Checkpoint
from services.models.hf import transformers
from services.models.media import Grid, ItemPlan, Modality

# A picture of mode RGB; frames [frames, height, width, 3] of uint8; or one channel of float32 samples at the model's rate.
Decoded = Image.Image | np.ndarray

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
        self._processors: dict[Modality, Any] = {
            modality: getattr(transformers, _AUTO[modality]).from_pretrained(checkpoint.path, local_files_only=True)
            for modality in modalities
        }

    def check_size(self, width: int, height: int) -> None:
        """Raise a ValueError whose text a client may see if the model cannot take a picture of this size."""
        self._checkpoint.plan_image(width, height)

    def __call__(self, medium: Decoded, plan: ItemPlan) -> Prepared:
        """The towers' inputs for what was decoded."""
        if isinstance(medium, np.ndarray) and plan.modality is Modality.VIDEO:
            assert len(medium) == len(plan.frames), f"{len(medium)} frames were decoded of {len(plan.frames)} planned"
        scheme = self._schemes[plan.modality]
        inputs = scheme.prepare(self._processors[plan.modality], medium, plan)
        return Prepared(plan.modality, inputs, scheme.grid(inputs, plan, self._checkpoint.config), plan.patches)
