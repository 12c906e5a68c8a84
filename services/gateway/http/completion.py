"""From the gateway's answer to OpenAI's: one object, or chunks of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.gateway.http.chat_body import ChatBody
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2

_REASONS = {usage_pb2.FINISH_REASON_STOP: "stop", usage_pb2.FINISH_REASON_LENGTH: "length"}
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's word for very unlikely
Json = dict[str, Any]


@dataclass
class _Choice:
    """One of the answers, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    reason: str | None = None


class Completion:
    """Takes in the responses to one request.

    Args:
        asked: what was asked.
        request_id: of the request.
        model: the served model's name.
    """

    def __init__(self, asked: ChatBody, request_id: str, model: str) -> None:
        self._asked, self._model = asked, model
        self._id, self._created = f"chatcmpl-{request_id}", int(time.time())
        self._with_logprobs = asked.request.sampling.HasField("logprobs")
        self._choices: dict[int, _Choice] = {}
        self._done = gateway_pb2.Done()
        self._prompt_tokens = self._completion_tokens = 0  # of a stream, so far

    def take(self, response: gateway_pb2.ChatResponse) -> None:
        """Keep what came, for :meth:`whole`."""
        if response.HasField("delta"):
            delta = response.delta
            choice = self._choices.setdefault(delta.index, _Choice())
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.logprobs += map(_token_logprob, delta.logprobs)
        elif response.HasField("done"):
            self._done = response.done
            self._choices.setdefault(self._done.index, _Choice()).reason = _REASONS[self._done.finish_reason]

    def whole(self) -> Json:
        """The answer in one object."""
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self._choices.items())]
        return {**self._head("chat.completion"), "choices": choices, **self._cost()}

    def chunks(self, response: gateway_pb2.ChatResponse) -> Iterator[Json]:
        """What a response adds to a stream; nothing where there is nothing to show yet."""
        if response.HasField("admitted"):
            self._prompt_tokens = sum(modalities(response.admitted.prompt_tokens).values())
        elif response.HasField("delta"):
            delta = response.delta
            self._completion_tokens += len(delta.token_ids)
            if delta.text or (delta.token_ids and (self._asked.token_ids or self._with_logprobs)):
                yield from self._begun(delta.index)
                yield self._chunk(delta.index, {"content": delta.text}, delta=delta)
        elif response.HasField("done"):
            self._done = response.done
            yield from self._begun(self._done.index)
            yield self._chunk(self._done.index, {}, reason=_REASONS[self._done.finish_reason])

    def last_chunk(self) -> Iterator[Json]:
        """What the stream ends with: its cost, where that was asked for."""
        if self._asked.usage_chunk:
            yield {**self._head("chat.completion.chunk"), "choices": [], **self._cost()}

    def _begun(self, index: int) -> Iterator[Json]:
        if index not in self._choices:
            self._choices[index] = _Choice()
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(self, index: int, delta_body: Json, *, delta: gateway_pb2.Delta | None = None, reason: str | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta_body, "logprobs": None, "finish_reason": reason}
        if delta is not None and self._with_logprobs:
            choice["logprobs"] = {"content": list(map(_token_logprob, delta.logprobs)), "refusal": None}
        if delta is not None and self._asked.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        chunk: Json = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._asked.usage_chunk:
            prompt, answer = self._prompt_tokens, self._completion_tokens
            so_far = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
            chunk["usage"] = so_far if self._asked.running_usage else None
        return chunk

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        logprobs = {"content": choice.logprobs, "refusal": None} if self._with_logprobs else None
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        whole: Json = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}
        return {**whole, "token_ids": choice.token_ids} if self._asked.token_ids else whole

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _cost(self) -> Json:
        usage, prompt = self._done.usage, self._done.usage.prompt_tokens_details
        openai = {"text_tokens": prompt.text, "image_tokens": prompt.image, "audio_tokens": prompt.audio}
        details = {**modalities(prompt), **openai, "cached_tokens": prompt.cached}
        return {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
                "prompt_tokens_details": details,
            },
            "stage_times": {stage.name: seconds for stage, seconds in self._done.stage_times.ListFields()},
        }


def modalities(prompt: usage_pb2.PromptTokens) -> dict[str, int]:
    """Prompt tokens by what they stand for."""
    return {"text": prompt.text, "image": prompt.image, "audio": prompt.audio, "video": prompt.video}


def _token_logprob(token: gateway_pb2.TokenLogprob) -> Json:
    return {**_alternative(token), "top_logprobs": list(map(_alternative, token.top))}


def _alternative(token: gateway_pb2.TokenLogprob) -> Json:
    return {"token": token.token, "logprob": max(token.logprob, _LEAST_LOGPROB), "bytes": list(token.bytes)}
