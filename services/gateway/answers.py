"""The answers to one request while they are made: tokens to text, stop strings, and when each answer is over.

Knows no backend: it is fed what a language model says, and tells what of it is for the client.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.gateway.detokenizer import Detokenizer
from services.gateway.sampling import Sampling
from triptych.common.v1 import tensor_pb2, usage_pb2
from triptych.llm.v1 import llm_pb2

STOP, LENGTH = usage_pb2.FINISH_REASON_STOP, usage_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Delta:
    """More of answer ``index``; ``logprobs`` has one entry for each token where they were asked for, else none."""

    text: str
    token_ids: tuple[int, ...] = ()
    first_logits: tensor_pb2.TensorChunk | None = None
    index: int = 0
    logprobs: tuple[llm_pb2.TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Ended:
    """Answer ``index`` is complete."""

    index: int
    finish_reason: usage_pb2.FinishReason.ValueType
    completion_tokens: int
    stage_times: usage_pb2.StageTimes


class Answers:
    """All answers to a request, as many as its sampling says.

    Args:
        end_token_ids: the checkpoint's own.
        max_tokens: most tokens of each.

    Attributes:
        cached_tokens: prompt tokens that the language model had.
        completion_tokens: of all answers.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, end_token_ids: Collection[int], max_tokens: int) -> None:
        end = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_token_ids)))
        self._sampling, self._end, self._max_tokens = sampling, end, max_tokens
        self._open = {
            index: _Answer(Detokenizer(tokenizer, stop=sampling.stop, end_token_ids=end, min_tokens=sampling.min_tokens))
            for index in range(sampling.n)
        }
        self.cached_tokens = self.completion_tokens = 0

    @property
    def over(self) -> bool:
        """Whether all are complete."""
        return not self._open

    @property
    def resumable(self) -> bool:
        """Whether another language model could go on: it takes one answer's beginning, not those of several."""
        return not self.completion_tokens or self._sampling.n == 1

    @property
    def tokens(self) -> Sequence[int]:
        """Those of the one answer so far."""
        return self._open[0].token_ids if self._sampling.n == 1 else ()

    def take(self, response: llm_pb2.GenerateResponse) -> Iterator[Delta | Ended]:
        """What the client is to learn of the language model's next event."""
        match response.WhichOneof("event"):
            case "admitted":
                self.cached_tokens = max(self.cached_tokens, response.admitted.cached_tokens)
            case "delta" if response.delta.index in self._open:
                yield from self._more(response.delta)
            case "done":
                self.cached_tokens = response.done.cached_tokens
                if response.done.index in self._open:
                    yield from self._end_of(response.done.index, response.done.finish_reason, response.done.stage_times)

    def settle(self) -> Iterator[Delta | Ended]:
        """End an answer whose last token has come, when the language model that should say so is lost."""
        for index, answer in list(self._open.items()):
            tokens = answer.token_ids
            if tokens and tokens[-1] in self._end and len(tokens) > self._sampling.min_tokens:
                yield from self._end_of(index, STOP, answer.times())
            elif len(tokens) >= self._max_tokens:
                yield from self._end_of(index, LENGTH, answer.times())

    def _more(self, delta: llm_pb2.Delta) -> Iterator[Delta | Ended]:
        """Add tokens to the text, until a stop string is complete."""
        answer, shown, taken = self._open[delta.index], "", 0
        answer.first_token = answer.first_token or time.monotonic()
        while taken < len(delta.token_ids) and not answer.text.stopped:
            answer.token_ids.append(delta.token_ids[taken])
            shown += answer.text.push(delta.token_ids[taken])
            taken += 1
        self.completion_tokens += taken
        logits = delta.first_logits if delta.HasField("first_logits") else None
        yield Delta(shown, tuple(delta.token_ids[:taken]), logits, delta.index, tuple(delta.logprobs[:taken]))
        if answer.text.stopped:  # the language model, cut off, will not say how long it took
            yield from self._end_of(delta.index, STOP, answer.times())

    def _end_of(
        self, index: int, reason: usage_pb2.FinishReason.ValueType, times: usage_pb2.StageTimes
    ) -> Iterator[Delta | Ended]:
        answer = self._open.pop(index)
        if rest := answer.text.finish(ended_by_token=reason == STOP):
            yield Delta(rest, index=index)
        yield Ended(index, STOP if answer.text.stopped else reason, len(answer.token_ids), times)


class _Answer:
    """One that is not over."""

    def __init__(self, text: Detokenizer) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.first_token = 0.0

    def times(self) -> usage_pb2.StageTimes:
        """What the gateway knows of where the time went."""
        return usage_pb2.StageTimes(decode=time.monotonic() - self.first_token)
