"""Token arithmetic of pictures that are cut into tiles, one function a scheme. Torch-free; golden tests hold it equal to the
processors. Settings are those of ``Checkpoint.settings``: the processor's own keys win over the model's config.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from services.models.image_sizes import Settings, UnsupportedSize, check_aspect, class_tokens, each, look_of
from services.models.media import Grid, ItemPlan, Modality, Picture

IDEFICS_LONGEST = 4096  # pixels of a side, whatever the settings say


def llava_next_anyres(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """LLaVA-NeXT: tiles of the best of some fixed resolutions without their padding, a newline a line, and the whole view.

    Source: Liu et al., "LLaVA-NeXT" (blog of 2024-01-30), and ``LlavaNextProcessor._get_number_of_features`` of
    transformers 5.24. At low detail there is one resolution, a single tile.

    Raises:
        UnsupportedSize: one side is more than 200 times the other, or too long for every resolution.
    """
    check_aspect(width, height)
    tile = _tile_side(processor, 336)
    side = tile // int(processor.get("patch_size") or config["vision_config"]["patch_size"])
    resolutions = processor.get("image_grid_pinpoints") or config["image_grid_pinpoints"]
    down, across = _best_resolution(width, height, [(tile, tile)] if look_of(processor).low else resolutions, tile)
    lines, columns = _without_padding(width, height, down * side, across * side)
    rows = side * side + lines * (columns + 1) + class_tokens(config, processor)
    tiles = 1 + down * across
    return ItemPlan(Modality.IMAGE, rows, Grid(1, 1, rows), tiles * (side * side + 1), tiles=tiles)


def llava_onevision_anyres(pictures: Sequence[Picture], config: Settings, processors: Sequence[Settings]) -> list[ItemPlan]:
    """LLaVA-OneVision: a picture that is alone is tiled and shrunk to some tiles' worth; of several each is one tile, and so
    is one at low detail.

    Source: Li et al., "LLaVA-OneVision" (arXiv 2408.03326), and ``LlavaOnevisionProcessor.replace_image_token``
    of transformers 5.24; its own ``_get_num_multimodal_tokens`` does not know of several pictures.

    Raises:
        UnsupportedSize: one side is more than 200 times the other, or too long for every resolution.
    """
    processor = processors[0]
    if len(pictures) == 1 and not look_of(processor).low:
        return each(_onevision_alone)(pictures, config, processors)
    view = int(processor["num_image_tokens"])
    dropped = int(processor.get("vision_feature_select_strategy") == "default")
    for item, picture in enumerate(pictures):
        try:
            check_aspect(picture.width, picture.height)
        except UnsupportedSize as error:
            error.item = item
            raise
    rows = view + 1 - dropped  # a newline behind it
    return [ItemPlan(Modality.IMAGE, rows, Grid(1, 1, rows), view)] * len(pictures)


def _onevision_alone(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    check_aspect(width, height)
    view = int(processor["num_image_tokens"])
    side = math.isqrt(view)
    down, across = _best_resolution(
        width, height, processor.get("image_grid_pinpoints") or config["image_grid_pinpoints"], _tile_side(processor, 384)
    )
    lines, columns = _without_padding(width, height, down * side, across * side)
    most = int(processor.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    ratio = math.sqrt(lines * columns / (most * side**2))
    if ratio > 1.1:
        lines, columns = int(lines // ratio), int(columns // ratio)
    rows = view + lines * (columns + 1) - (processor.get("vision_feature_select_strategy") == "default")
    tiles = 1 + down * across
    return ItemPlan(Modality.IMAGE, rows, Grid(1, 1, rows), tiles * view, tiles=tiles)


def _tile_side(processor: Settings, default: int) -> int:
    size = processor.get("size") or {}
    return int((processor.get("crop_size") or {}).get("height") or size.get("height") or size.get("shortest_edge") or default)


def _best_resolution(width: int, height: int, resolutions: Sequence[Sequence[int]], tile: int) -> tuple[int, int]:
    """Tiles down and across of the resolution that keeps most of a picture and then wastes least."""
    best, most, least_waste = None, 0, math.inf
    for tall, wide in resolutions:
        scale = min(wide / width, tall / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        if kept > most or (kept == most and tall * wide - kept < least_waste):
            best, most, least_waste = (tall, wide), kept, tall * wide - kept
    if best is None or most == 0:
        raise UnsupportedSize(
            f"{width} x {height} pixels: the short side would vanish in tiles of {tile}; send a squarer picture"
        )
    return best[0] // tile, best[1] // tile


def _without_padding(width: int, height: int, lines: int, columns: int) -> tuple[int, int]:
    """Lines and columns of patches that hold picture; padding is on both sides alike, so one odd line of it stays."""
    if width / height > columns / lines:
        return lines - (lines - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return lines, columns - (columns - int(round(width * (lines / height), 7))) // 2 * 2


def internvl_tiles(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """InternVL: the grid of tiles whose shape is closest to the picture's, and the whole view where there are several.

    Source: Chen et al., "How Far Are We to GPT-4V?" (arXiv 2404.16821), and ``get_optimal_tiled_canvas`` in
    ``image_processing_got_ocr2`` of transformers 5.24. ``InternVLProcessor`` always cuts, whatever the settings say.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    size = processor.get("size") or {}
    area = int(size.get("height", 384)) * int(size.get("width", 384))
    across, down = _closest_shape(
        width, height, area, _grids_by_size(int(processor.get("min_patches", 1)), int(processor.get("max_patches", 12)))
    )
    tiles = across * down + (across * down > 1)
    rows = tiles * int(processor.get("image_seq_length", 256))
    start, end = processor.get("start_image_token", "<img>"), processor.get("end_image_token", "</img>")
    vision = config["vision_config"]
    patches = math.prod(
        edge // patch for edge, patch in zip(_pair(vision["image_size"]), _pair(vision["patch_size"]), strict=True)
    )
    return ItemPlan(Modality.IMAGE, rows, Grid(1, 1, rows), tiles * (patches + 1), (start, rows, end), tiles)


def _pair(value: int | Sequence[int]) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else value


@functools.lru_cache(16)
def _grids_by_size(least: int, most: int) -> tuple[tuple[int, int], ...]:
    grids = [(across, down) for across in range(1, most + 1) for down in range(1, most // across + 1)]
    return tuple(sorted((grid for grid in grids if grid[0] * grid[1] >= least), key=math.prod))


def _closest_shape(width: int, height: int, tile_area: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Tiles across and down; of two as close, the later one if the picture covers more than half of its tiles."""
    best, least = (1, 1), math.inf
    for across, down in grids:
        distance = abs(width / height - across / down)
        if distance < least or (distance == least and width * height > 0.5 * tile_area * across * down):
            best, least = (across, down), distance
    return best


def idefics3_tiles(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """Idefics3 and SmolVLM: tiles between tags of row and column, a line of text a row of them, then the whole view.

    Source: Laurencon et al., "Building and better understanding vision-language models" (arXiv 2408.12637),
    and ``Idefics3ImageProcessor._preprocess`` of transformers 5.24: the picture is scaled to the longest edge first, small
    ones up. Its own ``get_number_of_image_patches`` rounds the short side otherwise.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    tile = int((processor.get("max_image_size") or {}).get("longest_edge", 364))
    down, across = (0, 0)
    if processor.get("do_image_splitting", True):
        longest = int((processor.get("size") or {}).get("longest_edge", 4 * 364)) if processor.get("do_resize", True) else 0
        down, across = _idefics3_grid(width, height, longest, tile)
    each_tile = int(processor.get("image_seq_len", 169))
    around = str(processor.get("fake_image_token", "<fake_token_around_image>"))
    runs: list[str | int] = []
    text = ""
    for row in range(1, down + 1):
        for column in range(1, across + 1):
            runs += [f"{text}{around}<row_{row}_col_{column}>", each_tile]
            text = ""
        text = "\n"
    text += "\n" if down else ""
    runs += [f"{text}{around}{processor.get('global_image_token', '<global-img>')}", each_tile, around]
    tiles = down * across + 1
    vision = config["vision_config"]
    patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    return ItemPlan(Modality.IMAGE, tiles * each_tile, Grid(tiles, 1, each_tile), tiles * patches, tuple(runs), tiles)


def _idefics3_grid(width: int, height: int, longest: int, tile: int) -> tuple[int, int]:
    """Tiles down and across, 0 x 0 where one is enough; the short side is cut to whole pixels at every step."""
    if longest:
        wide = width >= height
        width, height = _scaled_to(width, height, longest)
        width, height = (width, height + height % 2) if wide else (width + width % 2, height)
        width, height = max(width, 1), max(height, 1)
    if max(width, height) > IDEFICS_LONGEST:
        width, height = _scaled_to(width, height, IDEFICS_LONGEST)
        width, height = max(width, 1), max(height, 1)
    width, height = _scaled_to(width, height, math.ceil(max(width, height) / tile) * tile)
    down, across = math.ceil(height / tile), math.ceil(width / tile)
    return (down, across) if max(down, across) > 1 else (0, 0)


def _scaled_to(width: int, height: int, longest: int) -> tuple[int, int]:
    if width >= height:
        return longest, int(longest / (width / height))
    return int(longest * (width / height)), longest


def mllama_tiles(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """Llama 3.2 Vision: the canvas of tiles that enlarges least, else shrinks least. One token stands for all states.

    Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), and ``get_optimal_tiled_canvas`` in
    ``image_processing_mllama`` of transformers 5.24. The tower makes states of unused tiles too; nothing reads them.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    most = int(processor.get("max_image_tiles", 4))
    side = int((processor.get("size") or {}).get("height", 224))

    def fit(canvas: tuple[int, int]) -> float:
        return min(canvas[0] * side / height, canvas[1] * side / width)

    canvases = [(down, across) for down in range(1, most + 1) for across in range(1, most // down + 1)]
    enlarging = [fit(canvas) for canvas in canvases if fit(canvas) >= 1]
    scale = min(enlarging) if enlarging else max(fit(canvas) for canvas in canvases)
    tiles = min(math.prod(canvas) for canvas in canvases if fit(canvas) == scale)
    vision = config["vision_config"]
    states = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2 + 1
    return ItemPlan(Modality.IMAGE, most * states, Grid(tiles, most, states), most * states, (1,), tiles)


def phi4_crops(pictures: Sequence[Picture], config: Settings, processors: Sequence[Settings]) -> list[ItemPlan]:
    """Phi-4 multimodal: crops without the patches of their padding, a newline a line, a separator, the whole view.

    Source: "Phi-4-Mini Technical Report" (arXiv 2503.01743), and ``dynamic_preprocess`` in
    ``image_processing_phi4_multimodal`` of transformers 5.24. The whole view's 16 x 16 rows are fixed there too. Where
    one picture of a request is padded, the tower of transformers looks both ways in all of them, else only back.

    Raises:
        UnsupportedSize: one side is more than 200 times the other, or less than 10 pixels after scaling.
    """
    plans = each(_phi4_picture)(pictures, config, processors)
    masked = any(plan.masked for plan in plans)
    return [replace(plan, masked=masked) for plan in plans]


def _phi4_picture(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    check_aspect(width, height)
    side = int((processor.get("size") or {}).get("height", 448))
    patch, most = int(processor.get("patch_size", 14)), int(processor.get("dynamic_hd", 36))
    across, down = math.ceil(width / side), math.ceil(height / side)
    if across * down > most:
        across, down = _closest_shape(width, height, side**2, _phi4_grids(most))
    wide, tall = across * side, down * side
    if wide / width < tall / height:
        new_width, new_height = wide, int(height * (wide / width))
    else:
        new_width, new_height = int(width * (tall / height)), tall
    if min(new_width, new_height) < 10:
        raise UnsupportedSize(f"{width} x {height} pixels become {new_width} x {new_height}: both sides must keep 10")
    padding = (wide - new_width) // patch, (tall - new_height) // patch
    columns = _every_second(side // patch, across, padding[0])
    lines = _every_second(side // patch, down, padding[1])
    rows = lines * (columns + 1) + 1 + 16 * (16 + 1)
    tiles = 1 + across * down
    return ItemPlan(
        Modality.IMAGE, rows, Grid(1, 1, rows), tiles * (side // patch) ** 2, tiles=tiles, masked=max(padding) > 0
    )  # fmt: skip


@functools.lru_cache(16)
def _phi4_grids(most: int) -> tuple[tuple[int, int], ...]:
    # grids of as many crops keep the order of a set, as in the processor: it decides between two equally close ones
    grids = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if 1 <= i * j <= most}
    return tuple(sorted(grids, key=math.prod))


def _every_second(patches: int, crops: int, padding: int) -> int:
    """Every second patch of each crop along one side, but for those of the padding at its end."""
    return sum(crop * patches + at < crops * patches - padding for crop in range(crops) for at in range(0, patches, 2))


def gemma3_pan_and_scan(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """Gemma 3: one square view, and crops along the longer side where pan and scan is turned on and the picture is long.

    Source: "Gemma 3 Technical Report" (arXiv 2503.19786); ``pan_and_scan_batched`` in
    ``image_processing_gemma3`` and ``Gemma3Processor.replace_image_token`` of transformers 5.24.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    crops = _gemma3_crops(max(width, height), min(width, height), processor) if processor.get("do_pan_and_scan") else 0
    rows = int(processor.get("image_seq_length", 256))
    start, end = processor.get("boi_token", "<start_of_image>"), processor.get("eoi_token", "<end_of_image>")
    before, after = f"\n\n{start}", f"{end}\n\n"
    runs: tuple[str | int, ...] = (before, rows, after)
    if crops:
        runs = (f"Here is the original image {before}", rows, f"{after} and here are some crops to help you see better {before}")
        runs += (rows, f"{after} {before}") * (crops - 1) + (rows, after)
    vision = config["vision_config"]
    patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    views = 1 + crops
    return ItemPlan(Modality.IMAGE, views * rows, Grid(views, 1, rows), views * patches, runs, views)


def _gemma3_crops(long: int, short: int, processor: Settings) -> int:
    if long / short < float(processor.get("pan_and_scan_min_ratio_to_activate") or 1.2):
        return 0
    least = int(processor.get("pan_and_scan_min_crop_size") or 256)
    crops = min(math.floor(long / short + 0.5), long // least)
    crops = min(max(crops, 2), int(processor.get("pan_and_scan_max_num_crops") or 4))
    return 0 if min(math.ceil(long / crops), short) < least else crops
