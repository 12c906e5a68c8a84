"""Rotates the queries and keys of a vision tower in one pass each, where transformers takes a dozen.

Knows no model family. An attention module whose ``forward`` calls a function of the usual name, and whose function the kernel
equals, gets a ``forward`` of its own that calls the kernel. The modeling file, and with it every other model, stays as it is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("tower_kernel.cpp")
_NAME = "apply_rotary_pos_emb_vision"
_FUNCTIONS = {torch.float32: "triptych_tower_rotate_float32", torch.bfloat16: "triptych_tower_rotate_bfloat16"}
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}  # relative: a rounding of the type

Rotated = tuple[torch.Tensor, torch.Tensor]


class NativeRotary:
    """The function of transformers, with the same results; the original serves what the kernel does not take.

    Attributes:
        original: the function.

    Raises:
        Unavailable: the kernel cannot be built, or the original computes something else.
    """

    def __init__(self, original: Callable[..., Rotated]) -> None:
        self.original = original
        library, count, pointer = load_library(_SOURCE), ctypes.c_int64, ctypes.c_void_p
        self._functions = {dtype: getattr(library, name) for dtype, name in _FUNCTIONS.items()}
        for function in self._functions.values():
            function.argtypes = (pointer, count, count, pointer, pointer, pointer, count, count, count, ctypes.c_int)
            function.restype = None
        self._check()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        """``q``, ``k`` ``[rows, heads, head_dim]`` and ``cos``, ``sin`` ``[rows, head_dim]`` to new q and k, same types."""
        if not (self._takes(q, cos, sin) and self._takes(k, cos, sin)):
            return self.original(q, k, cos, sin)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _takes(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            x.dtype in self._functions
            and x.ndim == 3
            and x.stride(2) == 1
            and x.shape[2] % 2 == 0
            and cos.shape == sin.shape == (x.shape[0], x.shape[2])
            and all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in (x, cos, sin))
        )

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, heads, width = x.shape
        y = torch.empty(heads, rows, width, dtype=x.dtype)  # as attention reads it
        self._functions[x.dtype](
            x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows, heads, width,
            torch.get_num_threads(),
        )  # fmt: skip
        return y.transpose(0, 1)

    def _check(self) -> None:
        """Compare with the original on random inputs."""
        random = torch.Generator().manual_seed(0)
        for dtype, tolerance in _TOLERANCE.items():
            for width in (8, 72, 80):
                qkv = torch.randn(5, 3, 2, width, generator=random).to(dtype)
                q, k, _ = qkv.unbind(1)
                # not of one angle, so that every number's factors are told apart
                cos, sin = torch.randn(2, 5, width, generator=random).unbind(0)
                try:
                    want = self.original(q, k, cos, sin)
                except Exception as error:
                    raise Unavailable(f"{_NAME} takes something else: {error}") from error
                if not all(_equal(a, b, tolerance) for a, b in zip(want, self(q, k, cos, sin), strict=True)):
                    raise Unavailable(f"{_NAME} computes something else")


@torch.inference_mode()
def replace_rotary(towers: nn.Module) -> int:
    """Let every attention module that the kernel can serve call it; returns how many. Nothing else of them changes."""
    replaced = 0
    for module in towers.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names or "forward" in vars(module):
            continue
        native = _forward(forward)
        if native is not None:
            module.forward = MethodType(native, module)
            replaced += 1
    logger.info("%d attention modules rotate natively", replaced)
    return replaced


@functools.cache
def _forward(forward: FunctionType) -> FunctionType | None:
    """The same function, but for what the name of the rotation means to it; None where there is none."""
    original = forward.__globals__.get(_NAME)
    if not callable(original):
        return None
    try:
        native = NativeRotary(original)
    except Unavailable as reason:
        logger.warning("%s rotates by torch, slower: %s", forward.__qualname__, reason)
        return None
    names = {**forward.__globals__, _NAME: native}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _equal(want: Any, got: torch.Tensor, tolerance: float) -> bool:
    same = isinstance(want, torch.Tensor) and want.dtype == got.dtype and want.shape == got.shape
    return same and torch.allclose(want, got, rtol=tolerance, atol=tolerance)
