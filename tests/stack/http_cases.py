"""The cases of :mod:`tests.stack.odd_cases` as bodies of the HTTP door, and where in them the errors are."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.stack.odd_cases import FOLDER, Odd, media_file
from triptych.gateway.v1 import gateway_pb2

# What some requests break, in the words of their own bodies; JSON that is none has no place to name.
PARAMS = {
    "no_parts": "messages[0].content",
    "image_part_without_url": "messages[0].content[0].image_url",
    "too_many_images": "messages",
    "n_huge": "n",
    "top_logprobs_huge": "top_logprobs",
    "top_p_neg": "top_p",
    "top_p_0": "top_p",
    "stop_many": "stop",
    "stop_empty": "stop[0]",
    "json_nan": None,
    "deep_json": None,
    "not_utf8_hex": None,
}
_KINDS = {"image": "image_url", "audio": "input_audio", "video": "video_url"}


def media_body(odd: Odd) -> dict[str, Any]:
    """A media case: its file or URL, and the question."""
    shown, asked = odd.request.messages[0].parts
    content = [_media(odd.modality, getattr(shown, odd.modality)), {"type": "text", "text": asked.text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0, "return_token_ids": True}


def media_param(odd: Odd) -> str:
    """Where a media case's errors are."""
    return f"messages[0].content[0].{_KINDS[odd.modality]}.{'data' if odd.modality == 'audio' else 'url'}"


def request_bodies() -> dict[str, bytes]:
    """Every request of requests.json as bytes, by name; model ``m`` is the served one."""
    bodies = {}
    for case in json.loads((FOLDER / "requests.json").read_text())["requests"]:
        if "body" not in case:
            bodies[case["name"]] = bytes.fromhex(case["raw_hex"])
            continue
        body = case["body"]
        for message in body["messages"]:
            if not isinstance(message["content"], str):
                message["content"] = [part for entry in message["content"] for part in _parts(entry)]
        bodies[case["name"]] = json.dumps({"max_tokens": 2, "return_token_ids": True, **body, "model": "default"}).encode()
    return bodies


def _parts(entry: str | dict[str, Any]) -> list[dict[str, Any]]:
    if isinstance(entry, str):
        _, count, kind, name = entry.split(":")
        return int(count) * [_media(kind, gateway_pb2.Media(data=media_file(name)))]
    url = entry.get(entry["type"], {}).get("url", "") if entry["type"] != "text" else ""
    if url.startswith("@media:"):
        return [_media(entry["type"].removesuffix("_url"), gateway_pb2.Media(data=media_file(url.removeprefix("@media:"))))]
    return [entry]


def _media(modality: str, media: gateway_pb2.Media) -> dict[str, Any]:
    kind = _KINDS[modality]
    encoded = base64.b64encode(media.data).decode()
    if modality == "audio":
        return {"type": kind, kind: {"data": encoded, "format": "wav"}}
    return {"type": kind, kind: {"url": media.url or f"data:application/octet-stream;base64,{encoded}"}}
