"""Decoding steps at fixed sizes on a CPU: the "graph" runs the decoder again on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from services.llm import cuda_graphs
from services.llm.attention import CudaBackend, GatheredBackend
from services.llm.attention.plan import StepPlan
from services.llm.cuda_graphs import Compute, DecodeGraphs, Recorder, graph_sizes, not_recordable, record_decodes
from services.models.registry import UnsupportedModel
from tests.llm.families import Case, load_case
from tests.llm.test_matrix import Stepped


@dataclass
class Recording:
    """Records on a CPU, and notes what a real graph would rely on.

    Attributes:
        memory: by size, the addresses that the computation read.
        replayed: size of each replay.
        slots: where each run of a computation stores.
    """

    case: Case
    memory: dict[int, list[int]] = field(default_factory=dict)
    replayed: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)

    def __call__(self, compute: Compute) -> Compute:
        compute()

        def replay() -> torch.Tensor:
            hidden = compute()
            self.replayed.append(len(hidden))
            return hidden

        return replay

    def forward(self, arguments: dict[str, Any], plan: StepPlan) -> torch.Tensor:
        tensors = [*arguments.values()]
        for group, padding in zip(plan.groups, plan.pool.num_blocks, strict=True):
            tensors += [group.slots, group.decode_blocks, group.decode_first, group.decode_end]
            last = (group.decode_end - 1) // self.case.runner.block_size
            for table, at in zip(group.decode_blocks, last.tolist(), strict=True):
                assert bool((table[at + 1 :] == padding).all()), "a block of an earlier step"
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert self.memory.setdefault(plan.groups[0].decodes, addresses) == addresses, "an input moved"
        self.slots.append(plan.groups[0].slots.tolist())
        return self.case.runner._decode(arguments, plan)


@pytest.fixture(params=["llama", "qwen2_vl", "mistral"])
def recorded(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> Iterator[tuple[Stepped, Recording]]:
    case = load_case(checkpoint_dir(request.param), max_model_len=512)
    recording, runner = Recording(case), case.runner
    runner.graphs = DecodeGraphs(recording.forward, runner.builder, runner._probe_arguments(), 8, 512, recording)
    yield Stepped(case, threshold=7), recording
    for tensor in (*runner.pool.keys.values(), *runner.pool.values.values()):
        assert not tensor[-1].any(), "the padding block was written"


def test_tokens_and_logits_as_sequences_join_and_leave(recorded: tuple[Stepped, Recording]) -> None:
    run, recording = recorded
    asks = [ask for ask in run.case.asks for _ in range(2)][:7]
    run.check(asks, rows=5)  # prompts of unequal length: they begin to decode, and end, one after the other
    run.check(asks[:3], n=2)
    run.check(asks[:1])
    run.check(asks[:1], n=2)
    assert {1, 2, 4, 8} == set(recording.replayed)


def test_preempted_sequences_come_back(recorded: tuple[Stepped, Recording]) -> None:
    run, recording = recorded

    def preempt(step: int) -> None:
        if step in (4, 9) and run.scheduler.running:
            run.scheduler.preempt(run.scheduler.running[0])

    run.check(run.case.asks, before_step=preempt)
    assert run.scheduler.preemptions == 2 and recording.replayed


def test_a_padded_batch_repeats_its_first_row(recorded: tuple[Stepped, Recording]) -> None:
    run, recording = recorded
    run.check(run.case.asks[:1], n=3)
    padded = [slots for slots in recording.slots[4:] if len(slots) == 4]  # behind the recording of every size
    assert padded and all(slots[3] == slots[0] and len(set(slots)) == 3 for slots in padded)


def test_sizes_reach_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(11) == [1, 2, 4, 8, 11]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama", "16 bits"), ("gemma2", "soft cap"), ("mllama", "cross_attention_states"), ("gemma4", "per_layer")],
)
def test_models_that_cannot_be_recorded(family: str, reason: str, checkpoint_dir: Callable[[str], Path]) -> None:
    runner = load_case(checkpoint_dir(family), 0).runner
    assert runner.graphs is None
    runner.builder.backend = CudaBackend()
    assert reason in str(not_recordable(runner.builder, runner._probe_arguments()))
    runner.builder.backend = GatheredBackend()
    assert "not cuda" in str(not_recordable(runner.builder, runner._probe_arguments()))


def test_a_model_that_can_be_recorded(checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_case(checkpoint_dir("llama"), 0, dtype="bfloat16", block_size=256).runner
    runner.builder.backend = CudaBackend()
    assert not_recordable(runner.builder, runner._probe_arguments()) is None

    def fails() -> Recorder:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "Recorder", fails)
    with pytest.raises(UnsupportedModel, match=r"not permitted.*--enforce-eager"):
        record_decodes(runner._decode, runner.builder, runner._probe_arguments(), 4, 512)


def test_the_recorder_runs_once_before_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch.cuda in their order, torch.cuda itself being absent here."""
    happened: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Named) -> None:
            happened.append(f"{self.name} waits for {other.name}")

        def replay(self) -> None:
            happened.append("replay")

    @contextmanager
    def during(what: str) -> Iterator[None]:
        happened.append(f"{what} begins")
        yield
        happened.append(f"{what} ends")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Named("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Named("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: during(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Named("graph"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: during(f"{graph.name} in {pool}"))

    def compute() -> torch.Tensor:
        happened.append("compute")
        return torch.ones(2)

    replay = Recorder()(compute)
    assert happened == [
        "side waits for main", "side begins", "compute", "side ends", "main waits for side",
        "graph in pool begins", "compute", "graph in pool ends",
    ]  # fmt: skip
    assert replay() is replay() and happened[-2:] == ["replay", "replay"]
