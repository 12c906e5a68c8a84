"""What both clients share: settings, channel options and the state of a stream. The calls themselves are not here."""

from typing import Any

import grpc

from triptych.answer import Answer, ChatResult
from triptych.attempts import Attempts
from triptych.content import MediaPart, Messages
from triptych.errors import InvalidArgument
from triptych.gateway.v1 import gateway_pb2
from triptych.pages_request import PagesOptions, build_start
from triptych.request import MAX_MESSAGE_BYTES, Options, Request, build

DEFAULT_ADDRESS = "127.0.0.1:50050"
DEFAULT_TIMEOUT = 120.0
PAGES_TIMEOUT = 3600.0
CHAT_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["ChatService"].full_name

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
]


class ClientBase:
    """Where the gateway is and how to call it.

    Args:
        address: host:port of the gateway.
        timeout: seconds that a call may take in all, retries included, unless the call says otherwise.
        credentials: TLS credentials; None means plain text.
        token: a bearer token to send with every call.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._credentials = credentials
        self._token = token

    def _attempts(self, timeout: float | None = None, request_id: str | None = None) -> Attempts:
        return Attempts(self.address, self.timeout if timeout is None else timeout, self._token, request_id)

    def _prepare(self, kind: type[Request], messages: Messages, options: Options) -> tuple[Request, Attempts]:
        request = build(kind, messages, options)
        return request, self._attempts(options.get("timeout"), options.get("request_id"))

    def _prepare_pages(
        self, question: str, pages: object, options: PagesOptions
    ) -> tuple[gateway_pb2.ChatPagesRequest, Attempts]:
        if isinstance(pages, str | bytes | MediaPart):
            text = f"must be several, as in a list, not a {type(pages).__name__}; of a PDF they are triptych.pdf(path)"
            raise InvalidArgument(f"pages: {text}", violations=(("pages", text),))
        timeout = options.get("timeout")
        attempts = self._attempts(PAGES_TIMEOUT if timeout is None else timeout, options.get("request_id"))
        return build_start(question, options), attempts


class StreamBase:
    """One answer on its way."""

    def __init__(self, method: Any, request: gateway_pb2.ChatRequest, attempts: Attempts) -> None:
        self._method, self._request, self._attempts = method, request, attempts
        self._answer = Answer(attempts.request_id)
        self._call: Any = None

    @property
    def request_id(self) -> str:
        """The id under which the services log this request."""
        return self._attempts.request_id

    @property
    def result(self) -> ChatResult:
        """The whole answer, once the stream has been read to its end.

        Raises:
            RuntimeError: it has not.
        """
        return self._answer.result
