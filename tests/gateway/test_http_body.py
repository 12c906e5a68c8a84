"""JSON bodies: what becomes of good ones, and which place in bad ones is named."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ServiceError, invalid
from services.gateway.http.chat_body import ChatBody, read_chat_body
from services.gateway.http.paths import Paths
from services.gateway.http.values import Value, read_json
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

HI = [{"role": "user", "content": "hi"}]
PNG = "data:image/png;base64,iVBORw0KGgo="
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def read(**members: Any) -> ChatBody:
    return read_chat_body(read_json(json.dumps({"messages": HI, **members}).encode()))


def texts(message: gateway_pb2.Message) -> list[str]:
    return [part.text for part in message.parts]


def roles(body: ChatBody) -> list[str]:
    return [gateway_pb2.Role.Name(message.role).removeprefix("ROLE_").lower() for message in body.request.messages]


def test_every_option_arrives() -> None:
    body = read(
        model="default",
        temperature=0.5, top_p=0.9, min_p=0, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2,
        visual_token_keep=0.5, seed=2**63, min_tokens=2, n=3, priority=-4, max_completion_tokens=9.0, top_k=-1, ignore_eos=True,
        stop="end", stop_token_ids=[1, 2], logit_bias={"7": -100, "8": 0.5}, logprobs=True, top_logprobs=4, cache_salt="salt",
        stream=True, stream_options={"include_usage": True}, return_token_ids=True, user="somebody", metadata={"a": "b"},
        tool_choice=None, response_format={"type": "text"}, skip_special_tokens=True,
    )  # fmt: skip
    expected = sampling_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, min_p=0, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2,
        visual_token_keep=0.5, seed=2**63, min_tokens=2, n=3, priority=-4, max_tokens=9, top_k=0, ignore_eos=True, stop=["end"],
        stop_token_ids=[1, 2], logit_bias={7: -100, 8: 0.5}, logprobs=4,
    )  # fmt: skip
    assert body.request.sampling == expected
    assert (body.request.model, body.request.cache_salt) == ("default", "salt")
    assert body.stream and body.usage_chunk and body.token_ids


def test_what_is_left_out_stays_open() -> None:
    body = read(max_tokens=None, stop=None, tools=None, logprobs=False, top_logprobs=0)
    assert body.request.sampling == sampling_pb2.SamplingParams()
    assert not (body.stream or body.usage_chunk or body.token_ids)


@pytest.mark.parametrize(
    ("members", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}}}},
         "json_schema", '{"type": "null"}'),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_json": "{}"}, "json_schema", "{}"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
        ({"guided_choice": ["a", "b"]}, "choice", sampling_pb2.Choice(texts=["a", "b"])),
        ({"structured_outputs": {"json": {}, "json_object": False}}, "json_schema", "{}"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", sampling_pb2.Choice(texts=["a"])),
    ],
)  # fmt: skip
def test_constraints(members: dict[str, Any], field: str, value: object) -> None:
    sampling = read(**members).request.sampling
    assert sampling.WhichOneof("constraint") == field and getattr(sampling, field) == value


def test_parts_keep_their_order_and_their_paths() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low", "max_pixels": 1000}},
        {"type": "image_url", "image_url": PNG},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:,x"}},
        {"type": "video_url", "video_url": {"url": "data:,y"}},
    ]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": content, "name": "eve"}]
    body = read(messages=messages, mm_processor_kwargs={"min_pixels": 50})
    media, low = gateway_pb2.Media, gateway_pb2.DETAIL_LOW
    assert list(body.request.messages[1].parts) == [
        gateway_pb2.Part(text="a"),
        gateway_pb2.Part(image=media(url=PNG, detail=low, max_pixels=1000)),
        gateway_pb2.Part(image=media(url=PNG, min_pixels=50)),
        gateway_pb2.Part(audio=media(url="data:;base64,aGk=")),
        gateway_pb2.Part(audio=media(url="data:,x")),
        gateway_pb2.Part(video=media(url="data:,y", min_pixels=50)),
    ]
    assert roles(body) == ["system", "user"]
    for field, path in {
        "messages[1].parts[1].image": "messages[1].content[1].image_url.url",
        "messages[1].parts[1].image.detail": "messages[1].content[1].image_url.detail",
        "messages[1].parts[1].image.max_pixels": "messages[1].content[1].image_url.max_pixels",
        "messages[1].parts[2].image": "messages[1].content[2].image_url",
        "messages[1].parts[3].audio": "messages[1].content[3].input_audio.data",
        "messages[1].parts[5].video": "messages[1].content[5].video_url.url",
        "messages[0].parts[0]": "messages[0].content",
        "messages[1].role": "messages[1].role",
        "messages[1].parts": "messages[1].content",
        "messages": "messages",
        "sampling.temperature": "temperature",
        "sampling.logit_bias[5]": "logit_bias[5]",
    }.items():
        assert body.paths.of(field) == path


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert texts(read(messages=[*HI, {**answer, "tool_calls": None}, *HI]).request.messages[1]) == ["x"]


def test_tools_are_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": {"url": PNG}}]},
        {"role": "user", "content": "well?"},
    ]
    body = read(messages=messages, tools=[WEATHER])
    assert roles(body) == ["system", "user", "assistant", "user", "user"]
    system, _, called, answered, _ = body.request.messages
    assert texts(system)[0] == "be brief" and json.dumps(WEATHER["function"]) in texts(system)[1]
    assert texts(called) == 2 * ['<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>']
    first, opens, _, closes = texts(answered)
    assert (first, opens, closes) == ("<tool_response>\nrain\n</tool_response>", "<tool_response>\n", "\n</tool_response>")
    assert body.paths.of("messages[3].parts[2].image") == "messages[4].content[0].image_url.url"
    assert body.paths.of("messages[4].parts[0]") == "messages[5].content"


def test_tools_without_a_system_message_get_one() -> None:
    body = read(tools=[WEATHER])
    assert roles(body) == ["system", "user"] and "weather" in texts(body.request.messages[0])[0]
    assert body.paths.of("messages[1].parts[0]") == "messages[0].content" and body.paths.of("messages[0].parts[0]") == "tools"
    assert roles(read(tools=[WEATHER], tool_choice="none")) == roles(read(tools=[])) == ["user"]


def part(**members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [members]}]}


@pytest.mark.parametrize(
    ("members", "path", "words"),
    [
        ({"messages": None}, "body", "needs messages"),
        ({"messages": {}}, "messages", "must be an array, got an object"),
        ({"messages": [5]}, "messages[0]", "must be an object, got a number"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "needs a role"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "must be one of system, developer"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be an array"),
        ({"messages": [{"role": "user", "content": "x", "images": []}]}, "messages[0].images", "is not known"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls", "only an assistant"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        (part(text="x"), "messages[0].content[0]", "needs a type"),
        (part(type="image"), "messages[0].content[0].type", "must be text, image_url"),
        (part(type="text"), "messages[0].content[0]", "needs text"),
        (part(type="text", text=5), "messages[0].content[0].text", "must be a string"),
        (part(type="text", text="x", image_url=PNG), "messages[0].content[0].image_url", "is not known"),
        (part(type="image_url", image_url={}), "messages[0].content[0].image_url", "needs a url"),
        (part(type="image_url", image_url={"url": 1}), "messages[0].content[0].image_url.url", "must be a string"),
        (part(type="image_url", image_url={"url": PNG, "detail": "huge"}), "messages[0].content[0].image_url.detail", "low"),
        (part(type="input_audio", input_audio={"format": "wav"}), "messages[0].content[0].input_audio", "needs data"),
        ({"temperature": "hot"}, "temperature", "must be a number, got a string"),
        ({"temperature": True}, "temperature", "must be a number, got true or false"),
        ({"temperature": 10**400}, "temperature", "too large"),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number, got a number"),
        ({"max_tokens": -1}, "max_tokens", "from 0 to 4294967295"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differs from max_tokens"),
        ({"n": -1}, "n", "from 1 to 8"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
        ({"seed": -(2**63) - 1}, "seed", "from -9223372036854775808 to 18446744073709551615"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a string"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[1]", "must be a number"),
        ({"logprobs": 3}, "logprobs", "must be true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "did you mean include_usage?",
        ),
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"web_search_options": {}}, "web_search_options", "leave it out"),
        ({"echo": True}, "echo", "can only be false"),
        ({"chat_template": "{{ x }}"}, "chat_template", "is not known"),
        ({"modalities": ["audio"]}, "modalities", 'can only be ["text"]'),
        ({"tool_choice": "required"}, "tool_choice", "cannot be enforced"),
        ({"tools": [{"type": "web"}]}, "tools[0]", "must be of type function"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema", "a schema"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "cannot go with guided_regex"),
        ({"guided_json": 5}, "guided_json", "must be an object"),
    ],
)
def test_bad_bodies_name_the_place(members: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ServiceError) as refused:
        read(**members)
    error = refused.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field == path
    assert error.message.startswith(f"{path}: ") and words in error.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "line 1, column 1"),
        (b'{"messages": [', "line 1, column 15"),
        (b'{"a": 1} x', "column 10"),
        (b'{"temperature": NaN}', "number"),
        (b'{"temperature": -Infinity}', "number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "number"),
        (b'{"a": "\xff\xfe"}', "byte 7 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"[" + b"1," * (2**21) + b"1]", "commas and brackets"),
    ],
)
def test_what_is_not_json(body: bytes, words: str) -> None:
    with pytest.raises(ServiceError) as refused:
        read_json(body)
    assert refused.value.message.startswith("the body is not JSON: ") and words in refused.value.message
    assert refused.value.reason == "INVALID_JSON"


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        read_json(body)
    except ServiceError as error:
        assert error.reason == "INVALID_JSON"


def test_an_error_is_told_in_the_client_s_words() -> None:
    paths = Paths()
    paths.put("messages[0].parts[0]", "messages[0].content")
    error = paths.translate(invalid("messages[0].parts[0]", "bad", reason="BAD", limit=3))
    assert (error.field, error.message) == ("messages[0].content", "messages[0].content: bad")
    assert (error.reason, error.metadata) == ("BAD", {"limit": "3"})
    other = ServiceError(grpc.StatusCode.UNAVAILABLE, "later", retry_delay=2.0)
    assert paths.translate(other).retry_delay == 2.0


KEYS = st.sampled_from(
    ("messages", "role", "content", "type", "text", "image_url", "url", "detail", "input_audio", "data", "temperature", "stop",
     "n", "logit_bias", "tools", "function", "name", "arguments", "tool_calls", "response_format", "json_schema", "schema",
     "stream", "stream_options", "structured_outputs", "choice", "top_logprobs", "logprobs", "mm_processor_kwargs", "max_tokens",
     "7")
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(
    ("user", "assistant", "tool", "text", "image_url", "function", "json_schema", PNG, "auto")
)  # fmt: skip
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=6))
def test_any_json_is_read_or_refused(members: dict[str, Any]) -> None:
    try:
        read_chat_body(Value(members))
    except ServiceError as error:
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field and error.message.startswith(error.field)


def test_a_seed_below_zero_is_one_of_the_unsigned_ones() -> None:
    seeds = [read(seed=seed).request.sampling.seed for seed in (-1, 2**64 - 1, -(2**63), 0)]
    assert seeds == [2**64 - 1, 2**64 - 1, 2**63, 0]
