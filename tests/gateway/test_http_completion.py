"""Answers of the gateway as OpenAI's objects and chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.gateway.http.chat_body import read_chat_body
from services.gateway.http.completion import Completion
from services.gateway.http.values import Value
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2

Response = gateway_pb2.ChatResponse
STOP, LENGTH = usage_pb2.FINISH_REASON_STOP, usage_pb2.FINISH_REASON_LENGTH


def completion(**members: Any) -> Completion:
    return Completion(read_chat_body(Value({"messages": [{"role": "user", "content": "hi"}], **members})), "abc", "tiny")


def delta(index: int, text: str, *tokens: int) -> Response:
    logprobs = [
        gateway_pb2.TokenLogprob(
            token_id=token,
            token=f"t{token}",
            bytes=f"t{token}".encode(),
            logprob=-0.5,
            top=[gateway_pb2.TokenLogprob(token="é", bytes="é".encode(), logprob=float("-inf"))],
        )
        for token in tokens
    ]
    return Response(delta=gateway_pb2.Delta(index=index, text=text, token_ids=tokens, logprobs=logprobs))


def done(index: int, reason: usage_pb2.FinishReason.ValueType, completion_tokens: int) -> Response:
    details = usage_pb2.PromptTokens(text=3, image=4, cached=2)
    usage = usage_pb2.Usage(
        prompt_tokens=7, completion_tokens=completion_tokens, total_tokens=7 + completion_tokens, prompt_tokens_details=details
    )
    return Response(done=gateway_pb2.Done(index=index, finish_reason=reason, usage=usage, last=index == 0))


ANSWER = [
    Response(admitted=gateway_pb2.Admitted(request_id="abc")),
    delta(1, "B", 5),
    delta(0, "a", 1),
    delta(1, "", 6),
    delta(1, "C", 7),
    done(1, STOP, 3),
    delta(0, "d", 2),
    done(0, LENGTH, 5),
]


def chunks_of(answer: Completion, responses: Sequence[Response]) -> list[dict[str, Any]]:
    chunks = [chunk for response in responses for chunk in answer.chunks(response)]
    return [json.loads(json.dumps(chunk, allow_nan=False)) for chunk in [*chunks, *answer.last_chunk()]]


def test_answers_side_by_side_in_one_object() -> None:
    answer = completion(n=2, logprobs=True, top_logprobs=1, return_token_ids=True)
    for response in ANSWER:
        answer.take(response)
    whole = json.loads(json.dumps(answer.whole(), allow_nan=False))
    assert (whole["id"], whole["object"], whole["model"]) == ("chatcmpl-abc", "chat.completion", "tiny")
    first, second = whole["choices"]
    assert (first["index"], first["message"]["content"], first["finish_reason"], first["token_ids"]) == (
        0,
        "ad",
        "length",
        [1, 2],
    )
    assert (second["index"], second["message"]["content"], second["finish_reason"]) == (1, "BC", "stop")
    assert [entry["token"] for entry in second["logprobs"]["content"]] == ["t5", "t6", "t7"]
    [entry, _] = first["logprobs"]["content"]
    assert entry["bytes"] == [116, 49] and entry["logprob"] == -0.5
    assert entry["top_logprobs"] == [{"token": "é", "logprob": -9999.0, "bytes": [195, 169]}]
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (5, 12)
    details = whole["usage"]["prompt_tokens_details"]
    assert (details["text"], details["image_tokens"], details["cached_tokens"], details["video"]) == (3, 4, 2, 0)


def test_chunks_add_up_to_the_object() -> None:
    options = {"n": 2, "logprobs": True, "return_token_ids": True}
    whole, streamed = completion(**options), completion(**options, stream=True, stream_options={"include_usage": True})
    for response in ANSWER:
        whole.take(response)
    *chunks, last = chunks_of(streamed, ANSWER)
    assert last["choices"] == [] and last["usage"] == whole.whole()["usage"]
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for choice in whole.whole()["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert [token for part in mine for token in part.get("token_ids", [])] == choice["token_ids"]
        assert [e for part in mine if part["logprobs"] for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_every_chunk_says_what_the_answer_has_cost_so_far() -> None:
    prompt = usage_pb2.PromptTokens(text=3, image=4)
    answer = [Response(admitted=gateway_pb2.Admitted(request_id="abc", prompt_tokens=prompt)), *ANSWER[1:]]
    asked = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(completion(n=2, stream=True, stream_options=asked), answer)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (1, last["usage"]["completion_tokens"])
    assert all(c["usage"]["total_tokens"] == c["usage"]["completion_tokens"] + 7 for c in chunks)
    without = chunks_of(completion(stream=True, stream_options={"continuous_usage_stats": True}), ANSWER)
    assert not any("usage" in chunk for chunk in without)


def test_without_being_asked_for_nothing_is_told_of_tokens_or_cost() -> None:
    chunks = chunks_of(completion(stream=True), ANSWER)
    assert not any("usage" in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["logprobs"] is None and "token_ids" not in chunk["choices"][0] for chunk in chunks)
    assert len([c for c in chunks if c["choices"][0]["index"] == 1]) == 4  # role, B, C, end: an empty text is no chunk


def test_an_answer_without_a_word_still_begins_and_ends() -> None:
    begun, ended = chunks_of(completion(stream=True), [ANSWER[0], done(0, STOP, 1)])
    assert begun["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert ended["choices"][0]["finish_reason"] == "stop"
