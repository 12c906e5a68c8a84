"""Native RMS norms: equal to the modules they replace, and only where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from services.llm.native import norm
from services.llm.native.norm import NativeNorm, replace_norms
from services.models.hf import transformers
from services.native import build

LLAMA = transformers.models.llama.modeling_llama.LlamaRMSNorm
GEMMA = transformers.models.gemma.modeling_gemma.GemmaRMSNorm


def holder(kind: Any, width: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    made = kind(width, eps=1e-5)
    nn.init.normal_(made.weight, 0.5)
    return nn.ModuleDict({"norm": made.to(dtype)})


def replaced(kind: Any, width: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The original and what became of it."""
    parent = holder(kind, width, dtype)
    original = parent["norm"]  # type: ignore[index]
    if not replace_norms(parent):
        pytest.skip("this machine has no C++ compiler")
    return original, parent["norm"]  # type: ignore[index]


@pytest.mark.parametrize("kind", [LLAMA, GEMMA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 576])
@torch.inference_mode()
def test_equals_the_original(kind: Any, dtype: torch.dtype, width: int) -> None:
    original, fast = replaced(kind, width, dtype)
    assert type(fast) is NativeNorm
    for shape in [(0,), (1,), (1, 7), (2, 3, 5), (1, 1025)]:
        x = torch.randn(*shape, width).to(dtype)
        torch.testing.assert_close(fast(x), original(x), rtol=8e-3 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
    strided = torch.randn(2, 5, 3, width + 16).to(dtype)[..., 16:]
    torch.testing.assert_close(fast(strided), original(strided), rtol=8e-3 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)


@torch.inference_mode()
def test_nan_stays_within_its_row() -> None:
    _, fast = replaced(LLAMA, 64, torch.float32)
    x = torch.ones(3, 64)
    x[1, 5] = torch.nan
    assert torch.isnan(fast(x)).all(dim=1).tolist() == [False, True, False]


class DoubleRMSNorm(nn.Module):
    """Named like the others, computes something else."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_leaves_others_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for kind, width, dtype in [(DoubleRMSNorm, 64, torch.float32), (LLAMA, 24, torch.float32), (LLAMA, 64, torch.float16)]:
        parent = holder(kind, width, dtype)
        assert replace_norms(parent) == 0 and type(parent["norm"]) is kind  # type: ignore[index]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(norm, "load_library", build.load_library.__wrapped__)
    assert replace_norms(holder(LLAMA, 64, torch.float32)) == 0
