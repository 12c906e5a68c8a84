"""Greedy tokens through the running stack equal ``generate()``; the first step's logits within 1e-4.

Two families that see and two that do not are asked much; of the others that see or hear, a stack each is asked a little.
Recordings and videos are real files, in every format that is taken.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.local_stack import local_stack
from services.models.checkpoint import open_checkpoint
from services.models.media import Modality
from services.models.registry import FAMILIES
from services.models.wire import from_chunk
from tests.oracle import Takes, catalogue
from tests.reference import NEW_TOKENS, Answer, Ask, Oracle, Part, Sound, asks, picture
from tests.stack.conftest import RunningStack, gather_limited
from tests.stack.real_media import VideoFile, media_asks
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

REQUESTS = 20
ASKED_MUCH = ["qwen2_vl", "llava", "llama", "qwen2"]
ASKED_LITTLE = [f.model_type for f in FAMILIES.values() if f.modalities and f.model_type not in ASKED_MUCH]
PHOTOS_OF_LITTLE = 5  # for each family that is asked little, other ones for each
ROLES = {"user": gateway_pb2.ROLE_USER, "assistant": gateway_pb2.ROLE_ASSISTANT, "system": gateway_pb2.ROLE_SYSTEM}


def chat_request(ask: Ask, new_tokens: int = NEW_TOKENS) -> gateway_pb2.ChatRequest:
    def part(p: Part) -> gateway_pb2.Part:
        match p:
            case str():
                return gateway_pb2.Part(text=p)
            case bytes():
                detail = gateway_pb2.DETAIL_LOW if ask.low else gateway_pb2.DETAIL_UNSPECIFIED
                return gateway_pb2.Part(image=gateway_pb2.Media(data=p, detail=detail))
            case Sound():
                return gateway_pb2.Part(audio=gateway_pb2.Media(data=p.wav))
            case VideoFile():
                return gateway_pb2.Part(video=gateway_pb2.Media(data=p.file))
        raise AssertionError(f"{type(p)} is in no file")

    messages = [gateway_pb2.Message(role=ROLES[role], parts=[part(p) for p in parts]) for role, parts in ask.turns]
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, include_first_logits=True)
    return gateway_pb2.ChatRequest(messages=messages, sampling=sampling)


def check(ask: Ask, answer: Answer, tokens: list[int], responses: list[gateway_pb2.ChatResponse]) -> None:
    assert tokens == answer.tokens
    first = next(r.delta.first_logits for r in responses if r.delta.HasField("first_logits"))
    assert float((from_chunk(first)[0] - answer.first_logits).abs().max()) < 1e-4
    usage = responses[-1].done.usage
    assert usage.prompt_tokens == len(answer.prompt)
    assert usage.completion_tokens == NEW_TOKENS
    details = usage.prompt_tokens_details
    assert details.text + details.image + details.audio + details.video == usage.prompt_tokens
    assert bool(details.image) == bool(ask.pictures)
    assert bool(details.video) == bool(ask.clips)
    assert bool(details.audio) == any(isinstance(part, Sound) for _, parts in ask.turns for part in parts)


@pytest.fixture(scope="module", params=ASKED_MUCH)
def asked(
    request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path], start_stack: Callable[[str], RunningStack]
) -> tuple[RunningStack, list[tuple[Ask, Answer]]]:
    oracle = Oracle(checkpoint_dir(request.param))
    made = asks(3, REQUESTS, oracle.multimodal)
    if oracle.multimodal:
        sides = [side for ask in made for picture in ask.pictures for side in picture.size]
        assert {len(ask.pictures) for ask in made} == {0, 1, 2, 3} and min(sides) == 28 and max(sides) == 1500
    return start_stack(request.param), [(ask, oracle.answer(ask)) for ask in made]


@pytest.mark.asyncio
async def test_alone(asked: tuple[RunningStack, list[tuple[Ask, Answer]]]) -> None:
    stack, pairs = asked
    for ask, answer in pairs:
        check(ask, answer, *await stack.tokens(chat_request(ask)))


@pytest.mark.asyncio
async def test_sixteen_at_once(asked: tuple[RunningStack, list[tuple[Ask, Answer]]]) -> None:
    """Beside a long answer, so that they share steps with it however fast the machine; again if it had ended before they came."""
    stack, pairs = asked
    limited = gather_limited(16)
    for _ in range(5):
        async with stack.answering(chat_request(Ask([("user", ["tell a long story"])]), new_tokens=3000)):
            results = await asyncio.gather(*(limited(stack.tokens(chat_request(ask))) for ask, _ in pairs))
        for (ask, answer), result in zip(pairs, results, strict=True):
            check(ask, answer, *result)
        if stack.wait_until(lambda loads: not loads.busy()).llm.largest_batch > 1:
            return
    raise AssertionError("requests were not batched")


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
async def test_real_files(family: str, checkpoint_dir: Callable[[str], Path], start_stack: Callable[[str], RunningStack]) -> None:
    """Of the families that are asked much and see."""
    path = checkpoint_dir(family)
    oracle, stack, takes = Oracle(path), start_stack(family), catalogue("TAKES").get(family, Takes())
    for ask in media_asks(open_checkpoint(str(path)), takes, picture(random.Random(7), 90, 64, "PNG")):
        check(ask, oracle.answer(ask), *await stack.tokens(chat_request(ask)))


def few_asks(family: str) -> list[Ask]:
    """Small pictures, alone and beside each other, in several turns; and none, where the family can do without."""
    rng, takes = random.Random(family), catalogue("TAKES").get(family, Takes())
    one, other, wide = (picture(rng, *size, kind) for *size, kind in [(64, 90, "PNG"), (75, 75, "JPEG"), (201, 60, "PNG")])
    if Modality.IMAGE not in takes.modalities:
        return [Ask([("user", ["what do you hear ?"])])]
    made = [Ask([("user", [one, "what is this ?"])]), Ask([("user", ["what", wide])])]
    if takes.items > 1:
        made.append(Ask([("user", [other, "and", one, "which ?"])]))
    if FAMILIES[family].low is not None and family != "llava_onevision":  # whose low detail is as that of one among others
        made.append(Ask([("user", [picture(rng, 900, 420, "JPEG"), "what is it ?"])], low=True))
    if takes.turns:
        made.append(Ask([("user", ["see", wide]), ("assistant", ["yes ?"]), ("user", ["how many things ?"])]))
    return made if takes.least else [*made, Ask([("user", ["what do you see ?"])])]


@pytest.fixture(params=ASKED_LITTLE)
def asked_little(
    request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path], tmp_path: Path
) -> Iterator[tuple[RunningStack, list[tuple[Ask, Answer]]]]:
    if request.param == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
    path = checkpoint_dir(request.param)
    oracle = Oracle(path)
    flags = ["--max-model-len", "4096"] if request.param == "phi4_multimodal" else []  # as far as its first frequencies reach
    with local_stack("--model", str(path), "--dtype", "float32", *flags, log_dir=tmp_path, quiet=True) as stack:
        takes = catalogue("TAKES").get(request.param, Takes())
        drawn = picture(random.Random(7), 90, 64, "PNG")
        few = [*few_asks(request.param), *media_asks(open_checkpoint(str(path)), takes, drawn, PHOTOS_OF_LITTLE)]
        yield RunningStack(stack, tmp_path), [(ask, oracle.answer(ask)) for ask in few]


@pytest.mark.asyncio
async def test_every_family_that_sees_or_hears(asked_little: tuple[RunningStack, list[tuple[Ask, Answer]]]) -> None:
    stack, pairs = asked_little
    check(*pairs[0], *await stack.tokens(chat_request(pairs[0][0])))
    limited = gather_limited(8)
    results = await asyncio.gather(*(limited(stack.tokens(chat_request(ask))) for ask, _ in pairs))
    for (ask, answer), result in zip(pairs, results, strict=True):
        check(ask, answer, *result)
    stack.wait_until(lambda loads: not loads.busy())
