"""The files, data URLs and requests of tests/data/cases, and what must come of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from PIL import Image

from services.decoding.refusals import TEXTS
from services.models.audio_lengths import RATE
from services.models.media import Clip, Medium, Picture, Recording
from tests.media_files import CASES, DATA, file_bytes, picture
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

FOLDER = DATA / "cases"
OK, INVALID = "ok", "invalid_argument"
CORNERS = ((220, 30, 30), (30, 180, 40), (30, 60, 220), (230, 220, 40))  # upper left and right, lower left and right
# What some requests break, in the words of the protos.
FIELDS = {
    "no_parts": "messages[0].parts",
    "image_part_without_url": "messages[0].parts[0].image",
    "too_many_images": "messages",
    "n_huge": "sampling.n",
    "top_logprobs_huge": "sampling.logprobs",
    "top_p_neg": "sampling.top_p",
    "top_p_0": "sampling.top_p",
    "stop_many": "sampling.stop",
    "stop_empty": "sampling.stop[0]",
    "json_nan": "sampling.temperature",
}
REFUSED_BY_CHOICE = {"float32_tiff", "ztxt_bomb", "one_sample"}  # of the cases that may be taken or refused
# JSON nested too deeply, and JSON that is no UTF-8: a gRPC message has a fixed depth, and gRPC's own code refuses such text.
HTTP_ONLY = {"deep_json", "not_utf8_hex"}


@dataclass(frozen=True)
class Odd:
    """One case.

    Attributes:
        name: as the case is called.
        outcome: ``OK`` or ``INVALID``; where the case allows either, the one that this service has.
        request: what a client sends.
        facts: of media that are taken: size, samples, frames.
        refused: the field that a refusal names, and words of it.
        group: cases that look alike and must not be taken for each other.
    """

    name: str
    outcome: str
    request: gateway_pb2.ChatRequest = field(repr=False)
    modality: str = ""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    refused: tuple[str, list[str]] = ("", [])
    group: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def data(self) -> bytes:
        """The file, where it is one that was sent as bytes."""
        return bytes(getattr(self.request.messages[0].parts[0], self.modality).data)


def media_cases() -> Iterator[Odd]:
    """All of cases.json."""
    words = _refusals()
    for case in json.loads((FOLDER / "cases.json").read_text())["cases"]:
        if case["modality"] == "data_url":
            modality, key, media = "image", case["inline"], gateway_pb2.Media(url=case["inline"])
        else:
            modality, key = case["modality"], case["file"]
            media = gateway_pb2.Media(data=(FOLDER / key).read_bytes())
        request = asking(gateway_pb2.Part(**{modality: media}), gateway_pb2.Part(text="what?"))
        outcome = case["expect"]
        if "alt" in case:
            outcome = INVALID if case["name"] in REFUSED_BY_CHOICE else OK
        refused = (f"messages[0].parts[0].{modality}", words.get((modality, key), []))
        yield Odd(case["name"], outcome, request, modality, case.get("facts", {}), refused, case.get("group", ""))


def request_cases() -> Iterator[Odd]:
    """All of requests.json that gRPC can carry; model ``m`` is the served one."""
    for case in json.loads((FOLDER / "requests.json").read_text())["requests"]:
        if case["name"] in HTTP_ONLY:
            continue
        body = case["body"] if "body" in case else json.loads(bytes.fromhex(case["raw_hex"]))
        messages = [_message(message) for message in body["messages"]]
        request = gateway_pb2.ChatRequest(messages=messages, sampling=_sampling(body))
        yield Odd(case["name"], case["expect"], request, refused=(FIELDS.get(case["name"], ""), []))


def asking(*parts: gateway_pb2.Part, **sampling: Any) -> gateway_pb2.ChatRequest:
    """A request for two tokens and the first one's logits, unless it says otherwise."""
    params = sampling_pb2.SamplingParams(**{"max_tokens": 2, "temperature": 0.0, "include_first_logits": True, **sampling})
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)
    return gateway_pb2.ChatRequest(messages=[message], sampling=params)


def image(data: bytes) -> gateway_pb2.Part:
    return gateway_pb2.Part(image=gateway_pb2.Media(data=data))


def text(words: str) -> gateway_pb2.Part:
    return gateway_pb2.Part(text=words)


def media_file(name: str) -> bytes:
    """What ``@media:NAME`` means: a case's file, or a picture of that size or turn."""
    for case in json.loads((FOLDER / "cases.json").read_text())["cases"]:
        if case["name"] == name:
            return (FOLDER / case["file"]).read_bytes()
    kind, _, rest = name.partition("_")
    if kind == "px":
        width, height = map(int, rest.split("x"))
        return file_bytes(picture(width, height, seed=7))
    assert kind == "exif" and rest in ("o1", "o6"), name
    corners = Image.new("RGB", (48, 32))
    for index, colour in enumerate(CORNERS):
        corners.paste(colour, (24 * (index % 2), 16 * (index // 2), 24 * (index % 2) + 24, 16 * (index // 2) + 16))
    tags = Image.Exif()
    tags[0x112] = int(rest[1:])
    return file_bytes(corners, "JPEG", exif=tags)


@cache
def _media_part(kind: str, name: str) -> gateway_pb2.Part:
    return gateway_pb2.Part(**{kind: gateway_pb2.Media(data=media_file(name))})


def media_of(odd: Odd) -> Medium | None:
    """What its facts say of it, where they say all; a recording whose length they say roughly has none."""
    facts = odd.facts
    if odd.modality == "image":
        return Picture(facts["width"], facts["height"])
    if odd.modality == "audio":
        return None if "duration_tol" in facts else Recording(facts.get("n16k", round(facts["duration_s"] * RATE)))
    if "timestamps_s" in facts:
        times = tuple(map(float, facts["timestamps_s"]))
    else:
        frames = facts.get("n_frames", facts.get("header_frames"))
        last = facts.get("last_ts", (frames - 1) / 25)
        times = tuple(last * index / (frames - 1) for index in range(frames))
    return Clip(facts["width"], facts["height"], len(times), (len(times) - 1) / times[-1], times)


def _refusals() -> dict[tuple[str, str], list[str]]:
    """Words of each refusal, by modality and file or URL."""
    words = {(case["kind"], case["file"].removeprefix("cases/")): _said(case["refused"]) for case in CASES if "refused" in case}
    for entry in json.loads((DATA / "odd_media.json").read_text()):
        if "refused" in entry:
            words[entry.get("modality", "image"), entry.get("file") or entry["url"]] = entry["refused"]
    return words


def _said(code: str) -> list[str]:
    return [TEXTS[code].partition("{")[0]]


def _message(message: dict[str, Any]) -> gateway_pb2.Message:
    content = message["content"]
    parts = [text(content)] if isinstance(content, str) else [part for entry in content for part in _parts(entry)]
    return gateway_pb2.Message(role=gateway_pb2.Role.Value(f"ROLE_{message['role'].upper()}"), parts=parts)


def _parts(entry: str | dict[str, Any]) -> list[gateway_pb2.Part]:
    if isinstance(entry, str):
        word, count, kind, name = entry.split(":")
        assert word == "@repeat"
        return int(count) * [_media_part(kind, name)]
    if entry["type"] == "text":
        return [text(entry["text"])]
    kind = entry["type"].removesuffix("_url")
    url = entry[entry["type"]].get("url")
    if url is None:
        return [gateway_pb2.Part(**{kind: gateway_pb2.Media()})]
    return [_media_part(kind, url.removeprefix("@media:"))]


def _sampling(body: dict[str, Any]) -> sampling_pb2.SamplingParams:
    names = {"logprobs": "", "top_logprobs": "logprobs", "model": "", "messages": ""}
    values = {names.get(name, name): value for name, value in body.items()}
    values.pop("", None)
    return sampling_pb2.SamplingParams(**{"max_tokens": 2, "include_first_logits": True, **values})
