"""Which frames of a video are looked at and what they cost, one function a scheme. Torch-free; golden tests hold it equal to
the processors.

A plan is made once, from headers: indices, times, rows and grid come from one list, and whoever decodes uses the indices as
they are. Where frames come at an uneven rate, indices are chosen as if it were even and each is replaced by the frame nearest
to that time; times are always those of the frames themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.models.image_sizes import Settings, check_aspect, look_of, pixel_bounds, smart_resize
from services.models.media import ALL_FRAMES, Clip, Grid, ItemPlan, Look, Modality, Sampling

VideoScheme = Callable[[Clip, Sampling, Settings, Settings], ItemPlan]  # clip, which frames, config, video processor
OMNI_PIXELS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
OMNI_FPS = 2.0


def qwen2_video(clip: Clip, sampling: Sampling, config: Settings, processor: Settings) -> ItemPlan:
    """Qwen2-VL: frames in pairs, every frame resized like a picture.

    Source: Wang et al., "Qwen2-VL" (arXiv 2409.12191), and ``Qwen2VLVideoProcessor`` of transformers 5.24. Where fewer frames
    than a pair are left, the processor divides by zero or fails; here it is a pair, or all there are.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(clip.width, clip.height)
    pair = int(processor.get("temporal_patch_size", 2))
    indices = _choose(clip, sampling, lambda: _qwen2_indices(clip, sampling, processor, pair))
    patch, merge = int(processor.get("patch_size", 14)), int(processor.get("merge_size", 2))
    low, high = pixel_bounds(processor, 128 * 28 * 28, 28 * 28 * 768)
    if processor.get("cap_pixels_per_frame"):
        budget = int(int(processor.get("max_video_tokens", 128000)) * (patch * merge) ** 2 * 0.9)
        high = max(min(high, budget * pair // len(indices)), int(low * 1.05))
    h, w = smart_resize(clip.width, clip.height, patch * merge, low, high)
    grid = Grid(math.ceil(len(indices) / pair), h // patch, w // patch)
    return _in_patches(clip, indices, grid, merge)


def _qwen2_indices(clip: Clip, sampling: Sampling, processor: Settings, pair: int) -> list[int]:
    total = clip.frames
    if sampling.frames is not None:
        count = round(sampling.frames / pair) * pair
    else:
        most = min(int(processor.get("max_frames", 768)), total) // pair * pair
        wanted = min(max(_at_rate(clip, sampling), int(processor.get("min_frames", 4))), most, total)
        count = math.floor(wanted / pair) * pair
    return _steps(total, min(max(count, pair), total))


def qwen2_5_video(clip: Clip, sampling: Sampling, config: Settings, processor: Settings) -> ItemPlan:
    """Qwen2.5-VL: as Qwen2-VL, and positions follow the seconds that a pair of frames spans.

    Source: Bai et al., "Qwen2.5-VL" (arXiv 2502.13923), and ``Qwen2_5_VLProcessor._process_videos`` of transformers 5.24.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    plan = qwen2_video(clip, sampling, config, processor)
    sampled_fps = len(plan.frames) / clip.frames * clip.fps
    return replace(plan, seconds_per_grid=int(processor.get("temporal_patch_size", 2)) / sampled_fps)


def omni_video(clip: Clip, sampling: Sampling, config: Settings, processor: Settings) -> ItemPlan:
    """Qwen2.5-Omni, its sound track left out: as Qwen2.5-VL with bounds of its own, and a pair always spans a second.

    Source: Xu et al., "Qwen2.5-Omni" (arXiv 2503.20215), and ``Qwen2_5OmniProcessor`` of transformers 5.24: its
    ``videos_kwargs`` override the file's size, and its ``_process_videos`` takes 2 frames a second for granted.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    own = {key: value for key, value in processor.items() if key not in ("min_pixels", "max_pixels")} | {"size": OMNI_PIXELS}
    seconds = int(processor.get("temporal_patch_size", 2)) / OMNI_FPS
    return replace(qwen2_video(clip, sampling, config, own), seconds_per_grid=seconds)


def qwen3_video(clip: Clip, sampling: Sampling, config: Settings, processor: Settings) -> ItemPlan:
    """Qwen3-VL: pixels are bounded over all frames together, and the time of each pair of frames is written before it. What a
    caller bounds is a frame.

    Source: "Qwen3-VL Technical Report" (arXiv 2511.21631), ``Qwen3VLVideoProcessor`` and
    ``Qwen3VLProcessor.replace_video_token`` of transformers 5.24. A single frame is taken twice; the processor refuses it.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    pair = int(processor.get("temporal_patch_size", 2))
    indices = _choose(clip, sampling, lambda: _qwen3_indices(clip, sampling, processor))
    indices += indices[-1:] * (pair - len(indices))
    patch, merge = int(processor.get("patch_size", 16)), int(processor.get("merge_size", 2))
    together = {**processor, "look": of_all_frames(look_of(processor), len(indices))}
    low, high = pixel_bounds(together, 128 * 32 * 32, 32 * 32 * 768)
    if processor.get("cap_pixels_per_frame"):
        most = int(processor.get("max_video_tokens", 768)) * (patch * merge) ** 2
        high = max(min(most, high // len(indices)), int(low * 1.05)) * len(indices)
    h, w = _resize_together(clip, len(indices), pair, patch * merge, low, high)
    grid = Grid(math.ceil(len(indices) / pair), h // patch, w // patch)
    plan = _in_patches(clip, indices, grid, merge)
    shown = [*plan.times, *plan.times[-1:] * (-len(indices) % pair)]
    start, end = processor.get("vision_start_token", "<|vision_start|>"), processor.get("vision_end_token", "<|vision_end|>")
    runs: list[str | int] = []
    for first in range(0, len(shown), pair):
        middle = (shown[first] + shown[first + pair - 1]) / 2
        runs += [f"{end if first else ''}<{middle:.1f} seconds>{start}", plan.rows // grid.t]
    return replace(plan, runs=(*runs, end))


def of_all_frames(look: Look, frames: int) -> Look:
    """The same, where bounds count the pixels of all frames."""
    low, high = look.min_pixels, look.max_pixels
    return replace(look, min_pixels=low and low * frames, max_pixels=high and high * frames)


def _qwen3_indices(clip: Clip, sampling: Sampling, processor: Settings) -> list[int]:
    total, count = clip.frames, sampling.frames
    if count is None:
        count = max(int(_at_rate(clip, sampling)), int(processor.get("min_frames", 4)))
        count = min(count, int(processor.get("max_frames", 768)), total)
    if count < 2:
        return [0]
    step = (total - 1) / (count - 1)
    return [*(round(i * step) for i in range(count - 1)), total - 1]


def _resize_together(clip: Clip, frames: int, pair: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """``smart_resize`` in ``video_processing_qwen3_vl``: the bounds count the pixels of all frames."""
    width, height = clip.width, clip.height
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        width, height = int(width * scale), int(height * scale)
    check_aspect(width, height)
    h, w = round(height / factor) * factor, round(width / factor) * factor
    volume = round(frames / pair) * pair * h * w
    if volume > high:
        beta = math.sqrt(frames * height * width / high)
        return max(factor, math.floor(height / beta / factor) * factor), max(factor, math.floor(width / beta / factor) * factor)
    if volume < low:
        beta = math.sqrt(low / (frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return h, w


def _in_patches(clip: Clip, indices: Sequence[int], grid: Grid, merge: int) -> ItemPlan:
    patches = grid.t * grid.h * grid.w
    return ItemPlan(
        Modality.VIDEO, patches // merge**2, grid, patches,
        tiles=grid.t, frames=tuple(indices), times=_times(clip, indices),
    )  # fmt: skip


def llava_onevision_video(clip: Clip, sampling: Sampling, config: Settings, processor: Settings) -> ItemPlan:
    """LLaVA-OneVision: every frame is one tile, pooled to a quarter, and one newline ends the video.

    Source: Li et al., "LLaVA-OneVision" (arXiv 2408.03326), ``LlavaOnevisionProcessor.replace_video_token`` and
    ``default_sample_indices_fn`` of transformers 5.24, which refuses more frames than there are; here all are taken then.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(clip.width, clip.height)
    total = clip.frames
    count = min(max(sampling.frames or int(_at_rate(clip, sampling)), 1), total)
    indices = _choose(clip, sampling, lambda: _steps(total, count))
    view = int(processor["num_image_tokens"])
    rows = len(indices) * math.ceil(math.isqrt(view) / 2) ** 2 + 1
    return ItemPlan(
        Modality.VIDEO, rows, Grid(1, 1, rows), len(indices) * view,
        tiles=len(indices), frames=tuple(indices), times=_times(clip, indices),
    )  # fmt: skip


def internvl_video(clip: Clip, sampling: Sampling, config: Settings, processor: Settings) -> ItemPlan:
    """InternVL: every frame is one tile with its number before it.

    Source: Chen et al., "How Far Are We to GPT-4V?" (arXiv 2404.16821), ``InternVLVideoProcessor.sample_frames`` and
    ``InternVLProcessor.replace_video_token`` of transformers 5.24. Where no frame would be taken, or more than there are, the
    processor raises; here it is one, or all.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(clip.width, clip.height)
    total = clip.frames
    count = min(max(sampling.frames or int(_at_rate(clip, sampling)), 1), total)
    shift = processor.get("initial_shift", True)
    if shift is True:
        indices = _choose(clip, sampling, lambda: [(2 * i + 1) * total // (2 * count) for i in range(count)])
    else:
        first = int(shift or 0)
        indices = _choose(clip, sampling, lambda: [first + i for i in _steps(total, count) if first + i < total])
    each = int(processor.get("image_seq_length", 256))
    start, end = processor.get("start_image_token", "<img>"), processor.get("end_image_token", "</img>")
    runs: list[str | int] = []
    for number in range(1, len(indices) + 1):
        before = f"{end}\n" if number > 1 else ""
        runs += [f"{before}Frame{number}: {start}", each]
    vision = config["vision_config"]
    edge, patch = vision["image_size"], vision["patch_size"]
    patches = (math.prod(edge) // math.prod(patch)) if isinstance(edge, list | tuple) else (int(edge) // int(patch)) ** 2
    rows = len(indices) * each
    return ItemPlan(
        Modality.VIDEO, rows, Grid(len(indices), 1, each), len(indices) * (patches + 1),
        runs=(*runs, end), tiles=len(indices), frames=tuple(indices), times=_times(clip, indices),
    )  # fmt: skip


def _steps(total: int, count: int) -> list[int]:
    """As ``torch.arange(0, total, total / count).int()``, whose single-precision steps can miss a whole frame by one: how wide a
    CPU's registers are decides it there, so here the steps are exact."""
    return [i * total // count for i in range(count)]


def _at_rate(clip: Clip, sampling: Sampling) -> float:
    """Frames that the wanted rate makes of the whole clip; 0 where none is said."""
    return clip.frames / clip.fps * (sampling.fps or 0)


def _choose(clip: Clip, sampling: Sampling, indices: Callable[[], list[int]]) -> list[int]:
    """All frames where nothing is said; else those of ``indices``, or at an uneven rate the nearest in time to where they
    would be at an even one."""
    if sampling == ALL_FRAMES:
        return list(range(clip.frames))
    if not clip.times:
        return indices()
    shown = []
    for index in indices():
        wanted = clip.times[0] + index / clip.fps
        after = min(bisect_left(clip.times, wanted), clip.frames - 1)
        nearer = after > 0 and wanted - clip.times[after - 1] <= clip.times[after] - wanted
        shown.append(after - nearer)
    return shown


def _times(clip: Clip, indices: Sequence[int]) -> tuple[float, ...]:
    return tuple(clip.times[i] if clip.times else i / clip.fps for i in indices)


def pruned(plan: ItemPlan, rate: float) -> ItemPlan:
    """The plan with a share of ``rate`` of its rows dropped, but for as many as one step of time has.

    Source: ``compute_retained_tokens_count`` of vLLM 0.11, whose ``--video-pruning-rate`` is meant.
    """
    rows = max(plan.rows // plan.grid.t, int(plan.rows * (1 - rate)))
    return plan if rows >= plan.rows else replace(plan, rows=rows, whole_rows=plan.rows)
