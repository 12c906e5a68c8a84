"""Messages of an embedding stream as bytes, with large rows copied once: protobuf would copy them in and out of a message.

The rows stand at the end, as a second ``chunk`` that says nothing else; who parses a message merges the two. Source of the
encoding: protobuf.dev/programming-guides/encoding ("Last one wins").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from services.models.wire import varint
from triptych.common.v1 import tensor_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc

_PATH = tuple(
    bytes([message.DESCRIPTOR.fields_by_name[name].number << 3 | 2])  # the tag of a field that has a length
    for message, name in (
        (tensor_pb2.TensorChunk, "data"), (encoder_pb2.ItemChunk, "rows"), (encoder_pb2.FetchResponse, "chunk")
    )
)  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A message whose rows are not in it yet.

    Attributes:
        response: a chunk without its data.
        data: the rows' bytes, where the store has them.
    """

    response: encoder_pb2.FetchResponse
    data: memoryview


def to_bytes(message: encoder_pb2.FetchResponse | Sent) -> bytes:
    """What is sent."""
    if isinstance(message, encoder_pb2.FetchResponse):
        return message.SerializeToString()
    front, size = b"", len(message.data)
    for tag in _PATH:
        front = tag + varint(size) + front
        size = len(message.data) + len(front)
    return b"".join((message.response.SerializeToString(), front, message.data))


def add_to_server(servicer: encoder_pb2_grpc.EncoderServiceServicer, server: grpc.aio.Server) -> None:
    """Register the service; its ``Fetch`` may yield :class:`Sent`. The last handler of a method is the one that is called."""
    fetch: Any = grpc.unary_stream_rpc_method_handler(
        servicer.Fetch, request_deserializer=encoder_pb2.FetchRequest.FromString, response_serializer=to_bytes
    )
    name = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(name, {"Fetch": fetch})
