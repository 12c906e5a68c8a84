"""How the service and a worker talk, over a pair of sockets: two lengths, a JSON object, raw bytes. Nothing is ever unpickled.

A request: the spec, the file as raw bytes, and with the lengths the descriptor of memory for the result. A reply: JSON only.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTHS = struct.Struct("<II")  # bytes of JSON, raw bytes behind it
MOST_REPLY = 1024**2  # bytes of JSON that a worker may send


def encode(message: dict[str, Any], raw: int = 0) -> tuple[bytes, bytes]:
    """The lengths and the JSON, where so many raw bytes will follow."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), raw), text


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes, int] | None:
    """A request with its file and descriptor, in a worker; None once the service is gone."""
    head, descriptors, _, _ = socket.recv_fds(sock, LENGTHS.size, 1)
    if len(head) < LENGTHS.size or not descriptors:
        return None
    texts, raw = LENGTHS.unpack(head)
    text, data = _exactly(sock, texts), _exactly(sock, raw)
    if text is None or data is None:
        return None
    return json.loads(text), data, descriptors[0]


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(buffer)
