"""How each family prepares and encodes pictures. A picture is ``pixels.view`` of one: uint8 ``[3, height, width]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from services.encoder.features import FIRST_EXTENT, Inputs, Levels, Scheme
from services.encoder.pixels import bounded, patches
from services.models.media import Grid, ItemPlan
from services.models.registry import FAMILIES

_GEMMA3_CROPS = {  # where published files say null; the processor's own arithmetic needs numbers
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def _low(family: str, plan: ItemPlan) -> dict[str, Any]:
    """What the processor is set to for this picture, beside its own settings."""
    return dict(FAMILIES[family].low or {}) if plan.look.low else {}


def _processed(*names: str, family: str = "", **settings: Any) -> Callable[[Any, Any, ItemPlan], Inputs]:
    """What the processor makes of a picture, with settings that the family's whole processor forces."""

    def prepare(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
        output = processor(images=[picture], return_tensors="pt", **settings, **(_low(family, plan) if family else {}))
        return {name: output[name] for name in names}

    return prepare


def _qwen(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """Its own patches, which do not depend on the plan: a picture that is not as planned must come to light."""
    frames = picture[None]
    if processor.do_resize:
        factor = processor.patch_size * processor.merge_size
        frames = processor.resize(frames, bounded(processor.size, plan.look), processor.resample, factor)
    pixels, grid = patches(processor, frames)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[grid.t, grid.h, grid.w]])}


def _llava(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """The processor's own steps, without its bookkeeping: that takes a tenth of the time of a small picture."""
    pictures = picture[None]
    if processor.do_pad:
        pictures = processor.pad_to_square(pictures, tuple(int(level * 255) for level in processor.image_mean))
    if processor.do_resize:
        pictures = processor.resize(pictures, processor.size, processor.resample)
    if processor.do_center_crop:
        pictures = processor.center_crop(pictures, processor.crop_size)
    rescale, normalize = (processor.do_rescale, processor.rescale_factor), (processor.do_normalize, processor.image_mean)
    return {"pixel_values": processor.rescale_and_normalize(pictures, *rescale, *normalize, processor.image_std)}


def picture_features(base: Any, inputs: Inputs) -> Levels:
    """Whatever ``get_image_features`` pools: a picture's rows an entry, or a tile's."""
    output = base.get_image_features(**inputs, return_dict=True)
    return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


def patch_grid(name: str) -> Callable[[Inputs, ItemPlan, Mapping[str, Any]], Grid]:
    """The grid of patches that Qwen's processors put beside the pixels; four neighbours become a row."""

    def grid(inputs: Inputs, plan: ItemPlan, config: Mapping[str, Any]) -> Grid:
        return Grid(*inputs[name][0].tolist())  # [1, 3]

    return grid


def tiles_of(inputs: Inputs) -> int:
    """Tiles, views or frames of an item whose every one is an entry."""
    return inputs["pixel_values"].shape[0]


def tile_grid(inputs: Inputs, plan: ItemPlan, config: Mapping[str, Any]) -> Grid:
    """A run of rows for each tile."""
    tiles = tiles_of(inputs)
    return Grid(tiles, 1, plan.rows // tiles)


def _pixel_grid(inputs: Inputs, plan: ItemPlan, config: Mapping[str, Any]) -> Grid:
    height, width = inputs["pixel_values"].shape[-2:]  # [1, channels, height, width]
    patch = int(config["vision_config"]["patch_size"])
    return Grid(1, height // patch, width // patch)


def _llava_next(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """At low detail, ``one_tile`` is there: only its name matters, it keeps such items together."""
    low = {"image_grid_pinpoints": one_tile(processor)} if plan.look.low else {}
    output = processor(images=[picture], do_pad=True, return_tensors="pt", **low)
    inputs = {"pixel_values": output["pixel_values"][0], "image_sizes": output["image_sizes"]}  # [tiles, ...], [1, 2]
    return {**inputs, "one_tile": torch.tensor(low["image_grid_pinpoints"])} if low else inputs  # [1, 2]


def one_tile(processor: Any) -> list[list[int]]:
    """The only resolution at low detail."""
    return [[processor.crop_size.height, processor.crop_size.width]]


def _llava_next_features(base: Any, inputs: Inputs) -> Levels:
    """The model counts tiles by its own resolutions, which are others for the call."""
    resolutions, low = base.config.image_grid_pinpoints, inputs.get("one_tile")
    given = {name: tensor for name, tensor in inputs.items() if name != "one_tile"}
    if low is None:
        return picture_features(base, given)
    base.config.image_grid_pinpoints = low[:1].tolist()
    try:
        return picture_features(base, given)
    finally:
        base.config.image_grid_pinpoints = resolutions


def _llava_onevision(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """A picture that is alone in its request is tiled, so that it has two tiles at least; one of several is a single tile, and
    so is one at low detail.

    The processor tells them apart by how many stand in a list, the model by ``batch_num_images``, where anything but 1 means
    several. Here a speck stands for the others and is dropped again.
    """
    alone = plan.tiles != 1
    beside = [] if alone else [picture[:, :1, :1]]
    output = processor(images=[[picture, *beside]], return_tensors="pt")
    inputs = {"pixel_values": output["pixel_values"][0], "image_sizes": output["image_sizes"][:1]}
    return inputs if alone else {**inputs, "batch_num_images": output["batch_num_images"]}


def _idefics3(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """Tiles as if each were a request of its own, so that each becomes an entry."""
    output = processor(images=[picture], return_tensors="pt", **_low("idefics3", plan))
    pixels, mask = output["pixel_values"][0], output["pixel_attention_mask"][0].bool()
    return {"pixel_values": pixels.unsqueeze(1), "pixel_attention_mask": mask.unsqueeze(1)}  # [tiles, 1, ...]


def _gemma3(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """Views: the whole picture, then its crops. Crops are cut where the files say so, which the whole processor overrides."""
    said = {name: getattr(processor, name, None) for name in _GEMMA3_CROPS}
    settings = {name: _GEMMA3_CROPS[name] if value is None else value for name, value in said.items()}
    settings |= _low("gemma3", plan)
    output = processor(images=[picture], return_tensors="pt", do_convert_rgb=True, **settings)
    return {"pixel_values": output["pixel_values"]}  # [views, channels, height, width]


def _mllama_features(base: Any, inputs: Inputs) -> Levels:
    """States for cross-attention, those of unused tiles too."""
    states = base.multi_modal_projector(base.vision_model(**inputs).last_hidden_state)
    return [states.flatten(1, -2)]  # [pictures, 1 x tiles x patches, hidden]


def _mllama_grid(inputs: Inputs, plan: ItemPlan, config: Mapping[str, Any]) -> Grid:
    mask = inputs["aspect_ratio_mask"]  # [1, 1, most tiles]
    return Grid(int(mask.sum()), mask.shape[-1], plan.rows // mask.shape[-1])


def _phi4(processor: Any, picture: torch.Tensor, plan: ItemPlan) -> Inputs:
    """``causal`` is there where no picture of the request is padded: only its name matters, it keeps such items together."""
    output = processor(images=[picture], return_tensors="pt", **_low("phi4_multimodal", plan))
    inputs = {name: output[name] for name in ("image_pixel_values", "image_sizes", "num_img_tokens")}
    # whole numbers: the model counts lines and columns by its sum, which half precision would round
    mask = inputs["image_attention_mask"] = output["image_attention_mask"].long()  # [1, crops, lines, columns]
    return inputs if plan.masked or not mask.all() else {**inputs, "causal": torch.ones(1, dtype=torch.bool)}


def _phi4_features(base: Any, inputs: Inputs) -> Levels:
    """The module only knows how to write rows into a prompt, so it gets one that is nothing but placeholders.

    Its tower's attention calls itself causal, and is so in transformers' fast attention where nothing is masked.
    """
    counts = inputs["num_img_tokens"].tolist()
    module, pixels = base.embed_tokens_extend.image_embed, inputs["image_pixel_values"]
    for layer in module.img_processor.encoder.layers:
        layer.self_attn.is_causal = "causal" in inputs
    token, hidden = module.config.vision_config.image_token_id, module.config.hidden_size
    rows = module(
        torch.full((1, sum(counts)), token, device=pixels.device),
        torch.zeros(1, sum(counts), hidden, dtype=pixels.dtype, device=pixels.device),
        image_pixel_values=pixels,
        image_sizes=inputs["image_sizes"],
        image_attention_mask=inputs["image_attention_mask"],
    )
    return [rows[0].split(counts)]


_QWEN = Scheme(_qwen, picture_features, patch_grid("image_grid_thw"))
_IDEFICS3 = Scheme(_idefics3, picture_features, tile_grid, tiles_of, FIRST_EXTENT)

IMAGES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen2_5_omni_thinker": _QWEN,
    "llava": Scheme(_llava, picture_features, _pixel_grid),
    "llava_next": Scheme(_llava_next, _llava_next_features),
    "llava_onevision": Scheme(_llava_onevision, picture_features),
    "internvl": Scheme(
        _processed("pixel_values", family="internvl", crop_to_patches=True), picture_features, entries=tiles_of, cut=FIRST_EXTENT
    ),
    "smolvlm": _IDEFICS3,
    "idefics3": _IDEFICS3,
    "gemma3": Scheme(_gemma3, picture_features, tile_grid, tiles_of, FIRST_EXTENT),
    "gemma4": Scheme(_processed("pixel_values", "image_position_ids", family="gemma4"), picture_features),
    "paligemma": Scheme(_processed("pixel_values"), picture_features),
    "mllama": Scheme(_processed("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), _mllama_features, _mllama_grid),
    "phi4_multimodal": Scheme(_phi4, _phi4_features),
}
