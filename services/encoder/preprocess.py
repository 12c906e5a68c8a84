"""A decoded picture to the towers' inputs, by the checkpoint's own image processor. Knows nothing of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image

from services.encoder.features import Inputs, image_grid
from services.models.checkpoint import Checkpoint
from services.models.hf import transformers
from services.models.media import Grid


@dataclass(frozen=True)
class Prepared:
    """One item, ready for the towers.

    Attributes:
        inputs: tensors by the names that the towers take.
        grid: how its rows will be arranged.
    """

    inputs: Inputs
    grid: Grid

    @property
    def patches(self) -> int:
        """What it costs in a batch."""
        return self.grid.t * self.grid.h * self.grid.w

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class ImagePreprocessor:
    """Prepares images one by one; safe to call from several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        # the class that AutoProcessor would choose
        auto: Any = transformers.AutoImageProcessor
        self._processor = auto.from_pretrained(checkpoint.path, local_files_only=True)

    def check_size(self, width: int, height: int) -> None:
        """Raise a ValueError whose text a client may see if the model cannot take this size."""
        self._checkpoint.plan_image(width, height)

    def __call__(self, picture: Image.Image) -> Prepared:
        """The towers' inputs for a picture of mode RGB."""
        inputs = dict(self._processor(images=[picture], return_tensors="pt"))
        return Prepared(inputs, image_grid(self._checkpoint.family.model_type, inputs, self._checkpoint.config))
