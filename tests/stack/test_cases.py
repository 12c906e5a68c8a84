"""Every case of tests/data/cases through a running stack: its stated outcome, alone and beside others, and nothing left behind."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image

from scripts.local_stack import local_stack
from services.common.errors import ServiceError
from services.decoding.images import decode_image
from services.decoding.sound import decode_sound
from services.decoding.specs import ImageSpec, SoundSpec
from services.models.audio_lengths import RATE
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.layout import PromptLayout, Turn
from services.models.media import Modality, Recording
from services.models.wire import from_chunk
from tests.media_files import file_bytes, picture, recording, tone, video
from tests.stack.conftest import RunningStack
from tests.stack.odd_cases import (
    CORNERS, HTTP_ONLY, INVALID, OK, Odd, asking, image, media_cases, media_file, media_of, request_cases, text,
)  # fmt: skip
from tests.stack.processes import SERVICES, Footprint, footprint
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc

MEDIA, REQUESTS = list(media_cases()), list(request_cases())
SEEN_BY_NO_CLIENT = re.compile(r"0x[0-9a-f]{6,}|Traceback|object at|(?<!image)/\w+/\w+|\d+\.\d+\.\d+\.\d+|\.py\b|\n")
AT_ONCE = 16
CACHE_BYTES = 512 * 1024  # so little that most cases are decoded and encoded each time they come
MORE_BYTES = 48 * 2**20  # of memory: inputs of three large items that Python has not collected yet; a bomb takes 265 MB and more
SAME, DIFFERENT = 1e-3, 1e-2  # logits of the same picture, and of another one


@dataclass(frozen=True)
class Answer:
    """What came of a request that was taken."""

    estimate: gateway_pb2.EstimateTokensResponse
    responses: list[gateway_pb2.ChatResponse]

    @property
    def tokens(self) -> list[int]:
        return [token for response in self.responses for token in response.delta.token_ids]

    @property
    def done(self) -> gateway_pb2.Done:
        assert self.responses[-1].HasField("done")
        return self.responses[-1].done

    @property
    def logits(self) -> torch.Tensor:
        """``[vocab]`` of the first token."""
        (first,) = (r.delta.first_logits for r in self.responses if r.delta.HasField("first_logits"))
        return from_chunk(first)[0]


class Client:
    """Asks the gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = gateway_pb2_grpc.ChatServiceStub(channel)

    async def ask(self, request: gateway_pb2.ChatRequest) -> Answer:
        """An estimate, then an answer.

        Raises:
            ServiceError: what came instead.
        """
        try:
            estimated = gateway_pb2.EstimateTokensRequest(messages=request.messages, sampling=request.sampling)
            estimate = await self.stub.EstimateTokens(estimated, timeout=60)
            return Answer(estimate, [response async for response in self.stub.Chat(request, timeout=60)])
        except grpc.aio.AioRpcError as error:
            assert error.code() is not grpc.StatusCode.UNKNOWN, error
            raise ServiceError.from_rpc(error, "gateway") from None

    async def check(self, odd: Odd) -> Answer | ServiceError:
        """Ask for it; the outcome must be the stated one, an answer what was estimated, a refusal one that teaches."""
        try:
            answer = await self.ask(odd.request)
        except ServiceError as error:
            assert odd.outcome == INVALID and error.code is grpc.StatusCode.INVALID_ARGUMENT, f"{odd}: {error}"
            field, words = odd.refused
            assert error.field == field and error.message.startswith(f"{field}: "), f"{odd}: {error.field}: {error}"
            assert all(word in error.message for word in words), f"{odd}: {error}"
            assert not SEEN_BY_NO_CLIENT.search(error.message), f"{odd}: {error}"
            return error
        assert odd.outcome == OK, f"{odd} was answered"
        estimate, done = answer.estimate, answer.done
        done.usage.prompt_tokens_details.cached = 0
        assert done.usage.prompt_tokens_details == estimate.prompt_tokens_details, odd
        assert done.usage.prompt_tokens == estimate.prompt_tokens and len(answer.tokens) == done.usage.completion_tokens > 0, odd
        assert list(answer.responses[0].admitted.media) == list(estimate.media), odd
        return answer


@pytest.fixture(scope="module")
def model(checkpoint_dir: Callable[[str], Path]) -> Path:
    return checkpoint_dir("qwen2_5_omni_thinker")


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return open_checkpoint(str(model))


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    logs = tmp_path_factory.mktemp("logs-cases")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRIPTYCH_EMBEDDING_CACHE_BYTES", str(CACHE_BYTES))
        with local_stack("--model", str(model), "--dtype", "float32", log_dir=logs, quiet=True) as running:
            yield RunningStack(running, logs)


@asynccontextmanager
async def client_of(stack: RunningStack) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(stack.address, [("grpc.max_send_message_length", -1)]) as channel:
        yield Client(channel)


def alone(stack: RunningStack, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Run it with a client of its own; afterwards the stack is idle."""

    async def run() -> None:
        async with client_of(stack) as client:
            await work(client)

    asyncio.run(run())
    stack.wait_until(lambda loads: not loads.busy(), 5)


@pytest.mark.parametrize("odd", MEDIA, ids=str)
def test_media(odd: Odd, stack: RunningStack, checkpoint: Checkpoint) -> None:
    async def work(client: Client) -> None:
        answer = await client.check(odd)
        if isinstance(answer, ServiceError):
            return
        (media,), facts = answer.estimate.media, odd.facts
        if medium := media_of(odd):
            (plan,) = checkpoint.plan([medium])
            assert (media.tokens, media.grid.t, media.grid.h, media.grid.w) == (plan.rows, plan.grid.t, plan.grid.h, plan.grid.w)
        else:  # of a recording that is coded with loss, the length is known roughly
            length, tolerance = facts["duration_s"], facts["duration_tol"]
            least, most = checkpoint.plan([Recording(round((length + by) * RATE)) for by in (-tolerance, tolerance)])
            assert least.rows <= media.tokens <= most.rows
        if odd.modality != "audio":
            assert (media.width, media.height) == (facts["width"], facts["height"])

    alone(stack, work)


def plain(odd: Odd) -> gateway_pb2.Part:
    """The same picture or recording as a file that has nothing odd, checked against what the case says of it."""
    arrays = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        arrays.append(np.empty(shape, dtype))
        return arrays[-1]

    if odd.modality == "image":
        decode_image(odd.data, ImageSpec(10**8), allocate)
        for x, y, colour in odd.facts.get("probe", ()):
            assert np.abs(arrays[-1][y, x].astype(int) - colour).max() <= odd.facts["tol"], odd
        return image(file_bytes(Image.fromarray(arrays[-1])))
    decode_sound(odd.data, SoundSpec(10**8), allocate)
    wav = recording(arrays[-1][:, None], RATE, "wav", "pcm_f32le", "flt")
    return gateway_pb2.Part(audio=gateway_pb2.Media(data=wav))


def apart(one: Answer, other: Answer) -> float:
    """Largest difference of their first logits."""
    return float((one.logits - other.logits).abs().max())


@pytest.mark.parametrize("odd", [odd for odd in MEDIA if odd.outcome == OK and odd.modality != "video"], ids=str)
def test_the_model_sees_what_a_plain_file_would_show(odd: Odd, stack: RunningStack) -> None:
    async def work(client: Client) -> None:
        url = odd.request.messages[0].parts[0].image.url
        if url:  # two pictures, spelled in many ways
            twin = next(o for o in MEDIA if o.name == ("url_plain" if odd.facts["width"] == 8 else "url_url_safe")).request
        else:
            twin = asking(plain(odd), text("what?"))
        assert apart(await client.ask(odd.request), await client.ask(twin)) < SAME

    alone(stack, work)


@pytest.mark.parametrize("group", sorted({odd.group for odd in MEDIA if odd.group}))
def test_twins_are_never_taken_for_each_other(group: str, stack: RunningStack) -> None:
    one, other = (odd.request for odd in MEDIA if odd.group == group)
    # Whatever is cached of either goes to make room for these, which no other test asks for.
    fillers = [asking(image(file_bytes(picture(700, 840, seed)))) for seed in group.encode()[-3:]]

    async def work(client: Client) -> None:
        for filler in fillers:
            await client.ask(filler)
        before = (await asyncio.to_thread(stack.wait_until, lambda loads: not loads.busy(), 5)).encoder
        answers = [await client.ask(request) for request in (one, other, one, other)]
        after = stack.loads().encoder
        assert (after.cache_misses - before.cache_misses, after.cache_hits - before.cache_hits) == (2, 2)
        assert apart(answers[0], answers[1]) > DIFFERENT
        assert apart(answers[0], answers[2]) < SAME and apart(answers[1], answers[3]) < SAME

    alone(stack, work)


REFUSED = [odd for odd in REQUESTS if odd.outcome == INVALID]


@pytest.mark.parametrize("odd", REFUSED, ids=str)
def test_a_bad_request_costs_nothing(odd: Odd, stack: RunningStack) -> None:
    async def work(client: Client) -> None:
        before, seconds = stack.loads(), []
        for _ in range(5):
            started = time.perf_counter()
            await client.check(odd)
            seconds.append(time.perf_counter() - started)
        after = stack.loads()
        assert after.llm.steps == before.llm.steps and after.gateway.finished_requests == before.gateway.finished_requests
        assert after.encoder.cache_misses + after.encoder.cache_hits == before.encoder.cache_misses + before.encoder.cache_hits
        assert min(seconds) < 0.1

    alone(stack, work)


@pytest.mark.parametrize("name", HTTP_ONLY)
def test_a_request_that_only_http_can_carry(name: str) -> None:
    pytest.skip(HTTP_ONLY[name])


async def placeholders_are_text(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    answer = await client.check(odd)
    assert isinstance(answer, Answer) and not answer.estimate.media
    details = answer.estimate.prompt_tokens_details
    layout = PromptLayout(checkpoint).lay_out([Turn("user", (odd.request.messages[0].parts[0].text,))])
    assert details.text == answer.estimate.prompt_tokens == len(layout.token_ids)
    assert not {checkpoint.placeholder_id(modality) for modality in Modality} & set(layout.token_ids)
    assert (await client.ask(asking(text("next")))).tokens


async def the_picture_binds_to_its_own_part(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    words, shown = odd.request.messages[0].parts
    asked = [asking(words, shown), asking(words), asking(text("x"), shown), asking(text("x"))]
    both, without, plain_both, plain_without = [(await client.ask(request)).estimate.prompt_tokens_details for request in asked]
    assert both.image == checkpoint.plan_image(336, 336).rows and not without.image
    assert both.text - without.text == plain_both.text - plain_without.text
    other = await client.ask(asking(words, image(file_bytes(picture(336, 336, seed=8)))))
    assert apart(await client.ask(asking(words, shown)), other) > DIFFERENT


async def slots_stand_in_order(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    answer, parts = await client.check(odd), odd.request.messages[0].parts
    assert isinstance(answer, Answer)
    found = [(media.field, media.width, media.height) for media in answer.estimate.media]
    assert found == [("messages[0].parts[1].image", 48, 32), ("messages[0].parts[3].image", 32, 48)]
    a, first, b, second, c = parts
    for swapped in ([a, second, b, first, c], [first, a, b, second, c], [a, first, second, b, c]):
        assert apart(answer, await client.ask(asking(*swapped))) > SAME
    upright = Image.open(io.BytesIO(media_file("exif_o1"))).convert("RGB")
    turned = image(file_bytes(upright.rotate(-90, expand=True)))
    assert apart(answer, await client.ask(asking(a, image(file_bytes(upright)), b, turned, c))) < SAME
    assert np.abs(np.array(upright)[5, 5].astype(int) - CORNERS[0]).max() < 24


async def one_picture_is_enough(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    answer = await client.check(odd)
    assert isinstance(answer, Answer) and len(answer.estimate.media) == 1
    assert answer.estimate.prompt_tokens_details.image == checkpoint.plan_image(336, 336).rows


async def encoded_once(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    new, before = image(file_bytes(picture(336, 336, seed=9))), stack.loads().encoder
    twice = asking(new, new, odd.request.messages[0].parts[2])
    answer = await client.ask(twice)
    after = stack.loads().encoder
    assert (after.encoded_items - before.encoded_items, after.cache_hits - before.cache_hits) == (1, 1)
    rows = checkpoint.plan_image(336, 336).rows
    assert [media.tokens for media in answer.estimate.media] == [rows, rows]
    assert answer.done.usage.prompt_tokens_details.image == 2 * rows
    assert isinstance(await client.check(odd), Answer)


async def each_has_its_own_count(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    answer = await client.check(odd)
    assert isinstance(answer, Answer)
    rows = [checkpoint.plan_image(*size).rows for size in ((700, 840), (257, 27))]
    assert [media.tokens for media in answer.estimate.media] == rows
    assert answer.done.usage.prompt_tokens_details.image == sum(rows)


async def either_order(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    film, shown, words = odd.request.messages[0].parts
    there, back = await client.check(odd), await client.ask(asking(shown, film, words))
    assert isinstance(there, Answer) and there.estimate.prompt_tokens == back.estimate.prompt_tokens
    assert [m.tokens for m in there.estimate.media] == [m.tokens for m in reversed(back.estimate.media)]
    assert apart(there, back) > SAME


async def a_single_token(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    answer = await client.check(odd)
    assert isinstance(answer, Answer) and len(answer.tokens) == 1
    assert answer.done.finish_reason == gateway_pb2.Done.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_name[
        "FINISH_REASON_LENGTH"
    ].number  # fmt: skip


async def the_same_twice(client: Client, stack: RunningStack, checkpoint: Checkpoint, odd: Odd) -> None:
    first, second = await client.check(odd), await client.check(odd)
    assert isinstance(first, Answer) and isinstance(second, Answer) and first.tokens == second.tokens
    other = gateway_pb2.ChatRequest.FromString(odd.request.SerializeToString())
    other.sampling.seed += 1
    assert (await client.ask(other)).tokens != first.tokens


MUST = {
    "placeholder_text_only": placeholders_are_text,
    "video_placeholder_text_only": placeholders_are_text,
    "placeholder_before_image": the_picture_binds_to_its_own_part,
    "order_text_image_text": slots_stand_in_order,
    "image_only": one_picture_is_enough,
    "same_image_twice": encoded_once,
    "two_sizes": each_has_its_own_count,
    "image_and_video": either_order,
    "max_tokens_1": a_single_token,
    "seeded_twice": the_same_twice,
}


@pytest.mark.parametrize("odd", [odd for odd in REQUESTS if odd.outcome == OK], ids=str)
def test_a_good_request_does_as_it_must(odd: Odd, stack: RunningStack, checkpoint: Checkpoint) -> None:
    alone(stack, lambda client: MUST[odd.name](client, stack, checkpoint, odd))


def good_requests() -> list[gateway_pb2.ChatRequest]:
    """Greedy, of every modality."""
    sound = recording(tone(0.7, RATE), RATE, "mp3", "mp3", "s16p")
    parts = [
        [image(file_bytes(picture(1000, 900, seed=5), "JPEG"))],
        [gateway_pb2.Part(audio=gateway_pb2.Media(data=sound))],
        [gateway_pb2.Part(video=gateway_pb2.Media(data=video(8)))],
        [],
    ]
    return [asking(*media, text("what is this?"), max_tokens=6, ignore_eos=True) for media in parts]


def test_sixteen_at_once_beside_good_ones_leave_nothing_behind(stack: RunningStack) -> None:
    good, everything = good_requests(), [*MEDIA, *REQUESTS]

    async def round_of() -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        async with client_of(stack) as client:
            expected = [(await client.ask(request)).tokens for request in good]
            (seeded,) = (odd for odd in REQUESTS if odd.name == "seeded_twice")
            drawn = (await client.ask(seeded.request)).tokens

            async def odd_one(odd: Odd) -> None:
                async with gate:
                    answer = await client.check(odd)
                    assert odd is not seeded or (isinstance(answer, Answer) and answer.tokens == drawn)

            async def good_one(index: int) -> None:
                async with gate:
                    assert (await client.ask(good[index])).tokens == expected[index]

            async with asyncio.TaskGroup() as group:
                for number, odd in enumerate(everything):
                    group.create_task(odd_one(odd))
                    group.create_task(good_one(number % len(good)))

    def after_a_round() -> Footprint:
        asyncio.run(round_of())
        stack.wait_until(lambda loads: not loads.busy() and not loads.llm.seconds_since_step, 5)
        return footprint(stack)

    after_a_round()  # threads, connections and allocators are warm from here on
    before, tasks = after_a_round(), stack.loads().tasks()
    after = after_a_round()
    assert after.workers == before.workers, "a case cost a worker its life"
    assert {service: len(pids) for service, pids in after.workers.items()} == {"gateway": 2, "encoder": 2, "llm": 0}
    assert after.handles == before.handles
    assert sum(after.blocks.values()) <= stack.loads().encoder.cached_items + AT_ONCE
    grown = {name: after.memory[name] - before.memory[name] for name in before.memory}
    assert all(growth < MORE_BYTES for growth in grown.values()), grown
    assert stack.loads().tasks() == tasks
    assert stack.loads().encoder.cached_bytes <= CACHE_BYTES
    for service in SERVICES:
        events = stack.events(service)
        assert not [e for e in events if e["level"] == "error" or e.get("reason") == "ESTIMATE_MISMATCH"]
