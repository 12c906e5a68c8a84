"""Scheduler, KV cache and prefix cache under arbitrary histories: invariants after every step, and everybody ends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from services.llm.sequence import RowSpan, Status
from tests.llm.core_draws import FAMILIES, Family, random_engine, random_request
from tests.llm.core_fakes import FakeEngine, Request


class Core(RuleBasedStateMachine):
    """The fake engine checks blocks, slots, budgets, atoms and overtaking at every step, and answers at the end.

    Pools are drawn small enough to force preemption; sequences of several answers fork at their first token.
    """

    engine: FakeEngine

    @initialize(seed=st.integers(0, 2**20), family=st.sampled_from(FAMILIES))
    def start(self, seed: int, family: Family) -> None:
        self.family, self.added = family, 0
        self.engine = random_engine(Random(seed), family)

    @rule(seed=st.integers(0, 2**20))
    def add(self, seed: int) -> None:
        self.added += 1
        self.engine.submit(random_request(Random(seed), self.family, self.added, self.engine.requests))

    @precondition(lambda self: self.waiting_for_rows())
    @rule(pick=st.integers(0, 100), count=st.integers(1, 6))
    def rows_arrive(self, pick: int, count: int) -> None:
        spans = self.waiting_for_rows()
        span = spans[pick % len(spans)]
        span.arrived = min(span.rows, span.arrived + count)

    @precondition(lambda self: self.engine.scheduler.running or self.engine.scheduler.waiting)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.unfinished())
    @rule(pick=st.integers(0, 100), poisoned=st.booleans())
    def end(self, pick: int, poisoned: bool) -> None:
        """A client goes away, or what was computed for it is not numbers."""
        requests = self.unfinished()
        self.engine.abort(requests[pick % len(requests)], poisoned)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drive()
            self.engine.check_answers()

    def unfinished(self) -> list[Request]:
        return [r for r in self.engine.requests if any(s.status is not Status.FINISHED for s in r.answers)]

    def waiting_for_rows(self) -> list[RowSpan]:
        return [s for r in self.engine.requests for s in r.sequence.spans if s.arrived < s.rows]


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
def test_longer_histories() -> None:
    run_state_machine_as_test(Core, settings=settings(TestCore.settings, max_examples=3000, stateful_step_count=120))
