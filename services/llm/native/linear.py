"""Replaces a decoder's linear layers, at load, by whatever multiplies a few rows fastest on this CPU.

``F.linear`` rearranges the weights at every call; at decode batch sizes that is up to half of a step. Two layers avoid it:
``NativeLinear`` reads the weights as they are (float32), ``PackedLinear`` holds them rearranged for oneDNN instead of the
original ones. Each shape is tried out once, for equality and speed. Knows no model family: it looks at exact ``nn.Linear``
modules and leaves every other kind alone.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("linear_kernel.cpp")
_LANES = 16  # floats that the native kernel handles at once
_MOST_ROWS = 128  # above, rearranging the weights pays
_BATCHES = (1, 8, 32)  # rows that are tried out
_SMALLEST = 1 << 14  # weights below this many elements cost nothing either way
_SAMPLE_BYTES = 64 << 20  # of each shape are tried out: more than the caches next to a core hold, as in a real step
_WORTH = 0.95  # time over plain time, below which a replacement is kept
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest result


@dataclass(frozen=True)
class Replaced:
    """What :func:`speed_up` did.

    Attributes:
        layers: linear layers by what they became; ``Linear`` ones stayed.
        added_bytes: held beside the parameters counted before: packed weights whose originals an embedding still needs.
    """

    layers: Mapping[str, int]
    added_bytes: int


class NativeLinear(nn.Module):
    """An ``nn.Linear`` with the same parameters, by our own kernel for up to 128 rows. The weights must stay where they are.

    Raises:
        Unavailable: the kernel cannot be built, or does not take these weights.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        if linear.weight.dtype != torch.float32 or linear.in_features % _LANES or not linear.weight.is_contiguous():
            raise Unavailable("the native kernel takes dense float32 weights, 16 floats at a time")
        self._multiply = load_library(_SOURCE).triptych_linear_float32
        self._multiply.restype = None
        self._multiply.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
        )
        self._addresses = (linear.weight.data_ptr(), None if linear.bias is None else linear.bias.data_ptr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., in]`` to ``[..., out]``."""
        width, outs = self.in_features, self.out_features
        rows = x.numel() // width
        if rows > _MOST_ROWS:
            return F.linear(x, self.weight, self.bias)
        x, shape = x.reshape(rows, width), x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty((*shape[:-1], outs), dtype=torch.float32)
        weight, bias = self._addresses
        self._multiply(x.data_ptr(), x.stride(0), weight, bias, y.data_ptr(), rows, width, outs, torch.get_num_threads())
        return y


class PackedLinear(nn.Module):
    """An ``nn.Linear`` whose weights are held as oneDNN wants them.

    Raises:
        Unavailable: this build of torch cannot pack.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._like = torch.empty_like(linear.weight, device="meta")
        try:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
        except (AttributeError, RuntimeError) as error:
            raise Unavailable(f"this build of torch cannot pack weights: {error}") from error

    @property
    def weight(self) -> torch.Tensor:
        """Shape and type of the weights ``[out, in]``; on the meta device, because the values are in another order now."""
        return self._like

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., in]`` to ``[..., out]``."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self._multiply(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


_KINDS: tuple[type[NativeLinear] | type[PackedLinear], ...] = (NativeLinear, PackedLinear)


@torch.inference_mode()
def speed_up(model: Any, decoder: nn.Module) -> Replaced:
    """Replace, in place, the linear layers of ``decoder`` and the output embedding of ``model`` where that is faster."""
    head = model.get_output_embeddings()
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in dict.fromkeys([*decoder.modules(), model]):
        for name, child in parent.named_children():
            if _replaceable(child) and (parent is not model or child is head):
                places.setdefault(child, []).append((parent, name))
    shared = Counter(p.data_ptr() for m in model.modules() for p in m.parameters(recurse=False))
    alike: dict[tuple[Any, ...], list[nn.Linear]] = {}
    for linear in places:
        alike.setdefault((linear.weight.shape, linear.weight.dtype, linear.bias is None), []).append(linear)
    layers: Counter[str] = Counter()
    added = 0
    for linears in alike.values():
        kind = _fastest(linears[: max(1, _SAMPLE_BYTES // linears[0].weight.nbytes)])
        layers[(kind or nn.Linear).__name__] += len(linears)
        while kind and linears:
            linear = linears.pop()  # forgotten at once: where weights are packed, two copies of one layer are held at most
            replacement = kind(linear)
            if kind is PackedLinear and shared[linear.weight.data_ptr()] > 1:
                added += linear.weight.nbytes
            for parent, name in places.pop(linear):
                setattr(parent, name, replacement)
    logger.info("linear layers for this CPU: %s; %d bytes added", dict(layers), added)
    return Replaced(layers, added)


def _replaceable(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.dtype in _TOLERANCE
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= _SMALLEST
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def _fastest(sample: list[nn.Linear]) -> type[NativeLinear] | type[PackedLinear] | None:
    """What to make of layers of one shape; None: leave them."""
    inputs = [torch.randn(rows, sample[0].in_features).to(sample[0].weight.dtype) for rows in _BATCHES]
    plain = [_seconds(list(sample), x) for x in inputs]
    best, fastest = _WORTH, None
    for kind in _KINDS:
        try:
            layers: list[nn.Module] = [kind(linear) for linear in sample]
        except Unavailable as reason:
            logger.debug("no %s: %s", kind.__name__, reason)
            continue
        if not all(_equal(sample[0](x), layers[0](x)) for x in inputs):
            logger.warning("%s gives other results than torch and is not used", kind.__name__)
            continue
        ratio = math.prod(_seconds(layers, x) / p for x, p in zip(inputs, plain, strict=True)) ** (1 / len(inputs))
        if ratio < best:
            best, fastest = ratio, kind
    return fastest


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
