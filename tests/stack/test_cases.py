"""Every case of tests/data/cases through a running stack: files and URLs alone, then all sixteen at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.local_stack import local_stack
from services.common.errors import ServiceError
from services.decoding.images import decode_image
from services.decoding.sound import decode_sound
from services.decoding.specs import ImageSpec, SoundSpec
from services.models.audio_lengths import RATE
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Recording
from tests.media_files import file_bytes, picture, recording, tone, video
from tests.stack.conftest import RunningStack
from tests.stack.odd_cases import OK, Odd, asking, image, media_cases, media_of, request_cases, text
from tests.stack.odd_client import DIFFERENT, SAME, Answer, Client, alone, apart, client_of
from tests.stack.processes import SERVICES, Footprint, footprint
from triptych.gateway.v1 import gateway_pb2

MEDIA, REQUESTS = list(media_cases()), list(request_cases())
AT_ONCE = 16
CACHE_BYTES = 512 * 1024  # so little that most cases are decoded and encoded each time they come
MORE_BYTES = 48 * 2**20  # of memory: inputs of three large items that Python has not collected yet; a bomb takes 265 MB and more


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
    pair = [odd.request.messages[0].parts[0] for odd in MEDIA if odd.group == group]
    # A text of its own before each: where the language model has a prompt's keys and values, nobody waits for its rows.
    asked = [asking(text(f"{group} {number}"), pair[number % 2]) for number in range(4)]
    # Whatever is cached of either goes to make room for these, which nobody has asked for.
    fillers = [asking(image(file_bytes(picture(700, 840, sum(group.encode()) + seed)))) for seed in range(0, 3000, 1000)]

    async def work(client: Client) -> None:
        for filler in fillers:
            await client.ask(filler)
        before = (await asyncio.to_thread(stack.wait_until, lambda loads: not loads.busy())).encoder
        for request in asked:
            await client.ask(request)
        after = stack.loads().encoder
        assert (after.cache_misses - before.cache_misses, after.cache_hits - before.cache_hits) == (2, 2)
        one, other, again = [await client.ask(asking(part, text("what?"))) for part in (*pair, pair[0])]
        assert apart(one, other) > DIFFERENT and apart(one, again) < SAME

    alone(stack, work)


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


def grown(before: Footprint, after: Footprint) -> dict[str, int]:
    """Who has more memory than chance explains, and how many bytes more."""
    more = {name: after.memory[name] - before.memory[name] for name in before.memory}
    return {name: growth for name, growth in more.items() if growth >= MORE_BYTES}


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
        stack.wait_until(lambda loads: not loads.busy() and not loads.llm.seconds_since_step)
        return footprint(stack)

    after_a_round()  # threads, connections and allocators are warm from here on
    before = after_a_round()
    polls = [stack.loads().tasks() for _ in range(10)]  # some of them in the middle of what the gateway does each second
    tasks = [min(counts) for counts in zip(*polls, strict=True)]
    after = after_a_round()
    if grown(before, after):  # allocators settle late under load; what is lost is lost in every round
        before, after = after, after_a_round()
    assert after.workers == before.workers, "a case cost a worker its life"
    assert {service: len(pids) for service, pids in after.workers.items()} == {"gateway": 2, "encoder": 2, "llm": 0}
    assert after.handles == before.handles
    assert sum(after.blocks.values()) <= stack.loads().encoder.cached_items
    assert not grown(before, after)
    stack.wait_until(lambda loads: all(now <= then for now, then in zip(loads.tasks(), tasks, strict=True)))
    assert stack.loads().encoder.cached_bytes <= CACHE_BYTES
    for service in SERVICES:
        events = stack.events(service)
        assert not [e for e in events if e["level"] == "error" or e.get("reason") == "ESTIMATE_MISMATCH"]
