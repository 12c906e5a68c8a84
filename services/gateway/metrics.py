"""What the gateway measures. Figures of the ledger are read when /metrics is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.cost import Class

if TYPE_CHECKING:
    from services.gateway.admission import Ledger

_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

admitted = Counter("triptych_gateway_admitted_requests", "requests let in, by class", ["kind"])
refused = Counter("triptych_gateway_refused_requests", "requests that got no room, by reason", ["reason"])
failovers = Counter("triptych_gateway_failovers", "items and answers that went on elsewhere as a server was lost", ["service"])
wait_seconds = Histogram("triptych_gateway_wait_seconds", "seconds until a request was let in", ["kind"], buckets=_SECONDS)


class LedgerCollector(Collector):
    """Figures of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """One family per figure."""
        yield GaugeMetricFamily("triptych_gateway_running_requests", "Requests let in.", value=self._ledger.running)
        queued = GaugeMetricFamily("triptych_gateway_queued_requests", "Requests waiting, by class.", labels=["kind"])
        for kind in Class:
            queued.add_metric([kind.word], self._ledger.queued_by_class[kind])
        yield queued
        for name, text, figures in (
            ("reserved", "What running requests hold of each budget.", self._ledger.reserved),
            ("budget", "How much there is of each, where it is limited.", self._ledger.limit),
        ):
            family = GaugeMetricFamily(f"triptych_gateway_{name}", text, labels=["budget"])
            for budget, amount in figures.items():
                family.add_metric([budget], amount)
            yield family
