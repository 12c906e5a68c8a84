"""Lays out a prompt: token ids with a run of placeholders for each media item, and where each run stands. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.models.checkpoint import Checkpoint
from services.models.media import ItemPlan, Modality
from services.models.tokenizer import ChatTemplateError, PromptTokenizer


@dataclass(frozen=True)
class Turn:
    """One message: its role and, in order, texts and planned media items."""

    role: str
    parts: tuple[str | ItemPlan, ...]


@dataclass(frozen=True)
class Placement:
    """Where one item's rows go: ``token_ids[offset : offset + plan.rows]`` are its placeholders."""

    offset: int
    plan: ItemPlan


@dataclass(frozen=True)
class Layout:
    """A prompt; placements are in the order of the items in the conversation."""

    token_ids: list[int]
    placements: list[Placement]

    def tokens_of(self, modality: Modality) -> int:
        """Prompt tokens that stand for this modality."""
        return sum(p.plan.rows for p in self.placements if p.plan.modality is modality)


class PromptLayout:
    """Lays out conversations for one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._placeholders = {checkpoint.placeholder_id(m): m for m in checkpoint.family.modalities}
        self.tokenizer = PromptTokenizer(checkpoint.path, tuple(self._placeholders))

    def lay_out(self, turns: Sequence[Turn]) -> Layout:
        """Token ids equal to those of the checkpoint's own processor.

        Raises:
            ChatTemplateError: the template refuses the conversation, or leaves out one of its media.
        """
        multimodal = bool(self._placeholders)
        messages = [{"role": t.role, "content": _content(t, multimodal)} for t in turns]
        # transformers adds BOS behind a processor's template, never behind a bare tokenizer's
        compact = self.tokenizer.encode_chat(messages, add_special_tokens=multimodal)
        plans = [part for turn in turns for part in turn.parts if isinstance(part, ItemPlan)]
        return self._expand(compact, plans)

    def _expand(self, compact: list[int], plans: list[ItemPlan]) -> Layout:
        """Replace each item's single placeholder by a run of ``rows``."""
        waiting = list(plans)
        ids: list[int] = []
        placements = []
        for token in compact:
            modality = self._placeholders.get(token)
            if modality is None:
                ids.append(token)
                continue
            if not waiting or waiting[0].modality is not modality:
                raise ChatTemplateError(f"it writes {modality.word} placeholders that no part asked for")
            plan = waiting.pop(0)
            placements.append(Placement(len(ids), plan))
            ids += [token] * plan.rows
        if waiting:
            raise ChatTemplateError(f"it leaves out {len(waiting)} of {len(plans)} media parts; move them to a user message")
        return Layout(ids, placements)


def _content(turn: Turn, multimodal: bool) -> str | list[dict[str, Any]]:
    """A list of parts for multimodal templates, a string for text-only ones, as each kind expects."""
    if not multimodal:
        return "".join(part for part in turn.parts if isinstance(part, str))
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.modality.word} for p in turn.parts]
