"""Replaces a tower's activations, at load, by ones that pass over the numbers once and take fewer steps for each.

Knows no model family: a module is replaced when it is named a GELU and has neither weights nor parts, and when one of the
kernel's functions gives its results. GELU by the error function stays: torch computes it in one pass, as fast.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch
from torch import nn

from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("tower_kernel.cpp")
_KINDS = ("quick_gelu", "gelu_tanh")
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative: a few roundings of the type


class NativeActivation(nn.Module):
    """An activation of one of the kernel's kinds. The replaced module serves what the kernel does not take.

    Attributes:
        original: the replaced module.
        kind: ``quick_gelu`` or ``gelu_tanh``.

    Raises:
        Unavailable: the kernel cannot be built.
    """

    def __init__(self, original: nn.Module, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        assert kind in _KINDS and dtype in _SUFFIXES
        self.original, self.kind, self._dtype = original, kind, dtype
        self._function = getattr(load_library(_SOURCE), f"triptych_tower_{kind}_{_SUFFIXES[dtype]}")
        self._function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._function.restype = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape to the same."""
        if x.dtype != self._dtype or x.device.type != "cpu" or not x.is_contiguous() or x.requires_grad:
            return self.original(x)  # type: ignore[no-any-return]
        y = torch.empty_like(x)
        self._function(x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
        return y


@torch.inference_mode()
def replace_activations(towers: nn.Module, dtype: torch.dtype) -> int:
    """Replace, in place, the activations that the kernel can stand in for; returns how many."""
    kinds: dict[str, str | None] = {}  # by what a module says of itself, in which alike ones are alike
    replaced = 0
    for parent in [module for module in towers.modules() if not isinstance(module, NativeActivation)]:
        for name, module in list(parent.named_children()):
            if not _replaceable(module):
                continue
            key = f"{type(module)} {vars(module).get('act')} {module}"
            if key not in kinds:
                kinds[key] = _kind(module, dtype)
            if (kind := kinds[key]) is not None:
                setattr(parent, name, NativeActivation(module, kind, dtype))
                replaced += 1
    logger.info("%d activations run natively", replaced)
    return replaced


def _replaceable(module: nn.Module) -> bool:
    state = (module._modules, module._parameters, module._buffers, module._forward_hooks, module._forward_pre_hooks)
    return "GELU" in type(module).__name__ and not any(state)


def _kind(module: nn.Module, dtype: torch.dtype) -> str | None:
    """The kernel's function that gives a module's results; None where there is none."""
    if dtype not in _TOLERANCE:
        return None
    x = torch.linspace(-12, 12, 4001).to(dtype)
    want = module(x)
    for kind in _KINDS:
        try:
            native = NativeActivation(module, kind, dtype)
        except Unavailable as reason:
            logger.warning("activations run by torch, slower: %s", reason)
            return None
        got = native(x)
        if want.dtype == got.dtype and torch.allclose(want, got, rtol=_TOLERANCE[dtype], atol=1e-6):
            return kind
    return None
