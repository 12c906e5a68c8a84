"""Requests that are refused, each with the field that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import ask, part, picture, refused, user

from services.gateway.config import GatewayConfig
from services.gateway.model import ServedModel
from services.gateway.sampling import Sampling, read_sampling
from services.gateway.validator import MediaPart, Validator
from services.models.media import Modality
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Directory = Callable[[str], Path]


def validator(checkpoint: Path, **options: Any) -> Validator:
    config = GatewayConfig(model=str(checkpoint), llm="h:1", encoder=options.pop("encoder", "h:2"), **options)
    return Validator(ServedModel(config), config)


@pytest.fixture
def qwen(checkpoint_dir: Directory) -> Validator:
    return validator(
        checkpoint_dir("qwen2_vl"), served_model_name="qwen", limit_mm_per_prompt="image=2", max_text_bytes=1000, max_parts=5
    )


def test_a_good_request(qwen: Validator) -> None:
    url = gateway_pb2.Part(image=gateway_pb2.Media(url="data:,x"))
    messages = [gateway_pb2.Message(role=gateway_pb2.ROLE_SYSTEM, parts=[part("s")]), user("a", b"png", "")]
    messages[1].parts.append(url)
    conversation = qwen.read(gateway_pb2.ChatRequest(messages=messages))
    assert [m.role for m in conversation.messages] == ["system", "user"]
    assert conversation.messages[1].parts == (
        "a",
        MediaPart("messages[1].parts[1].image", Modality.IMAGE, b"png"),
        "",
        MediaPart("messages[1].parts[3].image", Modality.IMAGE, "data:,x"),
    )


@pytest.mark.parametrize("name", ["", "default", "qwen"])
def test_names_of_the_model(qwen: Validator, name: str) -> None:
    qwen.read(ask("hi", model=name))


def test_another_model(qwen: Validator) -> None:
    with refused(grpc.StatusCode.NOT_FOUND, "'qwen'") as errors:
        qwen.read(ask("hi", model="gpt-x"))
    assert errors[0].field == "model"


def message(**fields: Any) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(messages=[user("x"), gateway_pb2.Message(**fields)])


@pytest.mark.parametrize(
    ("request_", "field", "text"),
    [
        (gateway_pb2.ChatRequest(), "messages", "empty"),
        (message(parts=[part("x")]), "messages[1].role", "system, user or assistant"),
        (message(role=9, parts=[part("x")]), "messages[1].role", "got 9"),
        (message(role=2), "messages[1].parts", "empty"),
        (message(role=2, parts=[part("x"), gateway_pb2.Part()]), "messages[1].parts[1]", "holds nothing"),
        (
            message(role=2, parts=[gateway_pb2.Part(image=gateway_pb2.Media())]),
            "messages[1].parts[0].image",
            "neither data nor url",
        ),
        (
            message(role=2, parts=[gateway_pb2.Part(audio=gateway_pb2.Media(data=b"x"))]),
            "messages[1].parts[0].audio",
            "it takes text and image and video",
        ),
        (ask(b"1", b"2", b"3"), "messages", "3 image parts, the limit is 2"),
        (ask(*"abcdef"), "messages", "6 parts, the limit is 5"),
        (gateway_pb2.ChatRequest(messages=[user("x")], cache_salt="ä" * 65), "cache_salt", "at most 128 bytes, got 130"),
        (ask("ä" * 501), "messages", "1002 bytes of text, the limit is 1000"),
    ],
)
def test_shapes(qwen: Validator, request_: gateway_pb2.ChatRequest, field: str, text: str) -> None:
    with refused(INVALID, text) as errors:
        qwen.read(request_)
    assert errors[0].field == field


def test_text_only_deployments_take_no_pictures(checkpoint_dir: Directory) -> None:
    for text_only in (validator(checkpoint_dir("llama")), validator(checkpoint_dir("qwen2_vl"), encoder="")):
        with refused(INVALID, "it takes text") as errors:
            text_only.read(ask("x", picture()))
        assert errors[0].field == "messages[0].parts[1].image"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2], [-0.1, 2.1, 999999, float("nan"), float("inf")]),
        ("top_p", [0.01, 1], [0, -1, 1.01, float("nan")]),
        ("top_k", [0, 1, 4_000_000_000], []),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, float("nan")]),
        ("max_tokens", [1, 100], [0]),
        ("min_tokens", [0, 100], []),
        ("seed", [0, 2**64 - 1], []),
        ("stop", [[], ["a"], ["x" * 256], ["s"] * 16], [["s"] * 17]),
        ("stop[1]", [], [["a", ""], ["a", "x" * 257], ["a", "ä" * 129]]),
        ("stop_token_ids", [[], [0, 999], [5] * 64], [[5] * 65]),
        ("stop_token_ids[1]", [], [[1, 1000], [1, 2**32 - 1]]),
        ("repetition_penalty", [0.01, 1, 10], [0, -1, 10.5, float("nan"), float("inf")]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, float("nan")]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, float("nan")]),
        ("logit_bias", [{}, {0: -100, 999: 100}, dict.fromkeys(range(300), 1)], [dict.fromkeys(range(301), 1)]),
        ("logit_bias[7]", [], [{7: 101}, {7: float("nan")}, {7: float("-inf")}]),
        ("logit_bias[1000]", [], [{1000: 1}]),
        ("priority", [-(2**31), 0, 2**31 - 1], []),
        ("visual_token_keep", [0.01, 1], [0, -1, 1.01, float("nan")]),
        ("n", [1, 8], [0, 9]),
        ("logprobs", [0, 20], [21]),
        ("prompt_logprobs", [], [0, 5, 21]),
        ("json_schema", ["{}", " " * 65536], [" " * 65537]),
        ("regex", ["a+"], ["ä" * 32769]),
        ("grammar", ['start: "a"'], ["x" * 65537]),
        ("json_object", [True, False], []),
        ("choice", [{"texts": ["a", "b"]}], [{"texts": t} for t in ([], [""], ["a", "a"], [str(i) for i in range(257)])]),
    ],
)
def test_sampling_ranges(field: str, good: list[Any], bad: list[Any]) -> None:
    name = field.split("[")[0]
    for value in good:
        read_sampling(sampling_pb2.SamplingParams(**{name: value}), {}, 1000)
    for value in bad:
        with refused(INVALID) as errors:
            read_sampling(sampling_pb2.SamplingParams(**{name: value}), {}, 1000)
        assert errors[0].field == f"sampling.{field}"


def test_what_the_stream_of_the_gateway_cannot_carry() -> None:
    with refused(INVALID, "is served by the language model service only") as errors:
        read_sampling(sampling_pb2.SamplingParams(prompt_logprobs=1), {}, 1000)
    assert errors[0].field == "sampling.prompt_logprobs"


def test_a_constraint_says_itself_where_the_answer_ends() -> None:
    for changes, field in (({"min_tokens": 1}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos")):
        with refused(INVALID, "regex") as errors:
            read_sampling(sampling_pb2.SamplingParams(regex="a", **changes), {}, 1000)
        assert errors[0].field == f"sampling.{field}"
    read_sampling(sampling_pb2.SamplingParams(json_object=False, ignore_eos=True, min_tokens=1), {}, 1000)  # none at all


def test_the_repetition_penalty_of_a_checkpoint_holds_for_greedy_answers_too() -> None:
    def penalty(generation: dict[str, Any], **params: Any) -> float:
        return round(read_sampling(sampling_pb2.SamplingParams(**params), generation, 1000).repetition_penalty, 3)

    assert penalty({}) == 1
    assert penalty({"repetition_penalty": 1.05}) == penalty({"repetition_penalty": 1.05, "do_sample": True}) == 1.05
    assert penalty({"repetition_penalty": 1.05}, repetition_penalty=2) == 2


def test_min_tokens_beyond_max_tokens() -> None:
    with refused(INVALID, "at most max_tokens = 3"):
        read_sampling(sampling_pb2.SamplingParams(max_tokens=3, min_tokens=4), {}, 1000)


def test_defaults_come_from_the_checkpoint() -> None:
    def chosen(generation: dict[str, Any], **params: Any) -> tuple[float, float, int]:
        sampling: Sampling = read_sampling(sampling_pb2.SamplingParams(**params), generation, 1000)
        return round(sampling.temperature, 3), round(sampling.top_p, 3), sampling.top_k

    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert chosen({}) == (0, 1, 0)
    assert chosen({"do_sample": False, "temperature": 0.6, "top_p": 0.9}) == (0, 1, 0)
    assert chosen(sampled) == (0.6, 0.9, 20)
    assert chosen({"do_sample": True, "top_k": None}) == (1, 1, 0)
    assert chosen(sampled, temperature=0) == (0, 0.9, 20)
    assert chosen(sampled, top_p=0.5, top_k=5000) == (0.6, 0.5, 1000)
    assert chosen({"do_sample": False, "top_p": 0.9}, temperature=0.7) == (0.7, 1, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"llm": ""},
        {"llm": "nohost"},
        {"llm": "h:0"},
        {"llm": "h:1,h:1"},
        {"llm": "h:1", "encoder": "h:99999"},
        {"llm": "h:1", "limit_mm_per_prompt": "image"},
        {"llm": "h:1", "limit_mm_per_prompt": "smell=3"},
        {"llm": "h:1", "max_pixels": 0},
        {"llm": "h:1", "max_num_running": 0},
        {"llm": "h:1", "max_model_len": -1},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        GatewayConfig(**options)


def test_good_options() -> None:
    config = GatewayConfig(llm="a:1, [::1]:2", encoder="e:3,", limit_mm_per_prompt="image=4,video=0", max_queued_requests=0)
    assert config.llm_addresses == ("a:1", "[::1]:2") and config.encoder_addresses == ("e:3",)
    assert config.items_per_prompt == {Modality.IMAGE: 4, Modality.VIDEO: 0}
