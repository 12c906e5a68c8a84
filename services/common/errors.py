"""Errors that services raise, and how they travel: ``google.rpc.Status`` in the ``grpc-status-details-bin`` trailer.

Code below the servicers raises :class:`ServiceError`; the interceptor in :mod:`services.common.interceptor` is the only
place that turns it into a gRPC status. Texts are fixed sentences with figures: never an address, a path or a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

from triptych.common.v1 import error_pb2
from triptych.errors import Details, decode, decode_details

DOMAIN = "triptych"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ServiceError(Exception):
    """An error with a gRPC status code and typed details.

    Args:
        code: the status code.
        message: one line: what is wrong, and what to do next or what is allowed.
        field: path of the offending field; becomes a BadRequest violation.
        reason: UPPER_SNAKE_CASE reason; becomes an ErrorInfo together with ``metadata``.
        metadata: figures for programs, such as ``limit`` and ``requested``.
        retry_delay: seconds after which to try again; becomes a RetryInfo.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        metadata: Mapping[str, object] | None = None,
        retry_delay: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.reason = reason
        self.metadata = {k: str(v) for k, v in (metadata or {}).items()}
        self.retry_delay = retry_delay

    def to_proto(self, request_id: str | None = None) -> error_pb2.ErrorStatus:
        """As a status message, with the request's id where one is given."""
        details: list[Message] = []
        if self.field is not None:
            violation = error_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            details.append(error_pb2.BadRequest(field_violations=[violation]))
        if self.reason is not None:
            details.append(error_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        if self.retry_delay is not None:
            retry = error_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(self.retry_delay * 1e9))
            details.append(retry)
        if request_id:
            details.append(error_pb2.RequestInfo(request_id=request_id))
        status = error_pb2.ErrorStatus(code=self.code.value[0], message=self.message)
        status.details.extend(_pack(detail) for detail in details)
        return status

    @classmethod
    def from_proto(cls, status: error_pb2.ErrorStatus) -> ServiceError:
        """The error that another service sent."""
        return cls._decoded(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), decode(status))

    @classmethod
    def from_rpc(cls, error: grpc.aio.AioRpcError, peer: str) -> ServiceError:
        """The error behind a failed call to ``peer`` ("encoder", say): its own details where it sent any."""
        if details := decode_details(error):
            return cls._decoded(error.code(), details)
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            return cls(error.code(), f"the request's time ran out at the {peer}")
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return cls(
                grpc.StatusCode.UNAVAILABLE, f"the {peer} cannot be reached; try again, or look at its logs", retry_delay=1.0
            )
        return cls(grpc.StatusCode.INTERNAL, f"the {peer} failed; its log has the details under the request id")

    @classmethod
    def _decoded(cls, code: grpc.StatusCode, details: Details) -> ServiceError:
        field = details.violations[0][0] if details.violations else None
        reason, delay = details.reason or None, details.retry_delay
        return cls(code, details.message, field=field, reason=reason, metadata=details.metadata, retry_delay=delay)


def invalid(field: str, message: str, *, reason: str | None = None, **metadata: object) -> ServiceError:
    """INVALID_ARGUMENT about one field."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}", field=field, reason=reason, metadata=metadata)


def unavailable(message: str, *, retry_delay: float = 1.0) -> ServiceError:
    """UNAVAILABLE, the only code that clients retry."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, message, retry_delay=retry_delay)


def _pack(detail: Message) -> Any:
    return Any(type_url=f"type.googleapis.com/google.rpc.{detail.DESCRIPTOR.name}", value=detail.SerializeToString())
