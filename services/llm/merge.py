"""Merges a prompt's text and media into what the decoder takes, once per request.

Media rows are zeros at first and are written into their places as they arrive. Positions come from the family's own
rope index; the masks of families with non-causal stretches are captured from transformers' own forward, called up to its
decoder. Only the engine's thread merges.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from services.llm.attention.cut import Visual
from services.models.checkpoint import Checkpoint
from services.models.media import Grid, Modality
from services.models.registry import Attention


@dataclass(frozen=True)
class MediaRun:
    """One item's run of placeholders in the prompt.

    Attributes:
        offset: first placeholder.
        rows: embedding rows.
        grid: how they are arranged; in cross-attention families ``t`` is the number of tiles that hold picture.
        seconds_per_grid: video time between two steps of ``grid.t``, where positions follow time.
        tokens: placeholders in the run; as many as rows, but 1 in cross-attention families.
        whole_rows: rows that the grid says, where an encoder has dropped some of them; else 0.
        first_row: of the item, where it has several runs.
    """

    modality: Modality
    offset: int
    rows: int
    grid: Grid
    seconds_per_grid: float = 1.0
    tokens: int = 0
    whole_rows: int = 0
    first_row: int = 0

    @property
    def stop(self) -> int:
        """One past the last placeholder."""
        return self.offset + (self.tokens or self.rows)


@dataclass
class CrossMedia:
    """Rows that cross-attention layers attend to.

    Attributes:
        states: ``[rows, hidden]``.
        mask: ``[prompt, rows]``, which of them each token sees; answer tokens see what the last prompt token sees.
        counts: ``[prompt]``, tokens that come after a picture; the others skip the layer's MLP.
    """

    states: torch.Tensor
    mask: torch.Tensor
    counts: torch.Tensor


@dataclass
class MergedPrompt:
    """A prompt as the decoder takes it.

    Attributes:
        embeds: ``[prompt, hidden]``; media rows are zero until they arrive.
        positions: ``[axes, prompt]``; three axes for M-RoPE, one elsewhere.
        next_position: position of the answer's first token, on every axis.
        starts: per item, where its rows begin among all media rows.
        media: ``[prompt]``, which tokens are media; None without media.
        media_before: ``[prompt + 1]``, media tokens before each token.
        deepstack: ``[levels, media rows, hidden]``, added inside the decoder.
        per_layer: ``[prompt, layers, width]``, the per-layer embeddings of Gemma 4.
        masks: non-causal families: by layer type ``[prompt, prompt]``, which tokens each token sees.
        cross: cross-attention families: the media rows.
        visual: which tokens are visual, where layers may drop some.
        atoms: token ranges that one step must hold whole, because tokens in them see later ones.
        whole_positions: by item, of those of which rows were dropped: ``[axes, whole_rows]``, positions of all of them.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    next_position: int
    starts: list[int]
    media: torch.Tensor | None = None
    media_before: torch.Tensor | None = None
    deepstack: torch.Tensor | None = None
    per_layer: torch.Tensor | None = None
    masks: dict[str, torch.Tensor] | None = None
    cross: CrossMedia | None = None
    visual: Visual | None = None
    atoms: Sequence[tuple[int, int]] = ()
    whole_positions: dict[int, torch.Tensor] = field(default_factory=dict)

    def position(self, index: int) -> int:
        """Position of answer token ``index - prompt``, on every axis."""
        return self.next_position + index - len(self.embeds)

    def keep(self, item: int, run: MediaRun, kept: torch.Tensor) -> None:
        """Which of an item's whole rows are left; must come before its rows are computed."""
        self.positions[:, run.offset : run.stop] = self.whole_positions[item][:, kept]

    def write(self, item: int, run: MediaRun, first: int, feature: int, rows: torch.Tensor) -> None:
        """Put rows ``[first, first + count)`` of an item's feature into their places."""
        if self.cross is not None:
            start = self.starts[item] + first
            self.cross.states[start : start + len(rows)] = rows
        elif feature == 0:
            self.embeds[run.offset + first : run.offset + first + len(rows)] = rows
        else:
            assert self.deepstack is not None
            start = self.starts[item] + first
            self.deepstack[feature - 1, start : start + len(rows)] = rows


class _Captured(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class Merger:
    """Merges prompts for one loaded language-model half."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self.model, self.family, self.config = model, checkpoint.family, checkpoint.config
        self.decoder = getattr(model.base_model, self.family.decoder) if self.family.decoder else model.base_model
        self.embed = model.get_input_embeddings()
        self.hidden_size = int(self.embed.weight.shape[1])
        self.per_layer = bool(getattr(self.decoder.config, "hidden_size_per_layer_input", 0))
        vision = checkpoint.config.get("vision_config") or {}
        self.deepstack_levels = len(vision.get("deepstack_visual_indexes") or ())
        self.cross_rows = 0  # of one item
        if self.family.cross:
            self.cross_rows = vision["max_num_tiles"] * ((vision["image_size"] // vision["patch_size"]) ** 2 + 1)
        self._filler = getattr(self.decoder.config, "pad_token_id", None) or 0
        self.axes = 3 if self.family.positions_from_grid else 1

    @property
    def features(self) -> int:
        """Matrices of rows that every item has: one, and one per deepstack level."""
        return 1 + self.deepstack_levels

    def merge(self, prompt: list[int], media: Sequence[MediaRun]) -> MergedPrompt:
        """Decoder inputs of a prompt whose media rows are still zero."""
        ids = torch.tensor(prompt, device=self.embed.weight.device)
        where = torch.zeros(len(prompt), dtype=torch.bool, device=ids.device)
        for run in media:
            where[run.offset : run.stop] = True
        # a placeholder's id may lie outside the embedding; cross-attention families embed it like a word
        text = ids if self.family.cross else ids.masked_fill(where, self._filler)
        merged = MergedPrompt(
            embeds=self.embed(text),
            positions=torch.arange(len(prompt), device=ids.device)[None],
            next_position=len(prompt),
            starts=[0, *itertools.accumulate(run.rows for run in media)][: len(media)],
            per_layer=self.per_layer_inputs(text),
        )
        if self.family.attention is Attention.PREFIX or (media and self.family.attention is Attention.IMAGE_SPANS):
            self._capture_masks(merged, text, media)
        if not media:
            return merged
        if self.family.cross:
            merged.cross = self._cross(ids, media)
            return merged
        merged.embeds[where] = 0
        merged.media, merged.media_before = where, torch.cat([where.new_zeros(1, dtype=torch.long), where.cumsum(0)]).cpu()
        if self.family.positions_from_grid:
            merged.positions, merged.whole_positions = self._positions(ids, media)
            merged.next_position = int(merged.positions.max()) + 1
        if self.deepstack_levels:
            merged.deepstack = merged.embeds.new_zeros(self.deepstack_levels, int(where.sum()), self.hidden_size)
        return merged

    def per_layer_inputs(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Per-layer embeddings ``[tokens, layers, width]`` of token ids, in families that have them."""
        return self.decoder.get_per_layer_inputs(ids[None], None)[0] if self.per_layer else None

    def _positions(self, ids: torch.Tensor, media: Sequence[MediaRun]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """M-RoPE positions ``[3, prompt]``, and ``[3, whole_rows]`` of pruned items, the first of which stand in."""
        parts, whole, at, shift = [], [], 0, 0
        for run in media:
            more = max(0, run.whole_rows - run.rows)
            whole.append(replace(run, offset=run.offset + shift, rows=run.rows + more, tokens=run.tokens + more))
            parts += [ids[at : run.stop], ids[run.offset : run.offset + 1].expand(more)]
            at, shift = run.stop, shift + more
        positions = self._rope_index(torch.cat([*parts, ids[at:]]), whole)
        left = torch.ones(positions.shape[1], dtype=torch.bool)
        pruned = {}
        for item, (run, all_of_it) in enumerate(zip(media, whole, strict=True)):
            if all_of_it.rows > run.rows:
                pruned[item] = positions[:, all_of_it.offset : all_of_it.stop]
                left[all_of_it.offset + run.rows : all_of_it.stop] = False
        return positions[:, left.to(positions.device)], pruned

    def _rope_index(self, ids: torch.Tensor, media: Sequence[MediaRun]) -> torch.Tensor:
        """M-RoPE positions ``[3, prompt]``."""
        grids = {m: [[r.grid.t, r.grid.h, r.grid.w] for r in media if r.modality is m] for m in Modality}
        types = torch.zeros_like(ids)
        for run in media:
            types[run.offset : run.stop] = {Modality.IMAGE: 1, Modality.VIDEO: 2, Modality.AUDIO: 3}[run.modality]
        seconds = [run.seconds_per_grid for run in media if run.modality is Modality.VIDEO]
        arguments: dict[str, Any] = dict(attention_mask=torch.ones_like(ids)[None])
        for name, modality in (("image_grid_thw", Modality.IMAGE), ("video_grid_thw", Modality.VIDEO)):
            if grids[modality]:
                arguments[name] = torch.tensor(grids[modality], device=ids.device)
        if Modality.AUDIO in self.family.modalities:  # the thinker counts audio by its own arithmetic: 4 frames a row
            sounds = [4 * run.rows for run in media if run.modality is Modality.AUDIO]
            arguments["audio_seqlens"] = torch.tensor(sounds, device=ids.device) if sounds else None
            arguments["second_per_grids"] = torch.tensor(seconds, device=ids.device) if seconds else None
            owner = self.model
        else:
            arguments |= dict(mm_token_type_ids=types[None], second_per_grid_ts=torch.tensor(seconds) if seconds else None)
            owner = self.model.base_model
        positions, _ = owner.get_rope_index(ids[None], **arguments)
        return positions[:, 0]  # type: ignore[no-any-return]

    def _capture_masks(self, merged: MergedPrompt, text: torch.Tensor, media: Sequence[MediaRun]) -> None:
        types = torch.zeros_like(text)  # where the whole prompt sees itself, that is what 0 stands for
        for run in media if self.family.attention is Attention.IMAGE_SPANS else ():
            types[run.offset : run.stop] = 1
        captured = self._capture(text[None], types[None])
        merged.embeds = captured["inputs_embeds"][0].clone()
        if captured["position_ids"] is not None:
            merged.positions = captured["position_ids"]
            merged.next_position = int(merged.positions.max()) + 1
        masks = captured["attention_mask"]
        by_type = masks if isinstance(masks, dict) else {"full_attention": masks}
        merged.masks = {name: _seen(mask[0, 0]) for name, mask in by_type.items() if mask is not None}
        merged.atoms = atoms(merged.masks.values(), len(text))
        if not merged.atoms:
            merged.masks = None  # plainly causal: windows are the layers' own affair

    def _capture(self, ids: torch.Tensor, types: torch.Tensor) -> dict[str, Any]:
        """The arguments that the decoder would get for a prompt without media rows."""

        def stop(_module: Any, _args: Any, arguments: dict[str, Any]) -> None:
            raise _Captured(arguments)

        handle = self.decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model.base_model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **{self.family.token_types: types}
            )
        except _Captured as captured:
            return captured.arguments
        finally:
            handle.remove()
        raise AssertionError("the model never called its decoder")

    def _cross(self, ids: torch.Tensor, media: Sequence[MediaRun]) -> CrossMedia:
        """Llama 3.2 Vision: every token sees the real tiles of the pictures that it follows."""
        from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

        vision = self.config["vision_config"]
        tiles = int(vision["max_num_tiles"])
        patches = media[0].rows // tiles
        seen = torch.zeros(len(ids), len(media), tiles, dtype=torch.bool, device=ids.device)
        spans = get_cross_attention_token_mask(ids.tolist(), int(self.config["image_token_index"]))
        for i, (run, (start, stop)) in enumerate(zip(media, spans, strict=True)):
            seen[start : len(ids) if stop == -1 else stop, i, : run.grid.t] = True
        mask = seen.flatten(1).repeat_interleave(patches, dim=1)
        counts = mask.any(1)
        mask |= ~counts[:, None]  # transformers lets a token before the first picture see every row, padding tiles included
        states = torch.zeros(mask.shape[1], self.hidden_size, dtype=self.embed.weight.dtype, device=ids.device)
        return CrossMedia(states, mask, counts)


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """A mask as bools; some decoders get it as numbers to add to scores, 0 where a token is seen."""
    return mask if mask.dtype is torch.bool else mask == 0


def atoms(masks: Sequence[torch.Tensor] | Any, length: int) -> list[tuple[int, int]]:
    """Token ranges in which some token sees a later one: a chunk may end before or after one, never inside."""
    last = np.arange(1, length + 1)  # one past the furthest token that each token sees
    for mask in masks:
        seen = mask.cpu().numpy()
        last = np.maximum(last, np.where(seen.any(1), length - seen[:, ::-1].argmax(1), 0))
    found: list[tuple[int, int]] = []
    reach = 0
    for token, stop in enumerate(last.tolist()):
        if stop > token + 1:
            if found and token < reach:
                found[-1] = (found[-1][0], max(reach, stop))
            else:
                found.append((token, stop))
            reach = found[-1][1]
    return found
