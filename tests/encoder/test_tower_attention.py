"""Attention of towers by tiles: equal to torch's, called by the towers where nothing is hidden, and by nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.encoder.families import schemes_of
from services.encoder.native import attention
from services.encoder.native.attention import TileAttention
from services.encoder.preprocess import Preprocessor
from services.encoder.towers import Towers
from services.models import media
from services.models.checkpoint import open_checkpoint
from services.native.build import Unavailable

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def tiles() -> None:
    try:
        TileAttention()
    except Unavailable as reason:
        pytest.skip(str(reason))


def heads(batch: int, count: int, queries: int, keys: int, width: int, scale: float = 1.0) -> Heads:
    """Query, key and value as towers have them: parts of rows that lie in memory one after the other."""
    rows = torch.randn(batch, max(queries, keys), 3, count, width) * scale
    query, key, value = (x.transpose(1, 2) for x in rows.to(torch.bfloat16).unbind(2))
    return query[:, :, :queries], key[:, :, :keys], value[:, :, :keys]


def check(got: torch.Tensor, qkv: Heads, scaling: float) -> None:
    query, key, value = (x.float() for x in qkv)
    want = F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2)
    torch.testing.assert_close(got.float(), want, rtol=0, atol=1e-2 * float(want.abs().max()))


@pytest.mark.parametrize("width", [2, 16, 30, 64, 72, 80, 128])
@pytest.mark.parametrize(
    "batch, count, queries, keys", [(1, 4, 64, 64), (2, 2, 65, 65), (1, 1, 1, 95), (3, 2, 31, 96), (1, 2, 988, 988)]
)
def test_equals_attention_in_float32(width: int, batch: int, count: int, queries: int, keys: int) -> None:
    qkv = heads(batch, count, queries, keys, width)
    got = TileAttention()(*qkv, 0.2)
    assert got.shape == (batch, queries, count, width) and got.dtype is torch.bfloat16
    check(got, qkv, 0.2)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    qkv = heads(1, 2, 100, 100, 64, scale=30.0)
    check(TileAttention()(*qkv, 1.0), qkv, 1.0)


def test_what_is_not_a_number_stays_with_its_query_and_its_head() -> None:
    query, key, value = heads(1, 2, 70, 70, 64)
    query[0, 1, 40, 3] = torch.nan
    got = torch.isnan(TileAttention()(query, key, value, 0.1)).all(-1)[0]
    assert got.nonzero().tolist() == [[40, 1]]


def test_several_threads_give_the_same() -> None:
    qkv, threads, made = heads(1, 5, 200, 200, 80), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append(TileAttention()(*qkv, 0.1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.float(), k.float(), v.float(), {}),
        lambda q, k, v: (q, k[:, :, :20], v[:, :, :20], {}),
        lambda q, k, v: (q, k, v, {"attention_mask": torch.ones(1, 1, 80, 80, dtype=torch.bool).tril()}),
        lambda q, k, v: (q, k, v, {"is_causal": True}),
        lambda q, k, v: (q, k, v, {"is_causal": None}),  # of a module that says nothing of it: causal
        lambda q, k, v: (q, k, v, {"position_bias": torch.ones(1, 1, 80, 80, dtype=q.dtype)}),
    ],
    ids=["float32", "few keys", "mask", "causal", "causal by default", "bias"],
)
def test_other_calls_are_left_to_torch(change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention._native() is not None
    monkeypatch.setattr(TileAttention, "__call__", lambda *_: pytest.fail("it is not the kernel's"))
    query, key, value, options = change(*heads(1, 2, 80, 80, 64))
    arguments = {"attention_mask": None, "scaling": 0.1, "is_causal": False, **options}
    out, _ = attention._attention(nn.Module(), query, key, value, **arguments)
    assert out.shape == (1, 80, 2, 64)


@pytest.mark.parametrize(
    "family, used", [("qwen2_vl", True), ("qwen3_vl", True), ("llava", True), ("gemma3", True), ("mllama", False)]
)
def test_towers_see_the_same(
    family: str, used: bool, checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near to float32 as with torch's attention; mllama's towers mask."""
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    pixels = np.random.default_rng(0).integers(0, 255, (300, 420, 3), np.uint8)
    (plan,) = checkpoint.plan([media.Picture(420, 300)])
    item = Preprocessor(checkpoint, tuple(schemes_of(family)))(pixels, plan)
    calls: list[int] = []
    native = TileAttention.__call__
    monkeypatch.setattr(TileAttention, "__call__", lambda *arguments: calls.append(1) or native(*arguments))

    def encode(dtype: str) -> torch.Tensor:
        ((rows, *_),) = Towers(checkpoint, dtype, "cpu").encode([item])
        return rows.float()

    exact, tiled = encode("float32"), encode("bfloat16")
    assert bool(calls) is used
    monkeypatch.setattr(attention, "_native", lambda: None)
    calls.clear()
    plain = encode("bfloat16")
    assert not calls
    assert float((tiled - exact).norm()) < 1.2 * float((plain - exact).norm())
