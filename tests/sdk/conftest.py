"""A real gRPC server with a fake ChatService behind it, and fake services for `triptych up`."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import message

from tests.patience import PATIENCE
from triptych.common.v1 import error_pb2, media_pb2, usage_pb2
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc

Chat = gateway_pb2.ChatResponse
TYPES = "type.googleapis.com/google.rpc."
PROMPT = usage_pb2.PromptTokens(text=21, image=36)
ITEM = gateway_pb2.MediaEstimate(
    modality=media_pb2.MODALITY_IMAGE,
    tokens=36,
    width=640,
    height=480,
    grid=media_pb2.Grid(t=1, h=12, w=12),
    field="messages[0].parts[0].image",
)


class FakeGateway(gateway_pb2_grpc.ChatServiceServicer):
    """Answers Chat with `script`, which a test may replace, and records every call."""

    def __init__(self) -> None:
        self.address = ""
        self.serving = True
        self.refusals = 0  # of the next calls about pages
        self.requests: list[Any] = []
        self.request_ids: list[str] = []
        self.keys: list[object] = []
        self.remaining: list[float] = []
        self.cancelled = threading.Event()
        self.script: Callable[[Any], Iterator[Chat]] = lambda context: iter([ADMITTED, *DELTAS, DONE])

    def record(self, request: message.Message, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        metadata = dict(context.invocation_metadata())
        self.request_ids.append(str(metadata["x-request-id"]))
        self.keys.append(metadata.get("authorization"))
        self.remaining.append(context.time_remaining())

    def Chat(self, request, context):
        self.record(request, context)
        yield from self.script(context)

    def ChatPages(self, request_iterator, context):
        """Answers with `script`, but "bad" pages with an error; a start whose question is "bad" fails the call."""
        start = next(request_iterator)
        self.record(start, context)
        if start.start.question == "bad":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "question: bad")
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        context.send_initial_metadata((("x-request-id", "r1"),))
        for index, request in enumerate(request_iterator):
            self.requests.append(request)
            if request.page.parts[0].text == "bad":
                error = error_pb2.ErrorStatus(code=3, message="page.parts[0]: bad")
                yield gateway_pb2.ChatPagesResponse(page=index, error=error)
                continue
            for response in self.script(context):
                yield gateway_pb2.ChatPagesResponse(page=index, chat=response)

    def EstimateTokens(self, request, context):
        self.record(request, context)
        cost = gateway_pb2.Cost(encoder_patches=144, prefill_tokens=57, kv_blocks=4, host_bytes=1000)
        return gateway_pb2.EstimateTokensResponse(
            prompt_tokens=57, prompt_tokens_details=PROMPT, media=[ITEM], cost=cost, max_model_len=4096
        )

    def ListModels(self, request, context):
        takes = [media_pb2.MODALITY_IMAGE]
        model = gateway_pb2.Model(name="tiny", family="qwen2_vl", max_model_len=4096, modalities=takes)
        return gateway_pb2.ListModelsResponse(models=[model])

    def GetLoad(self, request, context):
        return gateway_pb2.GetLoadResponse(running_requests=1, total_kv_blocks=100, finished_requests=7)

    def check(self, request, context):
        return b"\x08\x01" if self.serving else b"\x08\x02"

    def wait_for_cancel(self, context: grpc.ServicerContext) -> Iterator[Chat]:
        """A script that goes on until its caller leaves."""
        context.add_callback(self.cancelled.set)
        yield ADMITTED
        yield DELTAS[0]
        self.cancelled.wait(PATIENCE)

    def fail(
        self,
        code: grpc.StatusCode,
        text: str,
        *details: message.Message,
        after: tuple[Chat, ...] = (),
        calls: int = 1000,
    ) -> None:
        """Lets the next `calls` calls fail, each after some messages."""

        def script(context: grpc.ServicerContext) -> Iterator[Chat]:
            if len(self.requests) > calls:
                yield from [ADMITTED, *DELTAS, DONE]
                return
            yield from after
            status = error_pb2.ErrorStatus(code=code.value[0], message=text)
            for item in details:
                status.details.add(type_url=TYPES + item.DESCRIPTOR.name, value=item.SerializeToString())
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(code, text)

        self.script = script


ADMITTED = Chat(admitted=gateway_pb2.Admitted(request_id="r1", model="tiny", prompt_tokens=PROMPT, media=[ITEM]))
DELTAS = [
    Chat(delta=gateway_pb2.Delta(text="It is ", token_ids=[1, 2])),
    Chat(delta=gateway_pb2.Delta(text="", token_ids=[3])),
    Chat(delta=gateway_pb2.Delta(text="ein Kätzchen.", token_ids=[4])),
]
DONE = Chat(
    done=gateway_pb2.Done(
        finish_reason=usage_pb2.FINISH_REASON_STOP,
        usage=usage_pb2.Usage(prompt_tokens=57, completion_tokens=4, total_tokens=61, prompt_tokens_details=PROMPT),
        stage_times=usage_pb2.StageTimes(probe=0.001, wait_for_rows=0.0, decode=0.02),
        last=True,
    )
)


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    gateway_pb2_grpc.add_ChatServiceServicer_to_server(fake, server)
    health = grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(fake.check)}
    )
    server.add_generic_rpc_handlers((health,))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(None).wait(PATIENCE)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(b"\x89PNG cat")
    return path


@pytest.fixture
def events() -> tuple[Chat, ...]:
    """A whole answer."""
    return (ADMITTED, *DELTAS, DONE)
