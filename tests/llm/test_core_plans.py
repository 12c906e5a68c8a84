"""Random plans of arrivals, rows, aborts and pool sizes: every one yields the tokens of a direct computation."""

from __future__ import annotations

from random import Random

import pytest

from tests.llm.core_draws import FAMILIES, random_engine, random_request
from tests.llm.core_fakes import FakeEngine

PLANS, PARTS = 10_000, 10


def run_plan(seed: int) -> FakeEngine:
    """Draw a plan and carry it out; its answers are checked."""
    random = Random(seed)
    family = random.choice(FAMILIES)
    engine = random_engine(random, family)
    coming = sorted(random.randrange(40) for _ in range(random.randint(1, 10)))
    haste = random.choice((0.1, 0.5, 1.0))
    for step in range(40):
        while coming and coming[0] == step:
            coming.pop(0)
            engine.submit(random_request(random, family, len(coming), engine.requests))
        for request in engine.requests:
            for span in request.sequence.spans:
                if span.arrived < span.rows and random.random() < haste:
                    span.arrived += random.randint(1, span.rows - span.arrived)
                    break
        if engine.requests and random.random() < 0.02:
            engine.abort(random.choice(engine.requests), poisoned=random.random() < 0.5)
        engine.step()
    engine.drive()
    engine.check_answers()
    return engine


@pytest.mark.parametrize("part", range(PARTS))
def test_every_plan_gives_the_tokens_of_a_direct_computation(part: int) -> None:
    share = PLANS // PARTS
    preemptions = forks = hits = poisonings = answers = 0
    for seed in range(part * share, (part + 1) * share):
        try:
            engine = run_plan(seed)
        except Exception as error:
            raise AssertionError(f"plan {seed}") from error
        preemptions += engine.scheduler.preemptions
        forks, hits, poisonings = forks + engine.forks, hits + engine.kv.hits, poisonings + engine.poisonings
        answers += sum(len(r.answers) for r in engine.requests)
    # the plans reach what they are about
    assert preemptions > 100 and forks > 100 and hits > 1000 and poisonings > 10 and answers > 2 * share
