"""Messages of an embedding stream, read without copying their rows, are the messages that protobuf reads."""

from __future__ import annotations

from random import Random

import pytest
import torch
from google.protobuf.message import DecodeError

from services.encoder.sent import Sent, to_bytes
from services.llm.fetched import Fetched, read_response
from services.models.wire import from_chunk, put_chunk
from triptych.encoder.v1 import encoder_pb2


def chunk(item: int, feature: int, rows: torch.Tensor) -> encoder_pb2.FetchResponse:
    response = encoder_pb2.FetchResponse(item=item)
    response.chunk.feature = feature
    response.chunk.rows.data = put_chunk(response.chunk.rows, rows, 3, 3 + len(rows)).tobytes()
    return response


def whole(fetched: Fetched) -> encoder_pb2.FetchResponse:
    """With the bytes put back."""
    response = encoder_pb2.FetchResponse()
    response.CopyFrom(fetched.response)
    if fetched.data is not None:
        response.chunk.rows.data = bytes(fetched.data)
    return response


@pytest.mark.parametrize("rows", [1, 20, 64, 300, 5000])
@pytest.mark.parametrize(("item", "feature"), [(0, 0), (4095, 0), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_left_where_they_are(rows: int, item: int, feature: int, dtype: torch.dtype) -> None:
    sent = torch.randn(rows, 256).to(dtype)
    message = chunk(item, feature, sent).SerializeToString()
    fetched = read_response(message)
    assert (fetched.data is not None) == (len(message) >= 64 * 1024)
    assert fetched.data is None or (fetched.data.obj is message and not fetched.response.chunk.rows.data)
    assert whole(fetched) == chunk(item, feature, sent)
    assert from_chunk(fetched.response.chunk.rows, fetched.data).equal(sent)


def test_fields_in_any_order_and_fields_of_later_versions() -> None:
    rows = torch.randn(200, 128)
    known = chunk(5, 1, rows)
    item, rest = b"\x08\x05", known.SerializeToString()[2:]
    unknown = b"\xc8\x3e\x07" + b"\xd2\x3e\x03abc" + b"\xd9\x3e" + bytes(8) + b"\xe5\x3e" + bytes(4)
    for message in (rest + item, unknown + rest + item, item + unknown + rest):
        assert read_response(message).data is not None
        read = whole(read_response(message))
        read.DiscardUnknownFields()
        assert read == known


def test_large_messages_of_other_kinds() -> None:
    header = encoder_pb2.FetchResponse(header=encoder_pb2.ItemHeader(model_fingerprint="x" * 100_000))
    assert read_response(header.SerializeToString()) == Fetched(header)


def test_damage_is_seen() -> None:
    """Whatever the bytes, they are read as protobuf reads them, or refused as it refuses them, or their checksum is wrong."""
    random = Random(2)
    message = chunk(1, 0, torch.randn(130, 128)).SerializeToString()
    for _ in range(2000):
        damaged = bytearray(message)
        for _ in range(random.randint(1, 3)):
            near_an_end = random.choice([random.randrange(40), len(message) - 1 - random.randrange(40)])
            damaged[near_an_end] = random.randrange(256)
        data = bytes(damaged[: random.choice([len(damaged), random.randrange(70_000)])])
        try:
            expected = encoder_pb2.FetchResponse.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                read_response(data)
            continue
        fetched = read_response(data)
        if whole(fetched) != expected:
            with pytest.raises(ValueError):
                from_chunk(fetched.response.chunk.rows, fetched.data)


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 300, 5000])
def test_what_an_encoder_sends_is_the_message_that_protobuf_would_send(rows: int) -> None:
    sent = torch.randn(rows, 256)
    response = encoder_pb2.FetchResponse(item=7)
    response.chunk.feature = 2
    message = to_bytes(Sent(response, put_chunk(response.chunk.rows, sent, 3, 3 + len(sent))))
    assert encoder_pb2.FetchResponse.FromString(message) == chunk(7, 2, sent)
    fetched = read_response(message)
    assert (fetched.data is not None) == (len(message) >= 64 * 1024)
    assert fetched.data is None or fetched.data.obj is message
    assert from_chunk(fetched.response.chunk.rows, fetched.data).equal(sent)
