"""Each picture's rows as the towers of stock transformers give them, for the families that see pictures and nothing moving.

A function takes one request's processor output. Families whose processor tells the number of tiles only through the
prompt, or whose tiles are parted by text, find the items by the runs of placeholders there.
"""

from __future__ import annotations

from typing import Any

import torch

from services.models.media import Grid, Modality
from tests.oracle import Item, ItemsOf, Takes


def item(rows: torch.Tensor, **details: Any) -> Item:
    """A picture whose positions need no grid."""
    return Item(Modality.IMAGE, rows, Grid(1, 1, len(rows)), details=details)


def features(model: Any, inputs: Any, *names: str) -> Any:
    """What ``get_image_features`` pools, given those of the inputs ``names`` that are there."""
    wanted = {name: inputs[name] for name in names if name in inputs}
    return model.base_model.get_image_features(**wanted, return_dict=True).pooler_output


def runs(inputs: Any, token: int) -> list[int]:
    """Lengths of the prompt's runs of ``token``, in order."""
    here = (inputs["input_ids"][0] == token).int()
    edges = torch.diff(here, prepend=here.new_zeros(1), append=here.new_zeros(1))
    return ((edges == -1).nonzero() - (edges == 1).nonzero()).flatten().tolist()


@torch.no_grad()
def plain(model: Any, inputs: Any) -> list[Item]:
    """One entry a picture: llava, gemma3, paligemma, gemma4 and the LLaVAs of several tiles, newlines included."""
    if "pixel_values" not in inputs:
        return []
    names = ("pixel_values", "image_sizes", "batch_num_images", "image_position_ids")
    return [item(rows) for rows in features(model, inputs, *names)]


@torch.no_grad()
def internvl(model: Any, inputs: Any) -> list[Item]:
    """One entry a tile; a picture's tiles are one run of placeholders, the view of the whole last."""
    if "pixel_values" not in inputs:
        return []
    tiles = features(model, inputs, "pixel_values")  # [tiles, rows a tile, hidden]
    each = tiles.shape[1]
    counts = [length // each for length in runs(inputs, model.config.image_token_id)]
    return [item(part.flatten(0, 1), tiles=len(part)) for part in tiles.split(counts)]


@torch.no_grad()
def tile_by_tile(model: Any, inputs: Any) -> list[Item]:
    """Idefics3 and SmolVLM: all tiles of the request in one entry, each tile's rows a run of placeholders.

    Between the runs stand text tokens that name row and column, so there is one item a run and ``details["runs"]`` is 1:
    a picture is as many items as it has tiles, the view of the whole last.
    """
    if "pixel_values" not in inputs:
        return []
    (rows,) = features(model, inputs, "pixel_values", "pixel_attention_mask")
    return [item(part, runs=1) for part in rows.split(runs(inputs, model.config.image_token_id))]


@torch.no_grad()
def mllama(model: Any, inputs: Any) -> list[Item]:
    """States for cross-attention, all four tiles of a picture whether used or not: ``[tiles * patches, hidden]``.

    Nothing is merged. ``details``: ``tiles``, those in use; ``patches``, states a tile; ``max_tiles``; and ``mask``
    ``[tokens, max_tiles]``, the picture's column of ``cross_attention_mask``: which tokens see which of its tiles.
    """
    if "pixel_values" not in inputs:
        return []
    base = model.base_model
    wanted = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    states = base.multi_modal_projector(base.vision_model(**wanted).last_hidden_state)[0]  # [pictures, tiles, patches, hidden]
    masks = inputs["cross_attention_mask"][0].transpose(0, 1)  # [pictures, tokens, tiles]
    used = inputs["aspect_ratio_mask"][0].sum(-1).tolist()
    return [
        item(
            picture.flatten(0, 1),
            tiles=tiles,
            patches=picture.shape[1],
            max_tiles=picture.shape[0],
            mask=mask,
            aspect_ratio_id=int(ratio),
        )
        for picture, tiles, mask, ratio in zip(states, used, masks, inputs["aspect_ratio_ids"][0], strict=True)
    ]


def phi4_rows(side: int, size: torch.Tensor, mask: torch.Tensor) -> int:
    """Rows of one picture: its crops without their padding, a newline a line, a separator, the view of the whole."""
    down, across = (size // side).tolist()
    seen = mask[1 : 1 + down * across, ::2, ::2]  # [crops, half a crop's patches, half a crop's patches]
    half = seen.shape[-1]
    lines = seen.view(down, across, half, half).transpose(1, 2).reshape(down * half, across * half)
    height, width = int(lines[:, 0].sum()), int(lines[0].sum())
    return height * (width + 1) + 1 + half * (half + 1)


@torch.no_grad()
def phi4_multimodal(model: Any, inputs: Any) -> list[Item]:
    """The module scatters by itself, so it is given a prompt of nothing but placeholders."""
    if "image_pixel_values" not in inputs:
        return []
    config = model.config
    sizes, masks = inputs["image_sizes"], inputs["image_attention_mask"]
    counts = [phi4_rows(config.vision_config.crop_size, *pair) for pair in zip(sizes, masks, strict=True)]
    rows = model.base_model.embed_tokens_extend.image_embed(
        torch.full((1, sum(counts)), config.vision_config.image_token_id),
        torch.zeros(1, sum(counts), config.hidden_size),
        image_pixel_values=inputs["image_pixel_values"],
        image_sizes=sizes,
        image_attention_mask=masks,
    )
    return [item(part) for part in rows[0].split(counts)]


ITEMS: dict[str, ItemsOf] = {
    "llava": plain,
    "llava_next": plain,
    "llava_onevision": plain,
    "gemma3": plain,
    "gemma4": plain,
    "paligemma": plain,
    "internvl": internvl,
    "smolvlm": tile_by_tile,
    "idefics3": tile_by_tile,
    "mllama": mllama,
    "phi4_multimodal": phi4_multimodal,
}
TAKES = {"paligemma": Takes(items=1, least=1, turns=False)}
