"""How each family prepares and encodes videos. A video is ``pixels.view`` of the frames that its plan names: uint8
``[frames, 3, height, width]``.

Which frames those are and when they are shown was decided with the plan; no processor samples again.
"""

from __future__ import annotations

from typing import Any

import torch

from services.encoder.families.images import patch_grid, picture_features, tile_grid, tiles_of
from services.encoder.features import FIRST_EXTENT, Cut, Inputs, Levels, Scheme
from services.encoder.pixels import bounded, patches
from services.models.hf import transformers
from services.models.media import ItemPlan
from services.models.video_plans import OMNI_PIXELS, of_all_frames


def _processed(processor: Any, frames: torch.Tensor) -> Inputs:
    inputs: Inputs = processor(videos=[frames], do_sample_frames=False, input_data_format="channels_first", return_tensors="pt")
    return inputs


def _qwen(processor: Any, frames: torch.Tensor, plan: ItemPlan, size: Any = None, together: bool = False) -> Inputs:
    """``together`` says that the processor bounds the pixels of all frames."""
    if processor.do_resize:
        factor, pair = processor.patch_size * processor.merge_size, processor.temporal_patch_size
        cap = bool(getattr(processor, "cap_pixels_per_frame", None))  # not said: off, as the plan has it
        size = bounded(size or processor.size, of_all_frames(plan.look, len(frames)) if together else plan.look)
        (frames,) = processor.resize(frames[None], size, processor.resample, factor, pair, cap_pixels_per_frame=cap)
    pixels, grid = patches(processor, frames)
    return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[grid.t, grid.h, grid.w]])}


def _qwen3(processor: Any, frames: torch.Tensor, plan: ItemPlan) -> Inputs:
    return _qwen(processor, frames, plan, together=True)


def _omni(processor: Any, frames: torch.Tensor, plan: ItemPlan) -> Inputs:
    """The whole processor forces a size of its own, whatever the files say."""
    return _qwen(processor, frames, plan, size=transformers.image_utils.SizeDict(**OMNI_PIXELS))


def _llava_onevision(processor: Any, frames: torch.Tensor, plan: ItemPlan) -> Inputs:
    return {"pixel_values_videos": _processed(processor, frames)["pixel_values_videos"]}  # [1, frames, ...]


def _internvl(processor: Any, frames: torch.Tensor, plan: ItemPlan) -> Inputs:
    """Frames are tiles to the towers."""
    return {"pixel_values": _processed(processor, frames)["pixel_values_videos"][0]}  # [frames, ...]


def _video_features(base: Any, inputs: Inputs) -> Levels:
    output = base.get_video_features(**inputs, return_dict=True)
    return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


def _steps(inputs: Inputs, config: Any) -> int:
    return int(inputs["video_grid_thw"][0, 0])


def _take_steps(inputs: Inputs, config: Any, start: int, stop: int) -> Inputs:
    """Steps of time: attention never crosses from one to the next, and none knows its place among them."""
    grid = inputs["video_grid_thw"]  # [1, 3]
    each = int(grid[0, 1] * grid[0, 2])
    taken = torch.tensor([[stop - start, grid[0, 1], grid[0, 2]]], dtype=grid.dtype)
    return {"pixel_values_videos": inputs["pixel_values_videos"][start * each : stop * each], "video_grid_thw": taken}


def _llava_onevision_features(base: Any, inputs: Inputs) -> Levels:
    """A newline ends a video, not a piece of it."""
    ends = inputs.get("ends")
    (rows,) = _video_features(base, {"pixel_values_videos": inputs["pixel_values_videos"]})
    return [rows if ends is None else [video if end else video[:-1] for video, end in zip(rows, ends.tolist(), strict=True)]]


def _frames(inputs: Inputs, config: Any) -> int:
    return inputs["pixel_values_videos"].shape[1]  # [1, frames, ...]


def _take_frames(inputs: Inputs, config: Any, start: int, stop: int) -> Inputs:
    frames = inputs["pixel_values_videos"]
    return {"pixel_values_videos": frames[:, start:stop], "ends": torch.tensor([stop == frames.shape[1]])}


_QWEN_CUT = Cut(_steps, _take_steps)
_QWEN = Scheme(_qwen, _video_features, patch_grid("video_grid_thw"), cut=_QWEN_CUT)

VIDEOS = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": Scheme(_qwen3, _video_features, patch_grid("video_grid_thw"), cut=_QWEN_CUT),
    "qwen2_5_omni_thinker": Scheme(_omni, _video_features, patch_grid("video_grid_thw"), cut=_QWEN_CUT),
    "llava_onevision": Scheme(_llava_onevision, _llava_onevision_features, cut=Cut(_frames, _take_frames)),
    "internvl": Scheme(_internvl, picture_features, tile_grid, tiles_of, FIRST_EXTENT),
}
