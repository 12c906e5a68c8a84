"""The life of one call: its id, its deadline, and whether a failure is worth another try. It does no IO."""

import random
import time
import uuid

import grpc

from triptych import errors

_TOO_LARGE = "larger than max"
MAX_TRIES = 3
FIRST_BACKOFF = 0.2
LONGEST = 30 * 24 * 3600.0  # seconds; gRPC takes a much later deadline for one that has passed


class Attempts:
    """At most three tries of one call within one deadline, under one request id.

    Only UNAVAILABLE before the first message is tried again: after a message, another try could answer twice.
    """

    def __init__(self, address: str, timeout: float, token: str | None = None, request_id: str | None = None) -> None:
        self.address = address
        self.timeout = timeout
        self.request_id = request_id or uuid.uuid4().hex
        if not timeout > 0:  # NaN too
            raise errors.InvalidArgument(f"timeout: must be more than 0 seconds, got {timeout:g}")
        token = (token or "").strip()  # one from a file ends its line
        for name, text in (("request_id", self.request_id), ("token", token)):
            if not (text.isascii() and text.isprintable()):
                raise errors.InvalidArgument(f"{name}: only printable ASCII characters can travel in a header")
        self.metadata: tuple[tuple[str, str], ...] = (("x-request-id", self.request_id),)
        if token:
            self.metadata += (("authorization", f"Bearer {token}"),)
        self._deadline = time.monotonic() + min(timeout, LONGEST)
        self._tries = 0

    def remaining(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self._deadline - time.monotonic())

    def backoff(self, failure: grpc.RpcError) -> float:
        """Seconds to wait before the next try.

        Raises:
            TriptychError: there is to be no other try.
        """
        self._tries += 1
        error = self.error(failure)
        delay = FIRST_BACKOFF * 2.0 ** (self._tries - 1) * random.uniform(0.5, 1.5)
        delay = max(delay, error.retry_delay or 0.0)
        if error.code is not grpc.StatusCode.UNAVAILABLE or self._tries >= MAX_TRIES or delay >= self.remaining():
            raise error from failure
        return delay

    def error(self, failure: grpc.RpcError, *, answering: bool = False) -> errors.TriptychError:
        """The typed error; `answering` says that messages had arrived."""
        message = ""
        match failure.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED if _TOO_LARGE in (failure.details() or ""):  # gRPC itself says so
                text = f"a message had more bytes than the other side takes ({failure.details()}); {errors.SEND_LESS}"
                return errors.InvalidArgument(text, request_id=self.request_id, reason="MESSAGE_TOO_LARGE")
            case grpc.StatusCode.UNAVAILABLE if answering:
                message = f"the gateway at {self.address} went away during its answer"
            case grpc.StatusCode.UNAVAILABLE:
                message = f"no Triptych gateway answers at {self.address}: start one with `triptych up`"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                message = f"the answer was not complete within {self.timeout:g} s"
            case grpc.StatusCode.UNIMPLEMENTED:
                message = f"the server at {self.address} is not a Triptych gateway of this version"
        return errors.from_rpc_error(failure, request_id=self.request_id, message=message)
