"""Merges a prompt's text and media into decoder inputs by running the family's own merge code once per request.

transformers' model is called up to its decoder, whose arguments are captured; media rows are zeros at that time. What
comes out are the embeddings, positions and masks the family wants; real rows are written into their places as they
arrive. Not thread-safe per model: only the engine's thread merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.models.checkpoint import Checkpoint
from services.models.hf import transformers
from services.models.media import Grid, Modality


@dataclass
class MergedPrompt:
    """A prompt as the decoder takes it.

    Attributes:
        embeds: ``[prompt, hidden]``; media rows are zero until they arrive.
        positions: ``[axes, prompt]``; three axes for M-RoPE, one elsewhere.
        next_position: position of the answer's first token, on every axis.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    next_position: int

    def position(self, index: int) -> int:
        """Position of answer token ``index - prompt``, on every axis."""
        return self.next_position + index - len(self.embeds)


@dataclass(frozen=True)
class MediaRun:
    """One item's run of placeholders in the prompt."""

    modality: Modality
    offset: int
    rows: int
    grid: Grid


class _Captured(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class Merger:
    """Merges prompts for one loaded language-model half."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self.model, self.family = model, checkpoint.family
        self.decoder = getattr(model.base_model, self.family.decoder) if self.family.decoder else model.base_model
        self.embed = model.get_input_embeddings()
        self.hidden_size = int(self.embed.weight.shape[1])

    def merge(self, prompt: list[int], media: list[MediaRun]) -> MergedPrompt:
        """Decoder inputs of a prompt whose media rows are still zero."""
        device = self.embed.weight.device
        ids = torch.tensor([prompt], device=device)
        if not self.family.decoder:
            return MergedPrompt(self.embed(ids)[0], torch.arange(len(prompt), device=device)[None], len(prompt))
        captured = self._capture(ids, self._media_arguments(ids, media))
        positions = captured.get("position_ids")
        if positions is None:
            positions = torch.arange(len(prompt), device=device)[None]
        if positions.ndim == 3:  # [axes, 1, prompt]; with four axes the first numbers the text
            positions = positions[-3:, 0]
        return MergedPrompt(captured["inputs_embeds"][0].clone(), positions, int(positions.max()) + 1)

    def _media_arguments(self, ids: torch.Tensor, media: list[MediaRun]) -> dict[str, Any]:
        if not media:
            return {}
        rows = [torch.zeros(run.rows, self.hidden_size, dtype=self.embed.weight.dtype, device=ids.device) for run in media]
        encoded = transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=rows)  # type: ignore[arg-type]
        arguments: dict[str, Any] = {"mm_encoder_outputs": {"image": encoded}}
        if self.family.positions_from_grid:
            arguments["image_grid_thw"] = torch.tensor([[r.grid.t, r.grid.h, r.grid.w] for r in media], device=ids.device)
            types = torch.zeros_like(ids)
            for run in media:
                types[0, run.offset : run.offset + run.rows] = 1
            arguments["mm_token_type_ids"] = types
        return arguments

    def _capture(self, ids: torch.Tensor, media: dict[str, Any]) -> dict[str, Any]:
        def stop(_module: Any, _args: Any, arguments: dict[str, Any]) -> None:
            raise _Captured(arguments)

        hook = self.decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **media)
        except _Captured as captured:
            return captured.arguments
        finally:
            hook.remove()
        raise AssertionError("the model never called its decoder")
