"""The ledger's refusals, as errors that clients understand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.common.errors import ServiceError, invalid, unavailable
from services.common.metrics import estimate_mismatch
from services.gateway.admission import Busy, NeverFits, NoPool

_BUSY = {
    "QUEUE_FULL": "too many requests are waiting already",
    "WAIT_TOO_LONG": "the request would wait longer than it has time",
    "MEDIA_FULL": "the media of other requests take all the memory there is for them",
    "TENANT_LIMIT": "your key's limit of requests or tokens at once is reached",
}
_BUDGETS = {
    "kv_blocks": "KV blocks for prompt and answer",
    "sequences": "places in a batch",
    "encoder_bytes": "bytes of media at the encoder",
    "host_bytes": "bytes of media",
    "tenant_tokens": "tokens of prompt and answer",
}


@contextmanager
def refusals() -> Iterator[None]:
    """The ledger's refusals, as errors that clients understand; and counts of the backends' that must never happen."""
    try:
        yield
    except NeverFits as error:
        text = f"the request needs {error.requested} {_BUDGETS[error.budget]}, the limit is {error.limit}; send or ask for less"
        reason = f"{'KV' if error.budget == 'kv_blocks' else error.budget.upper()}_CAPACITY_EXCEEDED"
        raise invalid("messages", text, reason=reason, limit=error.limit, requested=error.requested) from None
    except Busy as error:
        text = f"{_BUSY[error.reason]}; try again in {error.retry_after:.1f} s"
        raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, text, reason=error.reason, retry_delay=error.retry_after) from None
    except NoPool:
        raise unavailable("no language model is answering; try again, or look at its logs") from None
    except ServiceError as error:
        estimate_mismatch.inc(error.reason == "ESTIMATE_MISMATCH")
        raise
