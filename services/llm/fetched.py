"""Messages of an embedding stream, with large rows left where gRPC put them: parsing a message copies what is in it.

The bytes of ``FetchResponse.chunk.rows.data`` are cut out of the message, the rest is parsed as ever. Source of the encoding:
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.models.wire import varint
from triptych.common.v1 import tensor_pb2
from triptych.encoder.v1 import encoder_pb2

_PATH = tuple(
    (message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)  # the tag of a field that has a length
    for message, name in (
        (encoder_pb2.FetchResponse, "chunk"), (encoder_pb2.ItemChunk, "rows"), (tensor_pb2.TensorChunk, "data")
    )
)  # fmt: skip
_LARGE = 64 * 1024  # bytes; copying fewer costs less than looking for them


@dataclass(frozen=True)
class Fetched:
    """A message, and the bytes of its rows where they were cut out of it."""

    response: encoder_pb2.FetchResponse
    data: memoryview | None = None


def read_response(message: bytes) -> Fetched:
    """Parse a message.

    Raises:
        google.protobuf.message.DecodeError: it is none.
    """
    if len(message) >= _LARGE:
        try:
            cut = _cut(message, 0, len(message), 0)
        except (IndexError, ValueError):
            cut = None  # parsing says what is wrong
        if cut is not None:
            rest, start, stop = cut
            return Fetched(encoder_pb2.FetchResponse.FromString(rest), memoryview(message)[start:stop])
    return Fetched(encoder_pb2.FetchResponse.FromString(message))


def _cut(message: bytes, at: int, end: int, depth: int) -> tuple[bytes, int, int] | None:
    """``message[at:end]`` without the value at the rest of the path, and where that value starts and stops."""
    begin = at
    while at < end:
        field = at
        tag, at = _number(message, at)
        if tag & 7 == 2:
            size, at = _number(message, at)
            stop = at + size
            if stop > end:
                raise ValueError("a field is longer than its message")
            if tag == _PATH[depth]:
                if depth == len(_PATH) - 1:
                    return message[begin:field] + message[stop:end], at, stop
                if (inner := _cut(message, at, stop, depth + 1)) is not None:
                    rest, first, last = inner
                    return message[begin:field] + varint(tag) + varint(len(rest)) + rest + message[stop:end], first, last
            at = stop
        elif tag & 7 == 0:
            _, at = _number(message, at)
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError("a field of no known kind")
    return None


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A varint, and where the next thing starts."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has no end")
