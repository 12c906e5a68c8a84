"""Every request of tests/data/cases that gRPC can carry does as it must; one that is refused costs nothing."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.layout import PromptLayout, Turn
from services.models.media import Modality
from tests.media_files import file_bytes, picture
from tests.stack.conftest import RunningStack
from tests.stack.odd_cases import CORNERS, INVALID, OK, Odd, asking, image, media_file, request_cases, text
from tests.stack.odd_client import DIFFERENT, SAME, Answer, Client, alone, apart
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2

REQUESTS = list(request_cases())


@pytest.fixture
def stack(start_stack: Callable[[str], RunningStack]) -> RunningStack:
    return start_stack("qwen2_5_omni_thinker")


@pytest.fixture(scope="module")
def checkpoint(checkpoint_dir: Callable[[str], Path]) -> Checkpoint:
    return open_checkpoint(str(checkpoint_dir("qwen2_5_omni_thinker")))


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
    assert answer.done.finish_reason == usage_pb2.FINISH_REASON_LENGTH


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
