"""One encoder or language model behind the gateway: its channel, what it last said of itself, and its calls.

The only place that speaks their protocols. Their errors come out as :class:`ServiceError`, with the details they sent.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import logs
from services.common.channel import open_channel, outgoing_metadata
from services.common.errors import ServiceError
from services.gateway.prompt import Item, Prompt
from services.gateway.responses import ResponsesLost, SharedResponses
from services.gateway.wire import encode_to_proto, sampling_to_proto, spans_to_proto
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

logger = logging.getLogger(__name__)
POLL_TIMEOUT = 5.0  # seconds
SILENT_SECONDS = 20.0  # without an answer a server counts as gone, as its connection does; a machine may stand still for some


class BackendLost(ServiceError):
    """The server went away during the call or takes no new ones: another may do what it was asked for. UNAVAILABLE.

    Attributes:
        death: names when the server died, if it did; the same for all calls that it died under.
    """

    def __init__(self, text: str, death: tuple[str, int] | None = None) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, text, retry_delay=1.0)
        self.death = death


class MediaLost(ServiceError):
    """Rows of media did not reach the language model, before it said a word. UNAVAILABLE.

    Attributes:
        encoder: address of the encoder that has them no more.
        gone: whether that encoder could not be reached; else it answers, as after a restart.
    """

    def __init__(self, encoder: str, gone: bool) -> None:
        text = "the encoder lost the request's media, as after a restart; try again"
        super().__init__(grpc.StatusCode.UNAVAILABLE, text, retry_delay=1.0)
        self.encoder, self.gone = encoder, gone


class Backend:
    """One server.

    Attributes:
        address: host:port as dialled.
        ready: whether it answers, serves, and holds the same checkpoint: by the last poll, or by a call since.
        late: whether it is ready though it left the last poll without an answer.
        leaving: whether no entry of the operator's list leads to it any more.
        active: requests of this gateway that use it.
        served: requests of this gateway that it was chosen for.
    """

    service: str
    peer: str

    def __init__(self, address: str, fingerprint: str) -> None:
        self.address, self._fingerprint = address, fingerprint
        self.ready = self.late = self.leaving = False
        self.active = self.served = 0
        self._ejected = self._answered = 0.0
        self._returns = 0  # times that it became ready
        self._channel = open_channel(address)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def refresh(self) -> None:
        """Ask for health and load; never raises for a server that is away."""
        asked = time.monotonic()
        if self.leaving:
            self._set_ready(False)
            return
        why = ""
        try:
            request = health_pb2.HealthCheckRequest(service=self.service)
            status = (await self._health.Check(request, timeout=POLL_TIMEOUT)).status
            ready = status == health_pb2.HealthCheckResponse.SERVING and self._matches(await self._load())
            self._answered = time.monotonic()
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - self._answered < SILENT_SECONDS
            ready = self.ready and late
        self.late = bool(why) and ready
        if self.late:
            logs.event(logger, f"{self.peer} late", logging.WARNING, address=self.address, why=why)
        if self._ejected <= asked:  # else the answer is older than what a call has shown since
            self._set_ready(ready, why)

    def eject(self) -> None:
        """A call has shown that it takes no requests: it gets none before it has answered a poll again."""
        self._ejected = time.monotonic()
        self._set_ready(False)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A request uses it. While one does, the channel stays open, whatever the name says that led to it."""
        self.active += 1
        self.served += 1
        try:
            yield
        finally:
            self.active -= 1

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn a failed call's error into ours."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            failure = ServiceError.from_rpc(error, self.peer)
            if failure.reason in ("ENCODER_LOST", "REF_NOT_FOUND"):  # the client has never heard of refs
                raise MediaLost(failure.metadata.get("encoder", ""), failure.reason == "ENCODER_LOST") from error
            # a call that is cancelled here raises nothing: CANCELLED is a server that gave up on it while it stopped
            if failure.reason is None and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self.eject()
                refused = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
                death = None if refused else (self.address, self._returns)
                raise BackendLost(f"the {self.peer} went away; try again, or look at its logs", death) from error
            raise failure from error

    def _set_ready(self, ready: bool, why: str = "") -> None:
        self._returns += ready and not self.ready
        if ready != self.ready:
            logs.event(logger, f"{self.peer} {'ready' if ready else 'not ready'}", address=self.address, why=why)
        self.ready = ready

    async def _load(self) -> str:
        """Poll the load; returns the fingerprint of the checkpoint."""
        raise NotImplementedError

    def _matches(self, fingerprint: str) -> bool:
        if fingerprint in ("", self._fingerprint):
            return True
        names = {"address": self.address, "its": fingerprint, "ours": self._fingerprint}
        logs.event(logger, f"{self.peer} holds another checkpoint", logging.ERROR, **names)
        return False


class Encoder(Backend):
    """One encoder.

    Attributes:
        load: what it last published.
        held: digests of this gateway's items there, with how many requests hold each.
        patches: of those items, as far as no rows have come of them yet.
    """

    service, peer = "triptych.encoder.v1.EncoderService", "encoder"

    def __init__(self, address: str, fingerprint: str) -> None:
        super().__init__(address, fingerprint)
        self.load = encoder_pb2.GetLoadResponse()
        self.held: Counter[bytes] = Counter()
        self.patches = self._elsewhere = 0
        self._stub: Any = encoder_pb2_grpc.EncoderServiceStub(self._channel)

    @property
    def pending(self) -> int:
        """Patches that it has to encode: this gateway's, and as many of others as there were at the last poll."""
        return self.patches + self._elsewhere

    async def encode(self, item: Item, request_id: str, timeout: float) -> str:
        """Hand over one item; returns the id of its rows' ref.

        Raises:
            BackendLost: it is gone, or going.
        """
        request = encode_to_proto(item, request_id)
        with self._errors():
            return str((await self._stub.Encode(request, timeout=timeout, metadata=outgoing_metadata())).ref_id)

    def let_go(self, digest: bytes) -> None:
        """One request less holds an item."""
        self.held[digest] -= 1
        if not self.held[digest]:
            del self.held[digest]

    async def release(self, refs: Sequence[str], timeout: float) -> None:
        """Drop refs; a failure is only logged, because an encoder that is away holds nothing."""
        try:
            await self._stub.Release(encoder_pb2.ReleaseRequest(ref_ids=refs), timeout=timeout, metadata=outgoing_metadata())
        except grpc.aio.AioRpcError as error:
            logs.event(logger, "release failed", logging.WARNING, address=self.address, refs=len(refs), code=error.code().name)

    async def _load(self) -> str:
        self.load = await self._stub.GetLoad(encoder_pb2.GetLoadRequest(), timeout=POLL_TIMEOUT)
        self._elsewhere = max(0, self.load.pending_patches - self.patches)
        return str(self.load.model_fingerprint)


class LanguageModel(Backend):
    """One language model server.

    Attributes:
        load: what it last published.
    """

    service, peer = "triptych.llm.v1.LlmService", "language model"

    def __init__(self, address: str, fingerprint: str) -> None:
        super().__init__(address, fingerprint)
        self.load = llm_pb2.GetLoadResponse()
        self._elsewhere = 0
        self._stub: Any = llm_pb2_grpc.LlmServiceStub(self._channel)
        self._shared = SharedResponses(self._stub)

    @property
    def pending(self) -> int:
        """Requests that it has: this gateway's, and as many of others as there were at the last poll."""
        return self.active + self._elsewhere

    async def generate(
        self,
        prompt: Prompt,
        max_tokens: int,
        refs: Sequence[media_pb2.EmbeddingRef],
        request_id: str,
        timeout: float,
        begun: Sequence[int] = (),
    ) -> AsyncGenerator[llm_pb2.GenerateResponse, None]:
        """Stream an answer, or the rest of one that has ``begun`` elsewhere; closing the iterator cancels the call.

        Raises:
            BackendLost: it is gone, or going.
            MediaLost: an encoder is.
        """
        sampling = sampling_to_proto(prompt.sampling, max_tokens)
        if begun:
            sampling.ClearField("include_first_logits")
        request = llm_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            spans=[span for item, ref in zip(prompt.items, refs, strict=True) for span in spans_to_proto(item, ref)],
            sampling=sampling,
            cache_salt=prompt.cache_salt,
            answer_token_ids=begun,
        )
        tokens_alone = not sampling.include_first_logits and not sampling.HasField("logprobs")
        with self.in_use(), self._shared.inbox() if tokens_alone else nullcontext() as inbox:
            if inbox is not None:
                request.response_stream.CopyFrom(inbox.place)
            call = self._stub.Generate(request, timeout=timeout, metadata=outgoing_metadata())
            try:
                with self._errors():
                    async for response in call if inbox is None else inbox.watch(call):
                        yield response
            except ResponsesLost as error:
                raise BackendLost("the language model sent no more of the answer; try again, or look at its logs") from error
            finally:
                call.cancel()

    async def refresh(self) -> None:
        await super().refresh()
        if self.ready:
            await self._shared.open(self._returns, POLL_TIMEOUT)

    async def close(self) -> None:
        await self._shared.close()
        await super().close()

    async def _load(self) -> str:
        self.load = await self._stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=POLL_TIMEOUT)
        self._elsewhere = max(0, self.load.running_sequences + self.load.waiting_sequences - self.active)
        return self.load.model_fingerprint
