"""Builds requests for both clients. It checks only what cannot be put on the wire; the gateway validates the rest."""

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, TypeVar, get_args

from triptych.common.v1 import sampling_pb2
from triptych.content import MediaPart, Messages, ModalityName
from triptych.errors import SEND_LESS, InvalidArgument
from triptych.gateway.v1 import gateway_pb2

MAX_MESSAGE_BYTES = 64 * 2**20

_ROLES = {
    "system": gateway_pb2.ROLE_SYSTEM,
    "user": gateway_pb2.ROLE_USER,
    "assistant": gateway_pb2.ROLE_ASSISTANT,
}
_DETAILS = {"auto": gateway_pb2.DETAIL_AUTO, "low": gateway_pb2.DETAIL_LOW, "high": gateway_pb2.DETAIL_HIGH}
_CONSTRAINTS = ("json_schema", "regex", "choice", "grammar", "json_object")
_URL_PARTS: dict[str, ModalityName] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}

Request = TypeVar("Request", gateway_pb2.ChatRequest, gateway_pb2.EstimateTokensRequest)


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when to stop. Left out or None means the checkpoint's own default.

    SamplingParams in the protos has the ranges and limits. At most one of json_schema, regex, choice, grammar and json_object
    says what the answer must match.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool | None
    include_first_logits: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    n: int | None
    priority: int | None
    visual_token_keep: float | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    choice: Iterable[str] | None
    grammar: str | None
    json_object: bool | None


class Options(Sampling, total=False):
    """What a call takes besides its messages.

    media: items that go before the last message's parts.
    model: a name from `models`; "default", the default, is the served model.
    timeout: seconds for the whole call, retries included; None means the client's.
    request_id: the id for the services' logs; None makes one.
    cache_salt: what services keep of the call is only found again by calls with the same salt.
    """

    media: MediaPart | Iterable[MediaPart]
    model: str
    timeout: float | None
    request_id: str | None
    cache_salt: str


def build(kind: type[Request], messages: Messages, options: Options) -> Request:
    """A request of `kind`; timeout and request_id have no place in it.

    Raises:
        InvalidArgument: a role, part or sampling value that has no place in a request, or more than 64 MiB.
        TypeError: an unknown option.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {min(unknown)!r}; there are {', '.join(sorted(Options.__annotations__))}")
    turns = _turns(messages)
    media = options.get("media", ())
    items = [media] if isinstance(media, MediaPart) else list(media)
    if any(isinstance(item, str) for item in items):  # a path, most likely, or the letters of one
        raise _invalid("media", "an item is made by triptych.image, .audio or .video, not a str")
    turns[-1][1][:0] = items
    model = options.get("model", "default")
    _check_unicode("model", model)
    request = kind(
        model=model,
        messages=[_message(index, role, content) for index, (role, content) in enumerate(turns)],
        sampling=_sampling({name: value for name, value in options.items() if name in Sampling.__annotations__}),
    )
    _check_unicode("cache_salt", options.get("cache_salt", ""))
    request.cache_salt = options.get("cache_salt", "")
    size = request.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        text = f"the request has {size / 2**20:.1f} MiB, the limit is {MAX_MESSAGE_BYTES >> 20}; {SEND_LESS}"
        figures = {"limit": str(MAX_MESSAGE_BYTES), "requested": str(size)}
        raise InvalidArgument(text, reason="MESSAGE_TOO_LARGE", metadata=figures)
    return request


def _turns(messages: Messages) -> list[tuple[str, list[Any]]]:
    """At least one role with its parts."""
    parts: list[Any] = [messages] if isinstance(messages, str | MediaPart | Mapping) else list(messages)
    if not any(isinstance(part, Mapping) and "role" in part for part in parts):
        return [("user", parts)]
    turns: list[tuple[str, list[Any]]] = []
    for index, message in enumerate(parts):
        if not isinstance(message, Mapping) or "role" not in message:
            raise _invalid(f"messages[{index}]", "messages and parts cannot be mixed in one list")
        content = message.get("content") or []
        turns.append((message["role"], [content] if isinstance(content, str | MediaPart | Mapping) else list(content)))
    return turns


def _message(index: int, role: str, content: list[Any]) -> gateway_pb2.Message:
    if role not in _ROLES:
        raise _invalid(f"messages[{index}].role", f"{role!r} is not one of {', '.join(_ROLES)}")
    parts = [_part(f"messages[{index}].parts[{position}]", part) for position, part in enumerate(content)]
    return gateway_pb2.Message(role=_ROLES[role], parts=parts)


def _part(path: str, part: object) -> gateway_pb2.Part:
    if isinstance(part, Mapping):
        part = _openai_part(path, part)
    if isinstance(part, str):
        _check_unicode(path, part)
        return gateway_pb2.Part(text=part)
    if isinstance(part, MediaPart) and part.modality in get_args(ModalityName):
        _check_unicode(path, part.url)
        made = gateway_pb2.Part()
        _fill(getattr(made, part.modality), part, f"{path}.{part.modality}")
        return made
    raise _invalid(path, f"a part is a str or made by triptych.image, .audio or .video, not {type(part).__name__}")


def _fill(media: gateway_pb2.Media, part: MediaPart, path: str) -> None:
    if not isinstance(part.detail, str) or part.detail not in _DETAILS:
        raise _invalid(f"{path}.detail", f"{part.detail!r} is not one of {', '.join(_DETAILS)}")
    if part.url:
        media.url = part.url
    else:
        media.data = part.data
    if part.detail != "auto":
        media.detail = _DETAILS[part.detail]
    for name in ("min_pixels", "max_pixels"):
        pixels = getattr(part, name)
        if pixels is None:
            continue
        try:
            setattr(media, name, pixels)
        except (TypeError, ValueError) as error:
            raise _invalid(f"{path}.{name}", f"{pixels!r} is not allowed: {error}") from error


def _openai_part(path: str, part: Mapping[str, Any]) -> str | MediaPart:
    """A part as OpenAI's clients spell it."""
    kind = part.get("type")
    try:
        if kind == "text":
            return str(part["text"])
        if kind in _URL_PARTS:
            source = {"url": part[kind]} if isinstance(part[kind], str) else part[kind]
            look = {name: source[name] for name in ("detail", "min_pixels", "max_pixels") if name in source}
            return MediaPart(_URL_PARTS[kind], url=source["url"], **look)
        if kind == "input_audio":
            return MediaPart("audio", data=base64.b64decode(part[kind]["data"], validate=True))
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(path, f"a malformed {kind} part: {error}") from error
    raise _invalid(path, f"unknown part type {kind!r}")


def _sampling(options: Mapping[str, Any]) -> sampling_pb2.SamplingParams:
    params = sampling_pb2.SamplingParams()
    constraints = [name for name in _CONSTRAINTS if options.get(name) is not None]
    if len(constraints) > 1:
        raise _invalid(f"sampling.{constraints[1]}", f"cannot go with {constraints[0]}: an answer has one constraint at most")
    for name, value in options.items():
        if value is None:
            continue
        try:
            if name in ("stop", "stop_token_ids"):
                getattr(params, name).extend([value] if isinstance(value, str) else value)
            elif name == "logit_bias":
                params.logit_bias.update(value)
            elif name == "choice":
                params.choice.texts.extend([value] if isinstance(value, str) else value)
            elif name == "json_schema" and isinstance(value, Mapping):
                params.json_schema = json.dumps(value)
            else:
                setattr(params, name, value)
        except (TypeError, ValueError) as error:
            raise _invalid(f"sampling.{name}", f"{value!r} is not allowed: {error}") from error
    return params


def _check_unicode(path: str, text: str) -> None:
    """Refuse what UTF-8 cannot carry: half of a surrogate pair, or an argument of the command line that was no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(path, f"character {error.start} is not valid Unicode text") from error


def _invalid(path: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"{path}: {text}", violations=((path, text),))
