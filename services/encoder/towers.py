"""The loaded encoder half: preprocessed items in, embeddings out. Knows nothing of queues; call it from one thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.encoder.families import schemes_of
from services.encoder.features import Features, encode_items
from services.encoder.preprocess import Prepared
from services.models.checkpoint import Checkpoint
from services.models.half import choose_device, choose_dtype, load_half, parameter_bytes


class Towers:
    """Towers and projector of a checkpoint.

    Attributes:
        model: the half, in eval mode.
        parameter_bytes: bytes of its parameters.
        dtype: element type of weights and embeddings.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: str) -> None:
        self._device = torch.device(choose_device(device))
        self._schemes = schemes_of(checkpoint.family.model_type)
        self.dtype = choose_dtype(dtype, checkpoint, self._device.type)
        self.model = load_half(checkpoint, "encoder", self.dtype, str(self._device))
        self.parameter_bytes = parameter_bytes(self.model)

    @torch.inference_mode()
    def encode(self, batch: Sequence[Prepared]) -> list[Features]:
        """The features of each item, on the CPU, each in memory of its own."""
        features: dict[int, Features] = {}
        for modality in sorted({item.modality for item in batch}):
            indices = [index for index, item in enumerate(batch) if item.modality is modality]
            inputs = [batch[index].inputs for index in indices]
            encoded = encode_items(self._schemes[modality], self.model.base_model, inputs, self.dtype, self._device)
            features |= zip(indices, encoded, strict=True)
        # a view would keep the whole batch alive for as long as one of its items is held
        return [[rows.to("cpu", copy=True).contiguous() for rows in features[index]] for index in range(len(batch))]
