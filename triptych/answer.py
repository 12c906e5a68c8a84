"""Puts the events of one Chat stream together, whichever client reads them. It knows no channel and no clock."""

from array import array
from collections import deque
from dataclasses import dataclass

from triptych.common.v1 import usage_pb2
from triptych.errors import StreamTruncated
from triptych.gateway.v1 import gateway_pb2
from triptych.reports import MediaEstimate, PromptTokens, StageTimes, Usage


class Delta(str):
    """More of the answer: its text, which may be empty, with the token ids generated since the last delta."""

    token_ids: tuple[int, ...]

    def __new__(cls, text: str, token_ids: tuple[int, ...] = ()) -> "Delta":
        delta = super().__new__(cls, text)
        delta.token_ids = token_ids
        return delta

    @property
    def text(self) -> str:
        """The text alone."""
        return str(self)


@dataclass(frozen=True)
class ChatResult:
    """A complete answer.

    `finish_reason` is "stop" or "length"; `prompt_tokens` are counted by modality; `media` has one entry per item, in
    order; `first_logits` (one float per vocabulary entry) is there if include_first_logits asked for it.
    """

    text: str
    usage: Usage
    finish_reason: str
    stage_times: StageTimes
    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: PromptTokens
    model: str
    media: tuple[MediaEstimate, ...]
    first_logits: "array[float] | None" = None


class Answer:
    """The answer so far; `deltas` are those that nobody has taken yet."""

    def __init__(self, request_id: str) -> None:
        self.deltas: deque[Delta] = deque()
        self._request_id = request_id
        self._admitted = gateway_pb2.Admitted(request_id=request_id)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._first_logits: array[float] | None = None
        self._done: gateway_pb2.Done | None = None

    def feed(self, event: gateway_pb2.ChatResponse) -> None:
        """Takes the stream's next event; kinds that this SDK does not know are ignored."""
        match event.WhichOneof("event"):
            case "admitted":
                self._admitted = event.admitted
            case "delta":
                delta = Delta(event.delta.text, tuple(event.delta.token_ids))
                self.deltas.append(delta)
                self._text.append(delta)
                self._token_ids.extend(delta.token_ids)
                if event.delta.HasField("first_logits"):
                    self._first_logits = array("f", event.delta.first_logits.data)
            case "done":
                self._done = event.done

    def finish(self) -> None:
        """Says that the stream has ended.

        Raises:
            StreamTruncated: it ended too early.
        """
        if self._done is None:
            text = "the answer's stream ended before it was complete"
            raise StreamTruncated(text, request_id=self._request_id)

    @property
    def result(self) -> ChatResult:
        """The whole answer.

        Raises:
            RuntimeError: the stream has not been read to its end.
        """
        if self._done is None:
            raise RuntimeError("there is no result yet: read the stream to its end first")
        reason = usage_pb2.FinishReason.Name(self._done.finish_reason)
        return ChatResult(
            text="".join(self._text),
            usage=Usage.from_proto(self._done.usage),
            finish_reason=reason.removeprefix("FINISH_REASON_").lower(),
            stage_times=StageTimes.from_proto(self._done.stage_times),
            request_id=self._admitted.request_id or self._request_id,
            token_ids=tuple(self._token_ids),
            prompt_tokens=PromptTokens.from_proto(self._admitted.prompt_tokens),
            model=self._admitted.model,
            media=tuple(MediaEstimate.from_proto(item) for item in self._admitted.media),
            first_logits=self._first_logits,
        )
