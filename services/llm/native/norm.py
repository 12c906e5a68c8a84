"""Replaces a decoder's RMS norms, at load, by one native call instead of six tensor operations.

Knows no model family: a module is replaced when it is named an RMS norm, has one weight per channel, and the kernel gives
its results, in one of the two ways of rounding that are in use.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch
from torch import nn

from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("norm_kernel.cpp")
_FUNCTIONS = {torch.float32: "triptych_norm_float32", torch.bfloat16: "triptych_norm_bfloat16"}
_LANES = 16  # the width must be a multiple: floats that the kernel handles at once
_MOST_ROWS = 1024  # above, the kernel's single thread is no longer what costs least
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative: a few roundings of the type


class NativeNorm(nn.Module):
    """An RMS norm with the same weight, which must stay where it is. The replaced module serves large inputs.

    Attributes:
        epsilon: added to the mean square.
        add_one: 1 where the factors are ``1 + weight``, else 0.

    Raises:
        Unavailable: the kernel cannot be built, or does not take this weight.
    """

    def __init__(self, norm: nn.Module, epsilon: float, add_one: bool) -> None:
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        if weight.dtype not in _FUNCTIONS or weight.ndim != 1 or len(weight) % _LANES or weight.device.type != "cpu":
            raise Unavailable("the native norm takes float32 or bfloat16 weights, 16 at a time")
        self.original = norm
        self._function = getattr(load_library(_SOURCE), _FUNCTIONS[weight.dtype])
        self._function.restype = None
        self._function.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_float, ctypes.c_int),
        )
        self._width, self._dtype, self._address = len(weight), weight.dtype, weight.data_ptr()
        self.epsilon, self.add_one = epsilon, int(add_one)

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[width]``."""
        weight = self.original.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., width]``, normalised over the last axis."""
        width = self._width
        rows = x.numel() // width
        if x.dtype != self._dtype or rows > _MOST_ROWS:
            return self.original(x)  # type: ignore[no-any-return]
        flat = x.reshape(rows, width)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        self._function(flat.data_ptr(), flat.stride(0), self._address, y.data_ptr(), rows, width, self.epsilon, self.add_one)
        return y


@torch.inference_mode()
def replace_norms(decoder: nn.Module) -> int:
    """Replace, in place, the RMS norms that the kernel can stand in for; returns how many."""
    replaced = 0
    for parent in [module for module in decoder.modules() if not isinstance(module, NativeNorm)]:
        for name, norm in list(parent.named_children()):
            native = stand_in(norm)
            if native is not None:
                setattr(parent, name, native)
                replaced += 1
    logger.info("%d RMS norms run natively", replaced)
    return replaced


def stand_in(norm: nn.Module) -> NativeNorm | None:
    """The native norm with a module's results; None where there is none."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(epsilon, float) or not isinstance(weight, torch.Tensor):
        return None
    if norm._forward_hooks or norm._forward_pre_hooks:
        return None
    for add_one in (False, True):
        try:
            native = NativeNorm(norm, epsilon, add_one)
        except Unavailable as reason:
            logger.debug("no native norm: %s", reason)
            return None
        # rows of usual size, and so small that epsilon counts
        x = (torch.randn(4, len(weight)) * torch.tensor([[1.0], [30.0], [1e-3], [1e-4]])).to(weight.dtype)
        want, got = norm(x), native(x)
        if want.dtype == got.dtype and torch.allclose(want, got, rtol=_TOLERANCE[weight.dtype], atol=1e-7):
            return native
    return None
