"""Greedy tokens through the running stack equal ``generate()``; the first step's logits within 1e-4.

Two families that see and two that do not are asked much; of the others that see, a stack each is asked a little.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.local_stack import local_stack
from services.models.registry import FAMILIES
from services.models.wire import from_chunk
from tests.oracle import Takes, catalogue
from tests.reference import NEW_TOKENS, Answer, Ask, Oracle, asks, picture
from tests.stack.conftest import RunningStack, gather_limited
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

REQUESTS = 20
ASKED_MUCH = ["qwen2_vl", "llava", "llama", "qwen2"]
ASKED_LITTLE = [f.model_type for f in FAMILIES.values() if f.image and f.model_type not in ASKED_MUCH]
ROLES = {"user": gateway_pb2.ROLE_USER, "assistant": gateway_pb2.ROLE_ASSISTANT, "system": gateway_pb2.ROLE_SYSTEM}


def chat_request(ask: Ask, new_tokens: int = NEW_TOKENS) -> gateway_pb2.ChatRequest:
    def part(p: str | bytes) -> gateway_pb2.Part:
        return gateway_pb2.Part(text=p) if isinstance(p, str) else gateway_pb2.Part(image=gateway_pb2.Media(data=p))

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
    assert details.text + details.image == usage.prompt_tokens
    assert bool(details.image) == bool(ask.pictures)


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
    """Beside an answer that goes on for as long as they take: each of them shares a step with it, however fast the machine."""
    stack, pairs = asked
    limited = gather_limited(16)
    async with stack.answering(chat_request(Ask([("user", ["tell a long story"])]), new_tokens=3000)):
        results = await asyncio.gather(*(limited(stack.tokens(chat_request(ask))) for ask, _ in pairs))
    for (ask, answer), result in zip(pairs, results, strict=True):
        check(ask, answer, *result)
    loads = stack.wait_until(lambda loads: not loads.busy(), 5)
    assert loads.llm.largest_batch > 1, "requests were not batched"


def few_asks(family: str) -> list[Ask]:
    """Small pictures, alone and beside each other, in several turns; and none, where the family can do without."""
    rng, takes = random.Random(family), catalogue("TAKES").get(family, Takes())
    one, other, wide = (picture(rng, *size, kind) for *size, kind in [(64, 90, "PNG"), (75, 75, "JPEG"), (201, 60, "PNG")])
    made = [Ask([("user", [one, "what is this ?"])]), Ask([("user", ["what", wide])])]
    if takes.items > 1:
        made.append(Ask([("user", [other, "and", one, "which ?"])]))
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
        yield RunningStack(stack, tmp_path), [(ask, oracle.answer(ask)) for ask in few_asks(request.param)]


@pytest.mark.asyncio
async def test_every_family_that_sees(asked_little: tuple[RunningStack, list[tuple[Ask, Answer]]]) -> None:
    stack, pairs = asked_little
    check(*pairs[0], *await stack.tokens(chat_request(pairs[0][0])))
    results = await asyncio.gather(*(stack.tokens(chat_request(ask)) for ask, _ in pairs))
    for (ask, answer), result in zip(pairs, results, strict=True):
        check(ask, answer, *result)
    stack.wait_until(lambda loads: not loads.busy(), 5)
