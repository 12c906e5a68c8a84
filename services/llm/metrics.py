"""What /metrics says of the language model: read from the engine when it is asked for, so that steps pay nothing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.llm.engine import Engine


class EngineCollector(Collector):
    """Figures of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One family per figure, those of KV pools by layer group."""
        engine, scheduler, kv = self._engine, self._engine.scheduler, self._engine.scheduler.kv
        yield _gauge("running_sequences", "Sequences in the batch.", len(scheduler.running))
        yield _gauge("waiting_sequences", "Sequences waiting for a place or for rows.", len(scheduler.waiting))
        yield _counter("steps", "Steps run.", engine.steps)
        yield _counter("generated_tokens", "Tokens of answers.", engine.generated)
        yield _counter("preemptions", "Sequences put back to wait because a pool ran out.", scheduler.preemptions)
        yield _counter("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", kv.queries)
        yield _counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", kv.hits)
        blocks = GaugeMetricFamily("triptych_llm_kv_blocks", "KV blocks by layer group and state.", labels=["group", "state"])
        for group, pool in zip(kv.groups, kv.pools, strict=True):
            states = {"free": pool.free, "cached": pool.cached, "used": pool.total - pool.available}
            for state, count in states.items():
                blocks.add_metric([group.kind.value, state], count)
        yield blocks


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"triptych_llm_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"triptych_llm_{name}", text, value=value)
