"""What the encoder measures."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.common.metrics import estimate_mismatch as estimate_mismatch

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

items = Counter("triptych_encoder_items", "items that ended", ["outcome"])
stage_seconds = Histogram("triptych_encoder_stage_seconds", "seconds of an item, waiting included", ["stage"], buckets=_SECONDS)
batch_items = Histogram("triptych_encoder_batch_items", "items in a batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
held_bytes = Gauge("triptych_encoder_held_bytes", "bytes of media and embeddings that refs hold")
cached_bytes = Gauge("triptych_encoder_cached_bytes", "bytes of embeddings kept that no ref holds")
cache_lookups = Counter("triptych_encoder_cache_lookups", "items asked for, by whether they were there or under way", ["result"])
cache_evictions = Counter("triptych_encoder_cache_evictions", "embeddings that went to make room")
refs = Gauge("triptych_encoder_refs", "refs held")
fleet_cache_lookups = Counter("triptych_encoder_fleet_cache_lookups", "items looked up in the fleet's cache", ["result"])
