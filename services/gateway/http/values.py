"""JSON that clients sent, read strictly: every refusal names the place in the body."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from services.common.errors import ServiceError, invalid

# Commas and opening brackets, those in texts included. Each can cost 60 bytes of Python objects and 0.1 us; 2 MiB of them are as
# many as a text of the longest allowed length can plausibly hold.
_MAX_MARKS = 2 * 1024 * 1024
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_MAX_NAME = 64
_LEAST_LIKE = 0.75  # of a known name, to be what a client may have meant


@dataclass(frozen=True)
class Value:
    """A JSON value and its path in the body, such as ``messages[0].content``; that of the body itself is empty.

    Every method raises ServiceError (INVALID_ARGUMENT about the path) where the value is of another kind.
    """

    raw: Any
    path: str = ""

    def refuse(self, text: str, *, reason: str | None = None) -> ServiceError:
        """The error about this place."""
        return invalid(self.path or "body", text, reason=reason)

    def text(self) -> str:
        """A string that UTF-8 can carry."""
        if not isinstance(self.raw, str):
            raise self._expected("a string")
        if not self.raw.isascii():
            try:
                self.raw.encode()
            except UnicodeEncodeError as error:
                raise self.refuse(f"character {error.start} is half of a surrogate pair, which is no text") from None
        return self.raw

    def number(self) -> float:
        """A number; whole ones too."""
        if isinstance(self.raw, bool) or not isinstance(self.raw, int | float):
            raise self._expected("a number")
        try:
            return float(self.raw)
        except OverflowError:
            raise self.refuse("is too large a number") from None

    def whole(self, least: int, most: int) -> int:
        """A whole number within what its field can carry; ``5.0`` is one."""
        raw = self.raw
        if isinstance(raw, float) and raw.is_integer():
            raw = int(raw)
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise self._expected("a whole number")
        if not least <= raw <= most:
            raise self.refuse(f"must be a whole number from {least} to {most}")
        return raw

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.raw, bool):
            raise self._expected("true or false")
        return self.raw

    def items(self) -> list[Value]:
        """An array's values."""
        if not isinstance(self.raw, list):
            raise self._expected("an array")
        return [Value(item, f"{self.path}[{index}]") for index, item in enumerate(self.raw)]

    def members(self, known: Collection[str]) -> dict[str, Value]:
        """An object's members but for those that are null. A name that is not ``known`` is refused, with what it may mean."""
        members = {name: self._member(name, raw) for name, raw in self.mapping().items() if raw is not None}
        for name, value in members.items():
            if name not in known:
                near = difflib.get_close_matches(name[:_MAX_NAME], known, 1, _LEAST_LIKE)
                hint = f"did you mean {near[0]}?" if near else "leave it out"
                raise value.refuse(f"is not known here; {hint}", reason="UNKNOWN_FIELD")
        return members

    def mapping(self) -> Mapping[str, Any]:
        """An object as it came."""
        if not isinstance(self.raw, dict):
            raise self._expected("an object")
        return self.raw

    def json(self) -> str:
        """Written again as JSON.

        Raises:
            ServiceError: it is nested too deeply for that.
        """
        try:
            return json.dumps(self.raw, ensure_ascii=False)
        except RecursionError:
            raise self.refuse("is nested too deeply") from None

    def _member(self, name: str, raw: Any) -> Value:
        shown = name[:_MAX_NAME].encode(errors="replace").decode()
        return Value(raw, f"{self.path}.{shown}" if self.path else shown)

    def _expected(self, what: str) -> ServiceError:
        kinds = {str: "a string", bool: "true or false", int: "a number", float: "a number", list: "an array", dict: "an object"}
        return self.refuse(f"must be {what}, got {kinds.get(type(self.raw), 'null')}")


def read_json(body: bytes) -> Value:
    """The body as JSON (RFC 8259): UTF-8, without NaN and infinities.

    Raises:
        ServiceError: INVALID_ARGUMENT; it is something else, or holds more values than any request can use.
    """
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MAX_MARKS:
        raise _not_json(f"it has more than {_MAX_MARKS} commas and brackets")
    try:
        return Value(json.loads(body.decode(), parse_constant=_no_constant))
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}") from None
    except ValueError:
        raise _not_json("it holds a number that is not one, or one of too many digits") from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None


def whole_of(text: str) -> int | None:
    """The whole number that a member's name spells, or None."""
    return int(text) if _WHOLE.fullmatch(text) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _not_json(text: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, f"the body is not JSON: {text}", reason="INVALID_JSON")
