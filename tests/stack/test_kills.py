"""Workers of a running stack are killed while it answers and is fed bombs: items fail alone or not at all; all is as before."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np

import triptych
from services.common.errors import ServiceError
from services.models.audio_lengths import RATE
from tests.media_files import file_bytes, picture, recording, tone, video
from tests.patience import PATIENCE
from tests.stack.conftest import RunningStack
from tests.stack.odd_cases import OK, Odd, asking, image, media_cases, text
from tests.stack.odd_client import Client, client_of
from tests.stack.processes import SERVICES, footprint, workers_of
from triptych.gateway.v1 import gateway_pb2

ASKED, AT_ONCE, KILL_EVERY = 96, 16, 10
BOMBS = {"bomb_400mp", "bomb_88mp", "ztxt_bomb", "rate_forged", "truncated_png", "damaged", "no_moov", "init_only", "no_samples"}


def new_request(number: int) -> gateway_pb2.ChatRequest:
    """One whose media nobody has asked for before, so that it is probed and decoded."""
    match number % 4:
        case 0 | 1:
            part = image(file_bytes(picture(60 + number % 50, 80, seed=1000 + number), "JPEG"))
        case 2:
            sound = tone(0.2, RATE) * np.float32(1 - number / 1000)
            wav = recording(sound, RATE, "wav", "pcm_s16le", "s16")
            part = gateway_pb2.Part(audio=gateway_pb2.Media(data=wav))
        case _:
            part = gateway_pb2.Part(video=gateway_pb2.Media(data=video(4 + number % 5, times=[*np.arange(9) / 25])))
    return asking(part, text("what?"))


def test_killed_workers_and_bombs_disturb_nobody_else(start_stack: Callable[[str], RunningStack]) -> None:
    stack, chance, outcomes = start_stack("qwen2_5_omni_thinker"), random.Random(3), Counter[str]()
    bombs = [odd for odd in media_cases() if odd.name in BOMBS]
    pids = {service: stack.serving(service)["pid"] for service in SERVICES}
    logged = {service: len(stack.events(service)) for service in SERVICES}

    def kill_one() -> None:
        workers = workers_of(pids[chance.choice(("gateway", "encoder"))])
        if workers:  # else both are being replaced
            os.kill(chance.choice(workers), signal.SIGKILL)
            outcomes["killed"] += 1

    async def good(client: Client, number: int, expected: list[list[int]]) -> None:
        again = number % 8 == 0
        try:
            answer = await client.ask(new_request(number // 8 % 4 if again else number))
        except ServiceError as error:
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.reason == "DECODE_CRASHED", error
            assert error.message.startswith("messages[0].parts[0]."), error
            outcomes["crashed"] += 1
        else:
            assert not again or answer.tokens == expected[number // 8 % 4]
            outcomes["answered"] += 1

    async def bomb(client: Client, odd: Odd) -> None:
        try:
            await client.ask(odd.request)
        except ServiceError as error:
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field == odd.refused[0], error
            outcomes["refused"] += 1
        else:
            assert odd.outcome == OK

    async def traffic() -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        async with client_of(stack) as client:
            expected = [(await client.ask(new_request(number))).tokens for number in range(4)]

            async def one(number: int) -> None:
                async with gate:
                    if number % KILL_EVERY == 0:
                        kill_one()
                    if number % 4 == 1:
                        await bomb(client, chance.choice(bombs))
                    await good(client, number, expected)

            async with asyncio.TaskGroup() as group:
                for number in range(8, 8 + ASKED):
                    group.create_task(one(number))

    with triptych.Client(stack.address) as client:  # connections between the services exist from here on
        client.chat([triptych.image(file_bytes(picture(60, 60))), "hello"], max_tokens=1)
    stack.wait_until(lambda loads: not loads.busy())
    before = footprint(stack)
    asyncio.run(traffic())
    tasks = stack.wait_until(lambda loads: not loads.busy()).tasks()
    deadline = time.monotonic() + PATIENCE
    while [len(workers_of(pids[service])) for service in SERVICES] != [2, 2, 0]:
        assert time.monotonic() < deadline, "a killed worker is not replaced"
    assert outcomes["killed"] >= ASKED // KILL_EVERY - 2 and outcomes["refused"] > 10, outcomes
    assert outcomes["crashed"] <= outcomes["killed"] and outcomes["answered"] >= ASKED - outcomes["killed"], outcomes
    after = footprint(stack)
    assert after.handles == before.handles
    assert all(after.workers[service] != before.workers[service] for service in ("gateway", "encoder"))
    stack.wait_until(lambda loads: not loads.busy() and loads.tasks() <= tasks)
    for service in SERVICES:
        events = stack.events(service)[logged[service] :]
        errors = {event["event"] for event in events if event["level"] == "error"}
        assert errors <= {"decode worker does not start"}, "one may be killed before it has started; the next one is"
