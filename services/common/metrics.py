"""What several services measure under one name."""

from __future__ import annotations

from prometheus_client import Counter

estimate_mismatch = Counter("estimate_mismatch", "items whose rows were not those that the gateway planned")
