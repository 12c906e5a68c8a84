"""Channels and metadata for calls between services, and what a caller may still spend of its deadline."""

from __future__ import annotations

from typing import Any

import grpc

from services.common import logs
from services.common.interceptor import REQUEST_ID_HEADER

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MESSAGE_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
# gRPC's own reconnect backoff grows to two minutes; a restarted service should be found within a second. The last one is how long
# connecting may take.
_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 1_000),
]
# A process that dies closes its connections, which is known at once. A machine that is gone closes none: a call to it fails when
# a ping has had no answer, twenty seconds later at most. Were it less, one that stands still for a while would be taken for gone.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 18_000),
    ("grpc.http2.ping_timeout_ms", 18_000),  # a minute by default, whatever the timeout above
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # services are neighbours: http_proxy in the environment is not meant for them
    *_KEEPALIVE,
    *_RECONNECT,
    *MESSAGE_OPTIONS,
]
DEFAULT_DEADLINE = 300.0  # seconds, where a caller set none
_MARGIN = 0.05  # seconds kept back at each hop, so that the inner deadline passes first


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to another service; make one per address and keep it."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """The current request's id, for the next hop's logs."""
    return ((REQUEST_ID_HEADER, logs.request_id.get()),)


def time_left(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Seconds that the next hop may take; a missing or absurd deadline counts as :data:`DEFAULT_DEADLINE`."""
    remaining = context.time_remaining()
    if remaining is None or remaining > 24 * 3600:
        return DEFAULT_DEADLINE
    return max(0.0, float(remaining) - _MARGIN)
