"""The loaded encoder half: preprocessed items in, embeddings out. Knows nothing of queues; call it from one thread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from services.encoder.families import schemes_of
from services.encoder.features import Features, cut_item, encode_items
from services.encoder.native.activation import replace_activations
from services.encoder.native.attention import replace_attention
from services.encoder.native.rotary import replace_rotary
from services.encoder.preprocess import Prepared
from services.models.checkpoint import Checkpoint
from services.models.half import choose_device, choose_dtype, load_half, parameter_bytes

# Patches of a piece: few enough for the first rows to come early and for nobody to wait long behind a large item, enough
# for the products of its layers to outweigh their calls, which takes more where products are faster.
_PIECE_PATCHES = {"cpu": 1024}
_PIECE_PATCHES_ELSEWHERE = 4096
_BATCH_PATCHES = {"cpu": 2560}  # what a layer makes of more is out of the caches before the next one reads it


class PatchProduct(nn.Module):
    """A convolution whose every input is a single patch, as the matrix product that it is: a third of the time on a CPU."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches ``[count, channels, frames, height, width]`` to ``[count, width of the tower, 1, 1, 1]``."""
        assert patches.shape[1:] == self.weight.shape[1:], f"patches of {tuple(patches.shape[1:])}"
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


class Towers:
    """Towers and projector of a checkpoint.

    Attributes:
        piece_patches: patches of a piece that an item is cut into, unless a unit of it has more.
        batch_patches: patches of a batch beyond which nothing is gained.
        model: the half, in eval mode.
        parameter_bytes: bytes of its parameters.
        dtype: element type of weights and embeddings.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: str) -> None:
        self._device = torch.device(choose_device(device))
        self._schemes = schemes_of(checkpoint.family.model_type)
        self.piece_patches = _PIECE_PATCHES.get(self._device.type, _PIECE_PATCHES_ELSEWHERE)
        self.batch_patches = _BATCH_PATCHES.get(self._device.type, sys.maxsize)
        self.dtype = choose_dtype(dtype, checkpoint, self._device.type)
        self.model = load_half(checkpoint, "encoder", self.dtype, str(self._device))
        for module in self.model.modules():
            for name, part in module.named_children():
                if isinstance(part, nn.Conv3d):  # of Qwen's towers, which get their patches cut
                    setattr(module, name, PatchProduct(part))
        if self._device.type == "cpu":
            replace_rotary(self.model)
            replace_activations(self.model, self.dtype)
            replace_attention(self.model, self.dtype)
        self.parameter_bytes = parameter_bytes(self.model)

    def split(self, item: Prepared) -> list[Prepared]:
        """The item in pieces that can be encoded each by itself; their rows, joined, are its own. They share its memory."""
        scheme, config = self._schemes[item.modality], self.model.base_model.config
        cut = cut_item(scheme, item.inputs, config, item.patches, self.piece_patches)
        return [replace(item, inputs=inputs, patches=patches) for inputs, patches in cut]

    @torch.inference_mode()
    def encode(self, batch: Sequence[Prepared]) -> list[Features]:
        """The features of each item or piece, on the CPU; those of a batch may share memory, so they are to be copied."""
        features: dict[int, Features] = {}
        for modality in sorted({item.modality for item in batch}):
            indices = [index for index, item in enumerate(batch) if item.modality is modality]
            inputs = [batch[index].inputs for index in indices]
            encoded = encode_items(self._schemes[modality], self.model.base_model, inputs, self.dtype, self._device)
            features |= zip(indices, encoded, strict=True)
        return [[rows.to("cpu") for rows in features[index]] for index in range(len(batch))]
