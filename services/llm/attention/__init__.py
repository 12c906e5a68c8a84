"""Attention of packed steps over the paged KV pool: what a step looks like, where keys and values live, who computes."""

from __future__ import annotations

import torch

from services.llm.attention.cuda import HALF, PAGE, CudaBackend, unusable
from services.llm.attention.gathered import GatheredBackend
from services.llm.attention.naive import NaiveBackend
from services.llm.attention.native import NativeBackend
from services.llm.attention.plan import Backend
from services.llm.native import paged_kernel
from services.models.registry import UnsupportedModel


def choose_backend(name: str, device: str) -> Backend:
    """The backend that a flag names; ``auto`` is the fastest for the device.

    Raises:
        UnsupportedModel: ``cuda`` was asked for and its kernel cannot run here.
    """
    if name == "naive":
        return NaiveBackend()
    if name == "gathered":
        return GatheredBackend()
    if device == "cpu" and name in ("auto", "native"):
        kernel = paged_kernel.load()
        if kernel is None and name == "native":
            raise UnsupportedModel("--attention-backend native: the log says why there is no kernel; leave the flag out")
        return NativeBackend(kernel) if kernel else GatheredBackend()
    reason = unusable(device)
    if reason is None:
        return CudaBackend()
    if name == "cuda":
        raise UnsupportedModel(f"--attention-backend cuda: {reason}; leave the flag out")
    return GatheredBackend()


def choose_block_size(asked: int, backend: Backend, dtype: torch.dtype) -> int:
    """Tokens in a KV block: what was ``asked`` for, or for 0 what suits the backend."""
    return asked or (PAGE if isinstance(backend, CudaBackend) and dtype in HALF else 16)
