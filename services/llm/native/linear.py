"""Replaces a decoder's linear layers, at load, by whatever multiplies a few rows fastest on this CPU.

``F.linear`` rearranges the weights at every call; at decode batch sizes that is up to half of a step. Our kernels read them as
they are: by rows for up to 128 rows of input, by tiles (AMX) for any number. Each shape is tried out once, for equality and
speed. Knows no model family: it looks at exact ``nn.Linear`` modules and leaves every other kind alone.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from services.llm.native import large_pages
from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_ROWS = Path(__file__).with_name("linear_kernel.cpp")
_TILES = Path(__file__).with_name("tiles_kernel.cpp")
_FUNCTIONS = {torch.float32: "triptych_linear_float32", torch.bfloat16: "triptych_linear_bfloat16"}
_LANES = 16  # numbers that the kernel for rows handles at once
_MOST_ROWS = 128  # above, rearranging the weights pays, but for tiles
_BATCHES = (1, 8, 32)  # rows that are tried out
_SMALLEST = 1 << 14  # weights below this many elements cost nothing either way
_SAMPLE_BYTES = 64 << 20  # of each shape are tried out: more than the caches next to a core hold, as in a real step
_TOO_SLOW = 1.15  # time over plain time from which on torch's layer stays: the trial is noisy, and large pages are still to come
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest result


class NativeLinear(nn.Module):
    """An ``nn.Linear`` with the same parameters, by our own kernels.

    The weights must stay where they are.

    Raises:
        Unavailable: the kernel cannot be built, or does not take these weights.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        dtype = linear.weight.dtype
        if dtype not in _FUNCTIONS or linear.in_features % _LANES or not linear.weight.is_contiguous():
            raise Unavailable("the native kernel takes dense float32 or bfloat16 weights, 16 numbers at a time")
        if tiled := dtype is torch.bfloat16 and takes_tiles(linear.in_features, linear.out_features):
            self._multiply = load_library(_TILES).triptych_linear_tiles
        else:
            self._multiply = getattr(load_library(_ROWS), _FUNCTIONS[dtype])
        self._most_rows = sys.maxsize if tiled else _MOST_ROWS
        self._dtype = dtype
        self._multiply.restype = None
        self._multiply.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
        )
        self._addresses = (self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., in]`` to ``[..., out]``."""
        width, outs = self.in_features, self.out_features
        rows = x.numel() // width
        if rows > self._most_rows:
            return F.linear(x, self.weight, self.bias)
        x, shape = x.reshape(rows, width), x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty((*shape[:-1], outs), dtype=self._dtype)
        weight, bias = self._addresses
        self._multiply(x.data_ptr(), x.stride(0), weight, bias, y.data_ptr(), rows, width, outs, torch.get_num_threads())
        return y


def takes_tiles(width: int, outs: int) -> bool:
    """Whether the kernel for tiles of bfloat16 takes weights ``[outs, width]`` on this machine."""
    return width % 32 == 0 and outs % 16 == 0 and outs >= 32 and bool(load_library(_TILES).triptych_tiles_allowed())


@torch.inference_mode()
def speed_up(model: Any, decoder: nn.Module) -> Mapping[str, int]:
    """Replace, in place, the linear layers of ``decoder`` and the output embedding of ``model`` where that is faster.

    Their weights are moved side by side, on large pages.

    Returns:
        The layers by what they became.
    """
    head = model.get_output_embeddings()
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in dict.fromkeys([*decoder.modules(), model]):
        for name, child in parent.named_children():
            if _replaceable(child) and (parent is not model or child is head):
                places.setdefault(child, []).append((parent, name))
    alike: dict[tuple[Any, ...], list[nn.Linear]] = {}
    for linear in places:
        alike.setdefault((linear.weight.shape, linear.weight.dtype, linear.bias is None), []).append(linear)
    chosen = {
        linear
        for linears in alike.values()
        if _is_worth_it(linears[: max(1, _SAMPLE_BYTES // linears[0].weight.nbytes)])
        for linear in linears
    }
    large_pages.lay_out(list(dict.fromkeys(cast(nn.Parameter, linear.weight) for linear in places if linear in chosen)))
    for linear in chosen:
        replacement = NativeLinear(linear)
        for parent, name in places[linear]:
            setattr(parent, name, replacement)
    layers = {"NativeLinear": len(chosen), "Linear": len(places) - len(chosen)}
    logger.info("linear layers for this CPU: %s", layers)
    return layers


def _replaceable(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.dtype in _TOLERANCE
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= _SMALLEST
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def _is_worth_it(sample: list[nn.Linear]) -> bool:
    """Whether our kernel gives torch's results for layers of one shape, and not clearly later."""
    inputs = [torch.randn(rows, sample[0].in_features).to(sample[0].weight.dtype) for rows in _BATCHES]
    try:
        layers: list[nn.Module] = [NativeLinear(linear) for linear in sample]
    except Unavailable as reason:
        logger.debug("no native linear layers: %s", reason)
        return False
    if not all(_equal(sample[0](x), layers[0](x)) for x in inputs):
        logger.warning("the native linear layer gives other results than torch and is not used")
        return False
    ratios = [_seconds(layers, x) / _seconds(list(sample), x) for x in inputs]
    return math.prod(ratios) ** (1 / len(ratios)) < _TOO_SLOW


def _equal(want: torch.Tensor, got: torch.Tensor) -> bool:
    tolerance = _TOLERANCE[want.dtype]
    return torch.allclose(want, got, rtol=0, atol=tolerance * float(want.abs().max()))


def _seconds(layers: list[nn.Module], x: torch.Tensor) -> float:
    """Time of this thread, which neighbours on the machine disturb least, for the best of three passes over the layers."""
    best = math.inf
    for _ in range(3):
        started = time.thread_time()
        for layer in layers:
            layer(x)
        best = min(best, time.thread_time() - started)
    return best
