"""From the messages of a chat body to the gateway's, part by part and in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.http import tools
from services.gateway.http.paths import Paths
from services.gateway.http.values import Value
from triptych.gateway.v1 import gateway_pb2

_SYSTEM, _USER, _ASSISTANT = gateway_pb2.ROLE_SYSTEM, gateway_pb2.ROLE_USER, gateway_pb2.ROLE_ASSISTANT
_ROLES = {"system": _SYSTEM, "developer": _SYSTEM, "user": _USER, "assistant": _ASSISTANT, "tool": _USER}
# The last five have no effect; some of them are what clients send back of an answer.
_MEMBERS = ("role", "content", "tool_calls", "name", "tool_call_id", "refusal", "annotations", "audio")
_URLS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_TYPES = "text, image_url, input_audio, audio_url or video_url"
_DETAILS = {"auto": gateway_pb2.DETAIL_AUTO, "low": gateway_pb2.DETAIL_LOW, "high": gateway_pb2.DETAIL_HIGH}
_PIXELS = ("min_pixels", "max_pixels")
_UINT64 = (0, 2**64 - 1)

# A part, the JSON path that it came from, and those of its fields whose path is another.
Part = tuple[gateway_pb2.Part, str, Mapping[str, str]]


@dataclass(frozen=True)
class Conversation:
    """Messages of ``request``, and ``paths`` from their fields to the body."""

    request: gateway_pb2.ChatRequest
    paths: Paths

    def add(self, role: gateway_pb2.Role.ValueType, path: str, parts: list[Part]) -> None:
        """One more turn."""
        place = f"messages[{len(self.request.messages)}]"
        self.request.messages.add(role=role)
        self.paths.put(place, path)
        self.paths.put(f"{place}.parts", f"{path}.content")
        self.extend(parts)

    def extend(self, parts: list[Part]) -> None:
        """More parts of the last turn."""
        last = self.request.messages[-1]
        for part, path, fields in parts:
            place = f"messages[{len(self.request.messages) - 1}].parts[{len(last.parts)}]"
            last.parts.append(part)
            self.paths.put(place, path)
            for name, where in fields.items():
                self.paths.put(f"{place}.{name}", where)


def read_messages(
    messages: Value, offered: str, pixels: Mapping[str, int], request: gateway_pb2.ChatRequest, paths: Paths
) -> None:
    """Put the conversation into ``request``.

    Args:
        messages: the array in the body.
        offered: what the model is told of tools; goes to the end of the first system message, or into one of its own.
        pixels: limits of every picture and video that has none of its own.
        request: gets the messages.
        paths: learns where each field came from.

    Raises:
        ServiceError: INVALID_ARGUMENT about a path in the body.
    """
    made = Conversation(request, paths)
    before = ""
    for message in messages.items():
        members = message.members(_MEMBERS)
        if "role" not in members:
            raise message.refuse("needs a role")
        role = members["role"].text()
        if role not in _ROLES:
            raise members["role"].refuse(f"must be one of {', '.join(_ROLES)}")
        first = not request.messages
        if first and offered and _ROLES[role] != _SYSTEM:
            made.add(_SYSTEM, "tools", [_text(offered, "tools")])
        parts = _parts(message, members, role, pixels)
        if role == before == "tool":
            made.extend(parts)  # templates want the turns of user and assistant to alternate
        else:
            made.add(_ROLES[role], message.path, parts)
        if first and offered and _ROLES[role] == _SYSTEM:
            made.extend([_text(f"\n\n{offered}", "tools")])
        before = role


def _parts(message: Value, members: Mapping[str, Value], role: str, pixels: Mapping[str, int]) -> list[Part]:
    parts: list[Part] = []
    content = members.get("content")
    if content is not None and isinstance(content.raw, str):
        parts.append(_text(content.text(), content.path))
    elif content is not None:
        parts += [_part(part, pixels) for part in content.items()]
    elif "tool_calls" not in members:
        raise message.refuse("needs content: a string or an array of parts")
    if role == "tool":
        return _between_tags(parts, message.path)
    if "tool_calls" in members:
        if role != "assistant":
            raise members["tool_calls"].refuse("only an assistant calls tools")
        parts += [_text(tools.call_text(call), call.path) for call in members["tool_calls"].items()]
    return parts


def _between_tags(parts: list[Part], path: str) -> list[Part]:
    if len(parts) == 1 and parts[0][0].WhichOneof("content") == "text":
        return [_text(tools.response_text(parts[0][0].text), path)]
    head, _, tail = tools.response_text("\0").partition("\0")
    return [_text(head, path), *parts, _text(tail, path)]


def _part(part: Value, pixels: Mapping[str, int]) -> Part:
    kind_of = part.mapping().get("type")
    if not isinstance(kind_of, str):
        raise part.refuse(f"needs a type: {_TYPES}")
    if kind_of in ("text", "refusal"):
        return _text(_only(part, kind_of).text(), f"{part.path}.{kind_of}")
    if kind_of == "input_audio":
        return _input_audio(_only(part, kind_of))
    if kind_of not in _URLS:
        raise Value(kind_of, f"{part.path}.type").refuse(f"must be {_TYPES}")
    return _url(_only(part, kind_of), _URLS[kind_of], pixels)


def _only(part: Value, name: str) -> Value:
    members = part.members(("type", name))
    if name not in members:
        raise part.refuse(f"needs {name}")
    return members[name]


def _text(text: str, path: str) -> Part:
    return gateway_pb2.Part(text=text), path, {}


def _input_audio(given: Value) -> Part:
    """Bare base64. Its format is ignored, as the media type of a data URL is: a format is told by the bytes."""
    members = given.members(("data", "format"))
    if "data" not in members:
        raise given.refuse("needs data: the file in base64")
    if "format" in members:
        members["format"].text()
    media = gateway_pb2.Media(url=f"data:;base64,{members['data'].text()}")
    return gateway_pb2.Part(audio=media), given.path, {"audio": members["data"].path}


def _url(given: Value, modality: str, pixels: Mapping[str, int]) -> Part:
    members = {"url": given} if isinstance(given.raw, str) else given.members(("url", "detail", *_PIXELS))
    if "url" not in members:
        raise given.refuse("needs a url; data: URLs such as data:image/png;base64,iVBORw0... hold the file itself")
    part = gateway_pb2.Part()
    media: gateway_pb2.Media = getattr(part, modality)
    media.url = members["url"].text()
    if "detail" in members:
        detail = members["detail"]
        if detail.text() not in _DETAILS:
            raise detail.refuse(f"must be one of {', '.join(_DETAILS)}")
        media.detail = _DETAILS[detail.text()]
    limits = {name: members[name].whole(*_UINT64) for name in _PIXELS if name in members}
    if modality != "audio":
        limits = limits or dict(pixels)
    for name, limit in limits.items():
        setattr(media, name, limit)
    fields = {modality: members["url"].path}
    fields |= {f"{modality}.{name}": value.path for name, value in members.items() if name != "url"}
    return part, given.path, fields
