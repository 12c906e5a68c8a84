"""An encoder and a language model that take a fixed time and compute nothing: ``python -m bench.fake_backends llm --port 0 ...``.

Each runs in a process of its own behind the real protocol, and prints ``ready HOST:PORT``. The language model has ``--places``
sequences at once and makes others wait in order of arrival; the encoder encodes one item after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.channel import open_channel
from services.common.server import SERVER_OPTIONS
from triptych.common.v1 import usage_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class FixedLlm(llm_pb2_grpc.LlmServiceServicer):
    """Sleeps to the first token and from there to the last; prompts with media may take other times than texts."""

    service = "triptych.llm.v1.LlmService"

    def __init__(self, places: int, text: tuple[float, float], media: tuple[float, float]) -> None:
        self._places, self._text, self._media = asyncio.Semaphore(places), text, media
        self._load = llm_pb2.GetLoadResponse(
            total_blocks=1 << 16, block_size=16, max_model_len=4096, max_num_batched_tokens=8192, max_num_seqs=places
        )
        self._encoders: dict[str, Any] = {}

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Context) -> AsyncIterator[llm_pb2.GenerateResponse]:
        yield llm_pb2.GenerateResponse(admitted=llm_pb2.Admitted())
        for ref in {span.ref.id: span.ref for span in request.spans}.values():
            async for _ in self._encoder(ref.encoder_address).Fetch(
                encoder_pb2.FetchRequest(items=[encoder_pb2.FetchItem(ref_id=ref.id)]), timeout=60
            ):
                pass
        first, rest = self._media if request.spans else self._text
        async with self._places:
            await asyncio.sleep(first)
            yield llm_pb2.GenerateResponse(delta=llm_pb2.Delta(token_ids=[5]))
            await asyncio.sleep(rest)
        done = llm_pb2.Done(finish_reason=usage_pb2.FINISH_REASON_LENGTH, completion_tokens=1, last=True)
        yield llm_pb2.GenerateResponse(done=done)

    async def Abort(self, request: llm_pb2.AbortRequest, context: Context) -> llm_pb2.AbortResponse:
        return llm_pb2.AbortResponse()

    async def GetLoad(self, request: llm_pb2.GetLoadRequest, context: Context) -> llm_pb2.GetLoadResponse:
        return self._load

    def _encoder(self, address: str) -> Any:
        if address not in self._encoders:
            self._encoders[address] = encoder_pb2_grpc.EncoderServiceStub(open_channel(address))
        return self._encoders[address]


class FixedEncoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Sleeps for every item, one at a time, in order of arrival; what is released first is never encoded."""

    service = "triptych.encoder.v1.EncoderService"

    def __init__(self, seconds: float, batch_patches: int) -> None:
        self._seconds, self._one = seconds, asyncio.Semaphore(1)
        self._work: dict[str, asyncio.Task[None]] = {}
        self._refs = 0
        self._load = encoder_pb2.GetLoadResponse(
            max_num_batched_patches=batch_patches, max_pending_items=256, max_held_bytes=1 << 32
        )

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Context) -> encoder_pb2.EncodeResponse:
        self._refs += 1
        self._work[str(self._refs)] = asyncio.create_task(self._encode())
        return encoder_pb2.EncodeResponse(ref_id=str(self._refs))

    async def Fetch(self, request: encoder_pb2.FetchRequest, context: Context) -> AsyncIterator[encoder_pb2.FetchResponse]:
        await asyncio.wait([self._work[item.ref_id] for item in request.items if item.ref_id in self._work])
        yield encoder_pb2.FetchResponse()

    async def Release(self, request: encoder_pb2.ReleaseRequest, context: Context) -> encoder_pb2.ReleaseResponse:
        for ref in request.ref_ids:
            if task := self._work.pop(ref, None):
                task.cancel()
        return encoder_pb2.ReleaseResponse()

    async def GetLoad(self, request: encoder_pb2.GetLoadRequest, context: Context) -> encoder_pb2.GetLoadResponse:
        return self._load

    async def _encode(self) -> None:
        async with self._one:
            await asyncio.sleep(self._seconds)


async def _serve(args: argparse.Namespace) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    if args.kind == "llm":
        llm = FixedLlm(args.places, (args.text[0], args.text[1]), (args.media[0], args.media[1]))
        llm_pb2_grpc.add_LlmServiceServicer_to_server(llm, server)
        name = llm.service
    else:
        encoder = FixedEncoder(args.seconds, args.batch_patches)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(encoder, server)
        name = encoder.service
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="bench.fake_backends", description=__doc__)
    parser.add_argument("kind", choices=["llm", "encoder"])
    parser.add_argument("--places", type=int, default=4, help="llm: sequences at once")
    parser.add_argument("--text", type=float, nargs=2, default=[0.1, 0.1], help="llm: seconds to the first token, and on")
    parser.add_argument("--media", type=float, nargs=2, default=[0.1, 0.1], help="llm: the same for prompts with media")
    parser.add_argument("--seconds", type=float, default=0.1, help="encoder: for an item")
    parser.add_argument("--batch-patches", type=int, default=1024, help="encoder: as published")
    uvloop.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
