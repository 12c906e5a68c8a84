"""Puts the events of one Chat stream together, whichever client reads them. It knows no channel and no clock."""

from array import array
from collections import deque
from dataclasses import dataclass

from triptych.common.v1 import usage_pb2
from triptych.errors import StreamTruncated
from triptych.gateway.v1 import gateway_pb2
from triptych.reports import MediaEstimate, PromptTokens, StageTimes, Usage


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability under the model's raw logits.

    `bytes` are those of its text, which `token` shows as far as they are characters; `top` has the likeliest tokens, likeliest
    first, as many as were asked for.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()

    @classmethod
    def from_proto(cls, proto: gateway_pb2.TokenLogprob) -> "TokenLogprob":
        return cls(proto.token_id, proto.token, proto.bytes, proto.logprob, tuple(map(cls.from_proto, proto.top)))


class Delta(str):
    """More of an answer: its text, which may be empty, with the token ids generated since the last delta.

    `choice` says which of the answers it belongs to, from 0, where several were asked for; `logprobs` has an entry
    for each token where they were asked for, else none.
    """

    token_ids: tuple[int, ...]
    choice: int
    logprobs: tuple[TokenLogprob, ...]

    def __new__(
        cls, text: str, token_ids: tuple[int, ...] = (), choice: int = 0, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> "Delta":
        delta = super().__new__(cls, text)
        delta.token_ids, delta.choice, delta.logprobs = token_ids, choice, logprobs
        return delta

    @property
    def text(self) -> str:
        """The text alone."""
        return str(self)


@dataclass(frozen=True)
class Choice:
    """One of the answers; `finish_reason` is "stop" or "length"."""

    index: int
    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ChatResult:
    """A complete answer.

    `choices` are all answers, as many as `n` asked for; `text`, `finish_reason` and `token_ids` are those of the first.
    `prompt_tokens` are counted by modality; `media` has one entry per item, in order; `first_logits` (one float per vocabulary
    entry) is there if include_first_logits asked for it.
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
    choices: tuple[Choice, ...] = ()


class Answer:
    """The answers so far; `deltas` are those that nobody has taken yet."""

    def __init__(self, request_id: str) -> None:
        self.deltas: deque[Delta] = deque()
        self._request_id = request_id
        self._admitted = gateway_pb2.Admitted(request_id=request_id)
        self._told: dict[int, list[Delta]] = {0: []}
        self._ends: dict[int, gateway_pb2.Done] = {}
        self._first_logits: array[float] | None = None
        self._done: gateway_pb2.Done | None = None

    def feed(self, event: gateway_pb2.ChatResponse) -> None:
        """Takes the stream's next event; kinds that this SDK does not know are ignored."""
        match event.WhichOneof("event"):
            case "admitted":
                self._admitted = event.admitted
            case "delta":
                logprobs = tuple(map(TokenLogprob.from_proto, event.delta.logprobs))
                delta = Delta(event.delta.text, tuple(event.delta.token_ids), event.delta.index, logprobs)
                self.deltas.append(delta)
                self._told.setdefault(delta.choice, []).append(delta)
                if event.delta.HasField("first_logits") and self._first_logits is None:
                    self._first_logits = array("f", event.delta.first_logits.data)
            case "done":
                self._ends[event.done.index] = event.done
                if event.done.last:
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
        choices = tuple(self._choice(index, end) for index, end in sorted(self._ends.items()))
        first = choices[0]
        return ChatResult(
            text=first.text,
            usage=Usage.from_proto(self._done.usage),
            finish_reason=first.finish_reason,
            stage_times=StageTimes.from_proto(self._done.stage_times),
            request_id=self._admitted.request_id or self._request_id,
            token_ids=first.token_ids,
            prompt_tokens=PromptTokens.from_proto(self._admitted.prompt_tokens),
            model=self._admitted.model,
            media=tuple(MediaEstimate.from_proto(item) for item in self._admitted.media),
            first_logits=self._first_logits,
            choices=choices,
        )

    def _choice(self, index: int, end: gateway_pb2.Done) -> Choice:
        told = self._told.get(index, [])
        return Choice(
            index=index,
            text="".join(told),
            finish_reason=usage_pb2.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower(),
            token_ids=tuple(token for delta in told for token in delta.token_ids),
            logprobs=tuple(token for delta in told for token in delta.logprobs),
        )
