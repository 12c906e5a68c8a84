"""What the CUDA backend tells torch's paged kernel, with that kernel written out in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.llm.attention import CudaBackend, GatheredBackend, NaiveBackend, choose_backend, choose_block_size, cuda
from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import GroupPlan
from services.llm.config import LlmConfig
from services.llm.layer_groups import Kind
from services.models.registry import UnsupportedModel
from tests.llm import varlen
from tests.llm.attention_steps import random_step
from tests.llm.families import load_case
from tests.llm.test_matrix import Stepped

LAYER = KvLayer(0, Kind.FULL, None, 2, 64, 64, 0, "full_attention")
STEPS = {
    "decodes": ([1, 3, 4, 17, 30], []),
    "a prompt": ([], [(0, 11)]),
    "chunks": ([], [(8, 5), (0, 1), (21, 9)]),
    "mixed": ([12, 1, 33], [(0, 9), (6, 7), (40, 2)]),
}


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel in plain torch; the list gets each call's number of sequences."""
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(len(options["seqused_k"]))
        return varlen.varlen_attn(*arguments, **options)

    monkeypatch.setattr(cuda, "varlen_attn", counted)
    return calls


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without limits of type and size, so that small steps in float32 reach it."""
    refusal = cuda.refusal.__wrapped__
    monkeypatch.setattr(
        cuda, "refusal", lambda layer, dtype, size: refusal(replace(layer, head_dim=64, value_dim=64), cuda.HALF[0], 256)
    )


@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("kind", STEPS)
def test_every_step_is_one_call_that_equals_the_naive_backend(
    kind: str, heads: tuple[int, int], window: int | None, kernel: list[int], any_size: None
) -> None:
    decodes, chunks = STEPS[kind]
    step = random_step(decodes, chunks, heads=heads, window=window, spoil=True)
    expected = step.attend(NaiveBackend())
    assert bool(torch.isfinite(expected).all())
    torch.testing.assert_close(step.attend(CudaBackend()), expected)
    assert kernel == [len(decodes) + len(chunks)]


def test_the_table_is_made_once_a_step(any_size: None) -> None:
    step = random_step([5], [(3, 4)])
    assert step.group.ragged(4, 0) is step.group.ragged(4, 0)


def test_blocks_of_256_tokens_in_16_bits_reach_the_kernel(kernel: list[int]) -> None:
    step = random_step([300, 700], [(250, 20)], head_dim=64, block_size=256, dtype=torch.bfloat16)
    torch.testing.assert_close(step.attend(CudaBackend()), step.attend(NaiveBackend()), atol=1e-2, rtol=1e-2)
    assert kernel == [3]


def test_what_the_kernel_refuses_is_gathered(kernel: list[int]) -> None:
    step = random_step([300, 700], [(250, 20)], head_dim=64, block_size=256)
    torch.testing.assert_close(step.attend(CudaBackend()), step.attend(NaiveBackend()))
    assert kernel == []


@pytest.mark.parametrize(
    ("change", "dtype", "size", "reason"),
    [
        ({}, torch.bfloat16, 256, None),
        ({"kind": Kind.SLIDING, "window": 9}, torch.float16, 512, None),
        ({"head_dim": 256, "value_dim": 256}, torch.bfloat16, 256, None),
        ({}, torch.float32, 256, "16 bits"),
        ({}, torch.bfloat16, 16, "blocks"),
        ({"softcap": 30.0}, torch.bfloat16, 256, "soft cap"),
        ({"kind": Kind.CROSS}, torch.bfloat16, 256, "cross-attention"),
        ({"value_dim": 32}, torch.bfloat16, 256, "values of 32"),
        ({"head_dim": 60, "value_dim": 60}, torch.bfloat16, 256, "heads of 60"),
        ({"head_dim": 512, "value_dim": 512}, torch.bfloat16, 256, "heads of 512"),
    ],
)
def test_what_a_layer_must_have(change: dict[str, Any], dtype: torch.dtype, size: int, reason: str | None) -> None:
    found = cuda.refusal(replace(LAYER, **change), dtype, size)
    assert found is None if reason is None else reason in str(found)


class Compared:
    """The CUDA backend, every layer of every step held against the naive one."""

    def __init__(self) -> None:
        self.backend, self.naive = CudaBackend(), NaiveBackend()
        self.mixed = self.windows = self.masked = 0

    def stores(self, *_: Any) -> bool:
        return False

    def attend(self, pool: Any, layer: KvLayer, group: GroupPlan, *rest: Any) -> torch.Tensor:
        out = self.backend.attend(pool, layer, group, *rest)
        torch.testing.assert_close(out, self.naive.attend(pool, layer, group, *rest), atol=1e-5, rtol=1e-4)
        self.mixed += bool(group.decodes and group.rows)
        self.windows += group.window is not None
        self.masked += group.masked
        return out


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "mistral", "gemma3", "gemma2", "mllama"])
def test_families_through_the_kernel(
    family: str, checkpoint_dir: Callable[[str], Path], kernel: list[int], any_size: None
) -> None:
    run = Stepped(load_case(checkpoint_dir(family)), threshold=7)
    run.runner.builder.backend = compared = Compared()
    run.check(run.case.asks, rows=11)
    run.check(run.case.asks, rows=3)  # on a reused prefix
    assert compared.mixed > 0
    assert (compared.windows > 0) == (family in ("mistral", "gemma3", "gemma2"))
    assert (compared.masked > 0) == (family in ("gemma3", "mllama"))
    assert (max(kernel, default=0) > 1) == (family != "gemma2")  # every layer of Gemma 2 has a soft cap


def test_a_cpu_has_no_cuda_backend() -> None:
    with pytest.raises(UnsupportedModel, match="needs a CUDA device"):
        choose_backend("cuda", "cpu")
    assert isinstance(choose_backend("auto", "cpu"), GatheredBackend)
    assert LlmConfig().block_size == 0 and choose_block_size(0, GatheredBackend(), torch.bfloat16) == 16


def test_auto_takes_the_kernel_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(9, 0)]
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    backend = choose_backend("auto", "cuda:0")
    assert isinstance(backend, CudaBackend)
    assert choose_block_size(0, backend, torch.bfloat16) == 256
    assert choose_block_size(32, backend, torch.bfloat16) == 32
    assert choose_block_size(0, backend, torch.float32) == 16
    capability[0] = (7, 5)
    assert isinstance(choose_backend("auto", "cuda:0"), GatheredBackend)
    with pytest.raises(UnsupportedModel, match=r"8\.0"):
        choose_backend("cuda", "cuda:0")
