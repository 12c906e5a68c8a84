"""The errors that the SDK raises, decoded from google.rpc.Status details.

A program decides by class, or by `code` and `reason`; a person reads `str(error)`, one line. This module does not know
how services make their errors, nor which calls are worth another try.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from triptych.common.v1 import error_pb2

DETAILS_KEY = "grpc-status-details-bin"
SEND_LESS = "send fewer or smaller media, or ask about them one by one (`pages`)"


class TriptychError(Exception):
    """A call that failed.

    Attributes:
        code: the gRPC status code.
        message: one line for a developer.
        request_id: the request's id, as in every service's logs; empty when no request was made.
        reason: a stable UPPER_SNAKE_CASE word for programs, such as CONTEXT_LENGTH_EXCEEDED; may be empty.
        retry_delay: seconds to wait before another try, where the gateway said so.
        metadata: figures that belong to the reason, such as limit and requested.
        violations: pairs of a field's path and what is wrong with it.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        request_id: str = "",
        reason: str = "",
        retry_delay: float | None = None,
        metadata: Mapping[str, str] | None = None,
        violations: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.request_id = request_id
        self.reason = reason
        self.retry_delay = retry_delay
        self.metadata = dict(metadata or {})
        self.violations = list(violations)

    def __str__(self) -> str:
        lines = [f"{path}: {text}" for path, text in self.violations if path not in self.message]
        if not lines or all(text != self.message for _, text in self.violations):
            lines.insert(0, self.message)
        return "; ".join(" ".join(line.split()) for line in lines)


class InvalidArgument(TriptychError):
    """The request is wrong as it stands; `violations` name its fields."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ContextLengthExceeded(InvalidArgument):
    """Prompt and answer do not fit into the model; `metadata` has limit and requested."""


class MediaFileError(InvalidArgument):
    """A media file is missing, empty or unreadable. Raised before anything is sent."""


class NotFound(TriptychError):
    """No such model."""

    code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(TriptychError):
    """The gateway is full; try again after `retry_delay` seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(TriptychError):
    """No gateway answers, it is draining, or it lost its backends."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(TriptychError):
    """The answer was not complete within the timeout."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(TriptychError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class InternalError(TriptychError):
    """A bug in a service; quote `request_id` when reporting it."""

    code = grpc.StatusCode.INTERNAL


class Unimplemented(TriptychError):
    """The server does not know this call: is it a Triptych gateway, and of this version?"""

    code = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(TriptychError):
    """The token is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TriptychError):
    """The token is not allowed to do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class StreamTruncated(TriptychError):
    """The answer's stream ended without saying that the answer is complete."""

    code = grpc.StatusCode.DATA_LOSS


_CODES = {code.value[0]: code for code in grpc.StatusCode}
_BY_CODE = {cls.code: cls for cls in TriptychError.__subclasses__()}
_BY_REASON: dict[str, type[TriptychError]] = {"CONTEXT_LENGTH_EXCEEDED": ContextLengthExceeded}


@dataclass
class Details:
    """What a status carries besides code and message."""

    message: str = ""
    request_id: str = ""
    reason: str = ""
    retry_delay: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()


def decode_details(error: grpc.RpcError) -> Details | None:
    """The details a service attached to `error`; None if it did not come from a service of ours."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == DETAILS_KEY:
            try:
                return decode(error_pb2.ErrorStatus.FromString(bytes(value)))
            except Exception:  # a broken trailer must not hide the error that it came with
                return None
    return None


def decode(status: error_pb2.ErrorStatus) -> Details:
    """The details of a status."""
    details = Details(message=status.message)
    for item in status.details:
        match item.type_url.rpartition("/")[2]:
            case "google.rpc.BadRequest":
                found = error_pb2.BadRequest.FromString(item.value).field_violations
                details.violations += tuple((violation.field, violation.description) for violation in found)
            case "google.rpc.ErrorInfo":
                info = error_pb2.ErrorInfo.FromString(item.value)
                details.reason, details.metadata = info.reason, dict(info.metadata)
            case "google.rpc.RetryInfo":
                delay = error_pb2.RetryInfo.FromString(item.value).retry_delay
                details.retry_delay = delay.seconds + delay.nanos / 1e9
            case "google.rpc.RequestInfo":
                details.request_id = error_pb2.RequestInfo.FromString(item.value).request_id
    return details


def from_rpc_error(error: grpc.RpcError, *, request_id: str = "", message: str = "") -> TriptychError:
    """The typed error for a failed call; `message` replaces the text of one that no service of ours explained."""
    details = decode_details(error) or Details(message=message or error.details() or "")
    return _typed(error.code(), details, request_id)


def from_status(status: error_pb2.ErrorStatus) -> TriptychError:
    """The typed error that a service sent in a message of its own."""
    return _typed(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), decode(status), "")


def _typed(code: grpc.StatusCode, details: Details, request_id: str) -> TriptychError:
    cls = _BY_REASON.get(details.reason) or _BY_CODE.get(code, TriptychError)
    return cls(
        details.message or code.name,
        code=code,
        request_id=details.request_id or request_id,
        reason=details.reason,
        retry_delay=details.retry_delay,
        metadata=details.metadata,
        violations=details.violations,
    )
