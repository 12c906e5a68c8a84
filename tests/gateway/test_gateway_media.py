"""Recordings and videos through the gateway: what is promised of them, what encoders are told, what is refused and why."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import Script, Stack, ask, picture, refused, stack, until

from services.decoding import process
from services.models.audio_lengths import RATE
from services.models.checkpoint import open_checkpoint
from services.models.media import Clip, ItemPlan, Recording
from tests.media_files import CASES, DATA, recording, sideways, tone, video
from triptych.common.v1 import media_pb2, usage_pb2
from triptych.gateway.v1 import gateway_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Directory = Callable[[str], Path]
SECOND = ("audio", recording(tone(1.0, RATE), RATE, "wav", "pcm_s16le", "s16"))
FILM = ("video", video(50))


@pytest.fixture
def omni(checkpoint_dir: Directory) -> Path:
    return checkpoint_dir("qwen2_5_omni_thinker")


def plan(checkpoint: Path, medium: Recording | Clip) -> ItemPlan:
    return open_checkpoint(str(checkpoint)).plan([medium])[0]


async def estimate(stack: Stack, *parts: Any) -> gateway_pb2.EstimateTokensResponse:
    request = ask(*parts)
    return await stack.stub.EstimateTokens(gateway_pb2.EstimateTokensRequest(messages=request.messages))


async def done(stack: Stack, *parts: Any) -> gateway_pb2.Done:
    events = [event async for event in stack.stub.Chat(ask(*parts, max_tokens=3))]
    return events[-1].done


@pytest.mark.asyncio
async def test_what_is_promised_and_what_the_encoder_is_told(omni: Path) -> None:
    """A recording, a picture and an uneven video lying on its side, in one message."""
    times = (0, 0.1, 0.5, 2.0, 2.1, 4.0)
    film = ("video", sideways(video(6, times=times), 1))
    sound = plan(omni, Recording(RATE))
    clip = plan(omni, Clip(48, 64, 6, 5 / 4, times))
    assert clip.frames != tuple(range(6))
    async with stack(omni) as s:
        s.llm.script = Script([[1, 2, 3]], usage_pb2.FINISH_REASON_LENGTH)
        promised = await estimate(s, "what", SECOND, picture(), film)
        assert not s.encoder.items
        details = promised.prompt_tokens_details
        assert (details.audio, details.video) == (sound.rows, clip.rows) and details.image and details.text
        assert details.text + details.image + details.audio + details.video == promised.prompt_tokens
        audio, image, moving = promised.media
        assert (audio.modality, audio.tokens, audio.HasField("width")) == (media_pb2.MODALITY_AUDIO, sound.rows, False)
        assert image.modality == media_pb2.MODALITY_IMAGE
        assert (moving.modality, moving.tokens) == (media_pb2.MODALITY_VIDEO, clip.rows)
        assert (moving.width, moving.height, moving.field) == (48, 64, "messages[0].parts[3].video")
        assert promised.cost.host_bytes == len(SECOND[1]) + len(picture()) + len(film[1])
        usage = (await done(s, "what", SECOND, picture(), film)).usage
        assert usage.prompt_tokens_details.audio == sound.rows and usage.prompt_tokens_details.video == clip.rows
        told = {item.modality: item for item in s.encoder.items}
        assert told[media_pb2.MODALITY_AUDIO].samples == RATE
        assert tuple(told[media_pb2.MODALITY_VIDEO].frames) == clip.frames
        assert list(told[media_pb2.MODALITY_VIDEO].times) == pytest.approx([times[index] for index in clip.frames], abs=1e-3)
        assert told[media_pb2.MODALITY_VIDEO].expected_rows == clip.rows
        await s.idle()
        [model] = (await s.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert set(model.modalities) == {media_pb2.MODALITY_IMAGE, media_pb2.MODALITY_AUDIO, media_pb2.MODALITY_VIDEO}


@pytest.mark.asyncio
async def test_every_odd_file_is_counted_or_refused(omni: Path) -> None:
    async with stack(omni) as s:
        for case in CASES:
            if case["kind"] == "image":
                continue
            data = (DATA / case["file"]).read_bytes()
            # the encoder's decoders have the last word on samples; everything else is refused here
            if "refused" in case or case.get("samples") == 1:
                with refused(INVALID) as errors:
                    await estimate(s, (case["kind"], data))
                assert errors[0].reason == case.get("refused", "BAD_MEDIA"), case
                assert errors[0].field == f"messages[0].parts[0].{case['kind']}", case
                continue
            (item,) = (await estimate(s, (case["kind"], data))).media
            if case["kind"] == "video":
                assert [item.width, item.height] == case["size"], case
            elif not case.get("within"):
                assert item.tokens == plan(omni, Recording(case["samples"])).rows, case


LIMITS = [
    ({"max_audio_seconds": 0.5}, SECOND, "AUDIO_TOO_LONG", 8000, 16000),
    ({"max_video_seconds": 1.5}, FILM, "VIDEO_TOO_LONG", 1.5, 2.0),
    ({"max_video_frames": 2}, FILM, "VIDEO_TOO_LONG", 2, 4),
    ({"max_video_bytes": 10_000}, FILM, "VIDEO_TOO_MUCH", 10_000, 4 * 64 * 48 * 3),
    ({"max_pixels": 3000}, FILM, "VIDEO_TOO_LARGE", 3000, 64 * 48),
    ({"max_media_packets": 49}, FILM, "VIDEO_PACKETS", 49, None),
    ({"max_media_packets": 3}, SECOND, "AUDIO_PACKETS", 3, None),
    ({"max_item_bytes": 1000}, FILM, "MEDIA_TOO_LARGE", 1000, None),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("options", "file", "reason", "limit", "requested"), LIMITS, ids=lambda value: str(value)[:40])
async def test_limits(
    omni: Path, options: dict[str, Any], file: tuple[str, bytes], reason: str, limit: float, requested: float | None
) -> None:
    async with stack(omni, **options) as s:
        with refused(INVALID, str(limit)) as errors:
            await done(s, "look", file)
        assert (errors[0].reason, errors[0].field) == (reason, f"messages[0].parts[1].{file[0]}")
        figures = {"limit": str(limit)} | ({} if requested is None else {"requested": str(requested)})
        assert {name: str(errors[0].metadata.get(name)) for name in figures} == figures
        assert not s.encoder.items


@pytest.mark.asyncio
async def test_how_many(omni: Path) -> None:
    async with stack(omni, limit_mm_per_prompt="audio=1") as s:
        await done(s, SECOND, FILM, FILM)
        with refused(INVALID, "2 audio parts, the limit is 1"):
            await done(s, SECOND, SECOND)


CRASHING = """
import ctypes, sys
sys.path.insert(0, sys.argv[2])
from services.decoding import worker
def read(data, spec, allocate, read=worker._DECODERS["audio facts"]):
    return ctypes.string_at(0) if data.endswith(b"CRASH") else read(data, spec, allocate)
worker._DECODERS["audio facts"] = read
worker.main()
"""


@pytest.mark.asyncio
async def test_a_crash_refuses_the_file_that_made_it(omni: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = process.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", CRASHING, command[-1], process._ROOT], **options)

    monkeypatch.setattr(process.subprocess, "Popen", start)
    async with stack(omni) as s:
        good = (await estimate(s, SECOND)).prompt_tokens
        for _ in range(2):
            with refused(INVALID, "crashed the decoder") as errors:
                await estimate(s, SECOND, ("audio", SECOND[1] + b"CRASH"), SECOND)
            assert (errors[0].field, errors[0].reason) == ("messages[0].parts[1].audio", "DECODE_CRASHED")
            assert (await estimate(s, SECOND)).prompt_tokens == good


@pytest.mark.asyncio
async def test_a_worker_that_dies_is_replaced_and_all_end_with_the_gateway(omni: Path) -> None:
    async with stack(omni, probe_workers=2) as s:
        pool = s.service.probe._pool
        assert pool is not None
        first = pool.pids
        os.kill(first[0], signal.SIGKILL)
        assert (await estimate(s, SECOND, FILM)).prompt_tokens
        await until(lambda: pool.alive == 2)
        last = pool.pids
        assert len(last) == 2 and first[0] not in last
    assert not [pid for pid in (*first, *last) if Path(f"/proc/{pid}").exists()]


@pytest.mark.asyncio
@pytest.mark.parametrize(("family", "with_encoder"), [("llava", True), ("qwen2", True), ("qwen2_vl", False)])
async def test_no_workers_where_none_are_needed(checkpoint_dir: Directory, family: str, with_encoder: bool) -> None:
    async with stack(checkpoint_dir(family), with_encoder=with_encoder) as s:
        assert s.service.probe._pool is None
        with refused(INVALID, "it takes text"):
            await done(s, FILM)
