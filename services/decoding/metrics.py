"""What decoding measures, in whichever service it runs."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

workers = Gauge("triptych_decode_workers", "workers that can decode")
restarts = Counter("triptych_decode_worker_restarts", "workers that were replaced")
refusals = Counter("triptych_decode_refusals", "files that were not decoded", ["reason"])
