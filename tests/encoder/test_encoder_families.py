"""The encoder half of every family against the whole stock model with its own processor, for every kind of media it takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.encoder.families import schemes_of
from services.encoder.features import Features
from services.encoder.preprocess import Decoded, Prepared, Preprocessor
from services.encoder.service import blank
from services.encoder.towers import Towers
from services.models import media
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import ALL_FRAMES, ItemPlan, Modality
from services.models.registry import FAMILIES
from tests.oracle import Takes, catalogue
from tests.reference import Ask, Clip, Oracle, Part, Sound, clip, picture, sound

CLOSE = 1e-4
IMAGES = [f.model_type for f in FAMILIES.values() if f.image]
AUDIO = [f.model_type for f in FAMILIES.values() if f.audio]
VIDEOS = [f.model_type for f in FAMILIES.values() if f.video]
CASES = [(f, m) for m, families in zip(Modality, (IMAGES, AUDIO, VIDEOS), strict=True) for f in families]


@dataclass(frozen=True)
class Half:
    """A family's encoder half beside the whole."""

    checkpoint: Checkpoint
    oracle: Oracle
    preprocess: Preprocessor
    towers: Towers

    def plans(self, ask: Ask) -> list[ItemPlan]:
        return self.checkpoint.plan([facts(part) for part in parts(ask)], ALL_FRAMES)

    def prepared(self, ask: Ask) -> list[Prepared]:
        plans = self.plans(ask)
        return [self.preprocess(decoded(part, plan), plan) for part, plan in zip(parts(ask), plans, strict=True)]

    @torch.no_grad()
    def expected(self, ask: Ask) -> Features:
        """The request's rows of every level, one item behind the other."""
        inputs, base = self.oracle.inputs(ask), self.oracle.model.base_model
        if isinstance(parts(ask)[0], Clip) and self.oracle.model_type == "llava_onevision":
            return [base.get_video_features(inputs["pixel_values_videos"], return_dict=True).pooler_output.flatten(0, 1)]
        if isinstance(parts(ask)[0], Clip) and self.oracle.model_type == "internvl":
            return [base.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output.flatten(0, 1)]
        items = self.oracle.items(inputs)
        return [torch.cat(level) for level in zip(*((item.rows, *item.deepstack) for item in items), strict=True)]


def parts(ask: Ask) -> list[Any]:
    return [part for _, turn in ask.turns for part in turn if not isinstance(part, str)]


def facts(part: Part) -> media.Medium:
    match part:
        case bytes():
            height, width, _ = decoded(part, None).shape
            return media.Picture(width, height)
        case Sound():
            return media.Recording(len(part.samples))
        case Clip():
            frames, height, width, _ = part.frames.shape
            return media.Clip(width, height, frames, part.fps)
    raise AssertionError(part)


def decoded(part: Part, plan: ItemPlan | None) -> Decoded:
    match part:
        case bytes():
            (image,) = Ask([("user", [part])]).pictures
            return np.array(image)
        case Sound():
            return part.samples
        case Clip():
            assert plan is not None
            return part.frames[list(plan.frames)]
    raise AssertionError(part)


def asks(family: str, modality: Modality) -> list[Ask]:
    """One item, another of another size, and where the family takes several in a request, two more of them."""
    rng = random.Random(f"{family}/{modality}")
    made: list[Part]
    match modality:
        case Modality.IMAGE:
            made = [picture(rng, width, height, "PNG") for width, height in [(64, 90), (420, 130), (75, 75), (28, 201)]]
        case Modality.AUDIO:
            made = [sound(rng, seconds) for seconds in (0.3, 31.0, 2.71, 12.5)]
        case Modality.VIDEO:
            made = [clip(rng, w, h, frames, 2.0) for w, h, frames in [(64, 90, 2), (120, 70, 5), (56, 84, 4), (56, 84, 4)]]
    groups = [made[:1], made[1:2], *([made[2:]] if catalogue("TAKES").get(family, Takes()).items > 1 else [])]
    return [Ask([("user", [*group, "what"])]) for group in groups]


@pytest.fixture(scope="module")
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[[str], Half]:
    halves: dict[str, Half] = {}

    def of(family: str) -> Half:
        if family not in halves:
            path = checkpoint_dir(family)
            checkpoint = open_checkpoint(str(path))
            preprocess = Preprocessor(checkpoint, tuple(schemes_of(family)))
            halves[family] = Half(checkpoint, Oracle(path), preprocess, Towers(checkpoint, "float32", "cpu"))
        return halves[family]

    return of


def close(ours: Features, theirs: Features) -> bool:
    return all(
        one.shape == other.shape and float((one - other).abs().max()) < CLOSE for one, other in zip(ours, theirs, strict=True)
    )


def joined(items: list[Features]) -> Features:
    return [torch.cat(level) for level in zip(*items, strict=True)]


@pytest.mark.parametrize(("family", "modality"), CASES, ids=lambda value: getattr(value, "word", value))
def test_rows_alone_and_batched_are_those_of_the_whole_model(
    family: str, modality: Modality, load: Callable[[str], Half]
) -> None:
    half = load(family)
    made = asks(family, modality)
    plans = [half.plans(ask) for ask in made]
    prepared = [half.prepared(ask) for ask in made]
    expected = [half.expected(ask) for ask in made]
    together = iter(half.towers.encode([item for items in prepared for item in items]))
    for ask_plans, items, theirs in zip(plans, prepared, expected, strict=True):
        alone = [half.towers.encode([item])[0] for item in items]
        batched = [next(together) for _ in items]
        assert [item.grid for item in items] == [plan.grid for plan in ask_plans]
        assert [len(rows) for rows, *_ in batched] == [plan.rows for plan in ask_plans]
        assert all(level.shape == item[0].shape for item in batched for level in item)
        assert close(joined(alone), theirs) and close(joined(batched), theirs)
        assert float(theirs[0].std()) > 100 * CLOSE, "rows so small that anything is close to them"


@pytest.mark.parametrize("family", ["qwen2_5_omni_thinker", "llava_onevision", "internvl"])
def test_kinds_of_media_share_a_batch(family: str, load: Callable[[str], Half]) -> None:
    half = load(family)
    items = [item for modality in schemes_of(family) for ask in asks(family, modality) for item in half.prepared(ask)]
    random.Random(5).shuffle(items)
    for item, batched in zip(items, half.towers.encode(items), strict=True):
        assert close(batched, half.towers.encode([item])[0])


CUT = [(f, m) for f, m in CASES if schemes_of(f)[m].cut]


def test_everything_is_cut_but_what_is_one_sequence_to_the_towers() -> None:
    assert {f for f, m in CUT if m is Modality.IMAGE} == {"internvl", "smolvlm", "idefics3", "gemma3"}
    assert {f for f, m in CUT if m is Modality.AUDIO} == {"voxtral", "qwen2_5_omni_thinker"}
    assert {f for f, m in CUT if m is Modality.VIDEO} == set(VIDEOS)


@pytest.mark.parametrize(("family", "modality"), CUT, ids=lambda value: getattr(value, "word", value))
def test_pieces_are_the_whole(
    family: str, modality: Modality, load: Callable[[str], Half], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and deepstack rows of pieces, alone and in a batch with those of other items, are those of whole items."""
    half = load(family)
    if family == "gemma3":
        for name, value in {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 64}.items():
            monkeypatch.setattr(half.preprocess._processors[modality], name, value)
    items = [item for ask in asks(family, modality) for item in half.prepared(ask)]
    whole = [half.towers.encode([item])[0] for item in items]
    for size in (1, max(item.patches for item in items) // 2):  # every unit a piece, and half of the largest item
        monkeypatch.setattr(half.towers, "piece_patches", size)
        cut = [half.towers.split(item) for item in items]
        assert any(len(pieces) > 1 for pieces in cut)
        assert [sum(piece.patches for piece in pieces) for pieces in cut] == [item.patches for item in items]
        together = iter(half.towers.encode([piece for pieces in cut for piece in pieces]))
        for pieces, features in zip(cut, whole, strict=True):
            assert close(joined([half.towers.encode([piece])[0] for piece in pieces]), features)
            assert close(joined([next(together) for _ in pieces]), features)


def test_every_kind_of_media_that_can_be_planned_can_be_encoded() -> None:
    assert CASES and {(f, m) for f in FAMILIES for m in schemes_of(f)} == set(CASES)
    for family in FAMILIES.values():
        assert set(family.modalities) <= set(schemes_of(family.model_type)), family.model_type


@pytest.mark.parametrize(("family", "modality"), CASES, ids=lambda value: getattr(value, "word", value))
def test_what_warms_up_the_service_is_as_planned(family: str, modality: Modality, load: Callable[[str], Half]) -> None:
    half = load(family)
    medium, plan = blank(half.checkpoint, modality)
    prepared = half.preprocess(medium, plan)
    ((rows, *_),) = half.towers.encode([prepared])
    assert (len(rows), prepared.grid, prepared.patches) == (plan.rows, plan.grid, plan.patches)


def test_a_recording_is_heard_as_far_as_planned(load: Callable[[str], Half]) -> None:
    half = load("voxtral")
    samples = sound(random.Random(1), 31.0).samples
    (plan,) = half.checkpoint.plan([media.Recording(16000)])
    assert half.preprocess(samples, plan).inputs["input_features"].shape[0] == plan.tiles == 1
    short = half.preprocess(np.ascontiguousarray(samples[:16000]), plan)
    assert torch.equal(half.preprocess(samples, plan).inputs["input_features"], short.inputs["input_features"])


def test_phi4_pictures_depend_on_whether_one_of_the_request_is_padded(load: Callable[[str], Half]) -> None:
    """Its tower looks back only where nothing is masked, as the whole model does; other requests of a batch change nothing."""
    half, rng = load("phi4_multimodal"), random.Random(2)
    whole, padded, larger = (picture(rng, *size, "PNG") for size in [(75, 75), (28, 201), (450, 450)])
    made = [Ask([("user", [*items, "what"])]) for items in ([whole], [whole, whole], [whole, padded], [larger, whole], [padded])]
    prepared = [half.prepared(ask) for ask in made]
    together = iter(half.towers.encode([item for items in prepared for item in items]))
    rows = [[next(together) for _ in items] for items in prepared]
    for ask, items in zip(made, rows, strict=True):
        assert close(joined(items), half.expected(ask))
    assert close(rows[0][0], rows[1][0]) and close(rows[0][0], rows[3][1]) and not close(rows[0][0], rows[2][0])


LOW = [f.model_type for f in FAMILIES.values() if f.low is not None]


@pytest.mark.parametrize("family", LOW)
def test_rows_at_low_detail_are_as_planned(family: str, load: Callable[[str], Half]) -> None:
    """Among pictures that are looked at as the files say, whose rows they do not change."""
    half, pixels = load(family), np.random.default_rng(3).integers(0, 256, (520, 700, 3), dtype=np.uint8)
    low, usual = (half.checkpoint.plan([media.Picture(700, 520, look)])[0] for look in (media.Look(low=True), media.AS_SET))
    prepared = [half.preprocess(pixels, plan) for plan in (low, usual, low)]
    first, second, third = half.towers.encode(prepared)
    assert [len(rows[0]) for rows in (first, second, third)] == [low.rows, usual.rows, low.rows]
    assert close(first, third) and close(second, half.towers.encode([half.preprocess(pixels, usual)])[0])
    assert [item.grid for item in prepared] == [low.grid, usual.grid, low.grid]


def test_gemma3_crops_where_its_files_say_so(load: Callable[[str], Half]) -> None:
    """Alone the image processor honours the setting, which the whole processor overrides."""
    half = load("gemma3")
    image = np.zeros((300, 900, 3), np.uint8)
    (plan,) = half.checkpoint.plan([media.Picture(900, 300)])
    processor = half.preprocess._processors[Modality.IMAGE]
    assert half.preprocess(image, plan).inputs["pixel_values"].shape[0] == 1
    try:
        processor.do_pan_and_scan = True
        assert half.preprocess(image, plan).inputs["pixel_values"].shape[0] == 4
    finally:
        processor.do_pan_and_scan = False


def test_half_precision_does_not_move_rows(load: Callable[[str], Half]) -> None:
    """Sizes and masks stay whole numbers, so that there are as many rows as in float32."""
    for family in ("phi4_multimodal", "qwen2_audio"):
        half = load(family)
        modality = next(iter(schemes_of(family)))
        towers = Towers(half.checkpoint, "bfloat16", "cpu")
        for ask in asks(family, modality)[:2]:
            ((rows, *_),) = towers.encode(half.prepared(ask))
            assert rows.dtype is torch.bfloat16 and len(rows) == half.plans(ask)[0].rows and rows.isfinite().all()
