"""What a stack's caches save, by the counters of its encoder and its language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc


@dataclass(frozen=True)
class Work:
    """Since the start: items that went through the towers, prompt tokens looked up in the prefix cache, and those found there."""

    encoded_items: int
    prefix_query_tokens: int
    prefix_hit_tokens: int

    def since(self, before: Work) -> dict[str, int]:
        """What came on top."""
        earlier = asdict(before)
        return {name: value - earlier[name] for name, value in asdict(self).items()}


def read_work(backends: Mapping[str, str]) -> Work:
    """Ask an "encoder" and an "llm" for their counters."""
    with grpc.insecure_channel(backends["encoder"]) as encoder, grpc.insecure_channel(backends["llm"]) as llm:
        ours: Any = encoder_pb2_grpc.EncoderServiceStub(encoder).GetLoad(encoder_pb2.GetLoadRequest(), timeout=10)
        theirs: Any = llm_pb2_grpc.LlmServiceStub(llm).GetLoad(llm_pb2.GetLoadRequest(), timeout=10)
    return Work(ours.encoded_items, theirs.prefix_query_tokens, theirs.prefix_hit_tokens)
