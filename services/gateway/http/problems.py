"""Errors as OpenAI's clients know them: a status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import grpc

from services.common.errors import ServiceError

_CODE = grpc.StatusCode
_STATUS = {
    _CODE.INVALID_ARGUMENT: 400,
    _CODE.FAILED_PRECONDITION: 400,
    _CODE.OUT_OF_RANGE: 400,
    _CODE.UNAUTHENTICATED: 401,
    _CODE.PERMISSION_DENIED: 403,
    _CODE.NOT_FOUND: 404,
    _CODE.ALREADY_EXISTS: 409,
    _CODE.ABORTED: 409,
    _CODE.RESOURCE_EXHAUSTED: 429,
    _CODE.UNIMPLEMENTED: 501,
    _CODE.UNAVAILABLE: 503,
    _CODE.DEADLINE_EXCEEDED: 504,
    _CODE.CANCELLED: 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line: what is wrong, and what to do next or what is allowed.
        param: path in the body of what is wrong.
        code: for programs, in lower_snake_case.
        headers: that the answer has, besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def to_http(error: ServiceError) -> HttpError:
    """The same error over HTTP; one that says when to try again says so in Retry-After."""
    status = _STATUS.get(error.code, 500)
    headers = {}
    if error.retry_delay is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_delay)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * error.retry_delay)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    code = error.reason or (error.code.name if status >= 500 else "")
    return HttpError(status, error.message, param=error.field, code=code.lower() or None, headers=headers)
