"""The estimate is a contract: counted without decoding and without a backend, and what an answer then costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import simplejpeg
from gateway_fakes import Stack, ask, picture, refused, stack
from pi_heif import as_plugin
from PIL import AvifImagePlugin, Image, ImageFile, PngImagePlugin, WebPImagePlugin

from services.decoding import process
from services.decoding.specs import SoundSpec
from tests.media_files import DATA, recording, tone, video
from tests.stack.odd_cases import OK, media_cases
from triptych.gateway.v1 import gateway_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Directory = Callable[[str], Path]
KINDS = {
    **dict.fromkeys((".gif", ".jpg", ".webp", ".png", ".tif", ".avif", ".bmp", ".heic"), "image"),
    **dict.fromkeys((".flac", ".wav", ".m4a", ".ogg", ".aac", ".mp3", ".opus"), "audio"),
    **dict.fromkeys((".mkv", ".mp4", ".avi", ".mov", ".webm"), "video"),
}
SOUNDS = ("card_alac.mp4", "speech.webm")
# In a worker: every way to pixels or samples is an error of ours, which becomes INTERNAL.
WATCHED = """
import sys
sys.path.insert(0, sys.argv[2])
from services.decoding import containers, facts, worker
def fail(*arguments):
    raise AssertionError("decoded")
for name in ("image", "audio", "video"):
    worker._DECODERS[name] = fail
facts.frames_of = containers.frames_of = fail
worker.main()
"""


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was decoded so far in this process; workers that are started from now on fail if they decode."""
    seen: list[str] = []
    for holder, name in (
        *((cls, "load") for cls in (ImageFile.ImageFile, AvifImagePlugin.AvifImageFile, as_plugin.HeifImageFile)),
        (WebPImagePlugin.WebPImageFile, "load"),
        (PngImagePlugin.PngImageFile, "load_prepare"),
        (simplejpeg, "decode_jpeg"),
    ):
        original = getattr(holder, name)

        def noted(*arguments: Any, original: Any = original, name: str = f"{holder.__name__}.{name}", **more: Any) -> Any:
            seen.append(name)
            return original(*arguments, **more)

        monkeypatch.setattr(holder, name, noted)
    popen = process.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", WATCHED, command[-1], process._ROOT], **options)

    monkeypatch.setattr(process.subprocess, "Popen", start)
    return seen


def real_files() -> list[gateway_pb2.Part]:
    files = [*sorted((DATA / "media").glob("*.*")), DATA / "still.heic"]
    kinds = [(file, "audio" if file.name in SOUNDS else KINDS.get(file.suffix)) for file in files]
    return [gateway_pb2.Part(**{kind: gateway_pb2.Media(data=file.read_bytes())}) for file, kind in kinds if kind]


async def estimate(s: Stack, *parts: gateway_pb2.Part) -> gateway_pb2.EstimateTokensResponse:
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)
    return await s.stub.EstimateTokens(gateway_pb2.EstimateTokensRequest(messages=[message]))


@pytest.mark.asyncio
async def test_nothing_is_decoded_for_an_estimate(checkpoint_dir: Directory, decodes: list[str]) -> None:
    """Of no odd file and of no real one, accepted or refused; nor is a backend asked."""
    odd = [case.request.messages[0].parts[0] for case in media_cases()]
    async with stack(checkpoint_dir("qwen2_5_omni_thinker")) as s:
        counted = 0
        for part in odd:
            try:
                counted += len((await estimate(s, part)).media)
            except grpc.aio.AioRpcError as error:
                assert error.code() == INVALID, error.details()
        assert counted >= sum(case.outcome == OK for case in media_cases())  # some turn out to be damaged when decoded
        for part in real_files():
            counted += len((await estimate(s, part)).media)
        assert counted > 90
        assert decodes == []
        assert not s.encoder.items and not s.llm.requests
    with Image.open(DATA / "media" / "photo_temple.jpg") as shown:  # the watch would have seen it
        shown.load()
    assert decodes == ["ImageFile.load"]


@pytest.mark.asyncio
async def test_a_worker_that_decodes_would_be_seen(checkpoint_dir: Directory, decodes: list[str]) -> None:
    async with stack(checkpoint_dir("qwen2_audio")) as s:
        pool = s.service.probe._pool
        assert pool is not None
        wav = recording(tone(0.1, 16000), 16000, "wav", "pcm_s16le", "s16")
        with refused(grpc.StatusCode.INTERNAL):
            await pool.decode(wav, SoundSpec(10**6), "f")


MIXED: dict[str, list[Any]] = {
    "qwen2_5_omni_thinker": [
        "what", ("audio", recording(tone(1.3, 16000), 16000, "wav", "pcm_s16le", "s16")), picture(300, 200), ("video", video(50)),
    ],
    "idefics3": ["and", picture(700, 300, "JPEG"), "is", picture(60, 60)],
    "llava_onevision": [picture(700, 300), picture(60, 60), "?", ("video", video(10))],
    "mllama": [picture(1200, 300), "?"],
    "gemma3": ["a", picture(640, 480), "b"],
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("family", MIXED)
async def test_an_answer_costs_what_was_estimated(family: str, checkpoint_dir: Directory) -> None:
    """By modality and by item, and the language model and the encoder are given just that."""
    async with stack(checkpoint_dir(family)) as s:
        request = ask(*MIXED[family], max_tokens=3)
        said = await s.stub.EstimateTokens(
            gateway_pb2.EstimateTokensRequest(messages=request.messages, sampling=request.sampling)
        )
        assert not s.encoder.items and not s.llm.requests
        events = [event async for event in s.stub.Chat(request)]
        admitted, usage = events[0].admitted, events[-1].done.usage
        assert list(admitted.media) == list(said.media) and admitted.prompt_tokens == said.prompt_tokens_details
        assert usage.prompt_tokens == said.prompt_tokens == len(s.llm.requests[0].token_ids)
        details = usage.prompt_tokens_details
        assert details.text + details.image + details.audio + details.video == usage.prompt_tokens
        assert said.cost.prefill_tokens == said.prompt_tokens
        assert said.cost.kv_blocks == -(-(said.prompt_tokens + 3) // 16)
        assert said.cost.encoder_patches == sum(item.patches for item in s.encoder.items) > 0
        assert said.cost.host_bytes == sum(len(item.data) for item in s.encoder.items)
        rows: dict[int, int] = {}
        for span in s.llm.requests[0].spans:
            rows[int(span.ref.id.removeprefix("ref"))] = rows.get(int(span.ref.id.removeprefix("ref")), 0) + span.rows
        assert [item.expected_rows for item in s.encoder.items] == [rows[number + 1] for number in range(len(rows))]


def media(**fields: Any) -> gateway_pb2.Media:
    return gateway_pb2.Media(data=picture(1400, 1000, "JPEG"), **fields)


async def image_tokens(s: Stack, **fields: Any) -> int:
    return (await estimate(s, gateway_pb2.Part(image=media(**fields)))).prompt_tokens_details.image


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["qwen2_vl", "llava_next", "internvl"])
async def test_detail_is_counted_and_told_to_the_encoder(family: str, checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir(family)) as s:
        usual = await image_tokens(s)
        same = [await image_tokens(s, detail=detail) for detail in (gateway_pb2.DETAIL_AUTO, gateway_pb2.DETAIL_HIGH)]
        low = await image_tokens(s, detail=gateway_pb2.DETAIL_LOW)
        assert same == [usual, usual] and low < usual
        parts = [gateway_pb2.Part(image=media(detail=detail)) for detail in (gateway_pb2.DETAIL_LOW, gateway_pb2.DETAIL_HIGH)]
        message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)
        [_ async for _ in s.stub.Chat(gateway_pb2.ChatRequest(messages=[message]))]
        told = {item.low_detail: item.expected_rows for item in s.encoder.items}
        assert set(told) == {True, False} and told[True] < told[False]
        assert len({span.digest for span in s.llm.requests[0].spans}) == 2


@pytest.mark.asyncio
async def test_bounds_of_pixels_are_counted_and_told_to_the_encoder(checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir("qwen2_vl")) as s:
        assert await image_tokens(s, max_pixels=100 * 28 * 28) <= 100 < await image_tokens(s)
        assert await image_tokens(s, min_pixels=3_000_000, max_pixels=3_100_000) > await image_tokens(s)
        film = gateway_pb2.Part(video=gateway_pb2.Media(data=video(8, size=(320, 240)), max_pixels=28 * 28 * 9))
        estimated = (await estimate(s, film)).prompt_tokens_details.video
        assert 0 < estimated <= 9 * 4
        message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[film])
        [_ async for _ in s.stub.Chat(gateway_pb2.ChatRequest(messages=[message]))]
        assert (s.encoder.items[0].max_pixels, s.encoder.items[0].HasField("min_pixels")) == (28 * 28 * 9, False)


REFUSED = [
    ("qwen2_vl", "image", {"detail": 9}, "detail", "auto, low or high"),
    ("qwen2_vl", "video", {"detail": gateway_pb2.DETAIL_LOW}, "detail", "pictures only"),
    ("qwen2_vl", "image", {"min_pixels": 0}, "min_pixels", "1 to 50000000"),
    ("qwen2_vl", "image", {"max_pixels": 50_000_001}, "max_pixels", "1 to 50000000"),
    ("qwen2_vl", "image", {"min_pixels": 900, "max_pixels": 800}, "min_pixels", "at most max_pixels = 800"),
    ("llava", "image", {"max_pixels": 800}, "max_pixels", "take any size"),
    ("internvl", "video", {"min_pixels": 800}, "min_pixels", "take any size"),
    ("qwen2_5_omni_thinker", "audio", {"min_pixels": 800}, "min_pixels", "pictures and video"),
    ("qwen2_audio", "audio", {"detail": gateway_pb2.DETAIL_HIGH}, "detail", "pictures only"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("family", "kind", "fields", "name", "text"), REFUSED)
async def test_what_cannot_be_asked(
    family: str, kind: str, fields: dict[str, Any], name: str, text: str, checkpoint_dir: Directory
) -> None:
    async with stack(checkpoint_dir(family)) as s:
        with refused(INVALID, text) as errors:
            await estimate(s, gateway_pb2.Part(**{kind: gateway_pb2.Media(data=b"x", **fields)}))
        assert errors[0].field == f"messages[0].parts[0].{kind}.{name}"
