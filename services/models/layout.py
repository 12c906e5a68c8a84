"""Lays out a prompt: token ids with runs of placeholders for each media item, and where each run stands. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.models.checkpoint import Checkpoint
from services.models.media import Grid, ItemPlan, Modality
from services.models.registry import UnsupportedModel
from services.models.tokenizer import ChatTemplateError, PromptTokenizer

Run = tuple[int, int]  # which item of the conversation, and how many placeholder tokens


@dataclass(frozen=True)
class Turn:
    """One message: its role and, in order, texts and planned media items."""

    role: str
    parts: tuple[str | ItemPlan, ...]


@dataclass(frozen=True)
class Placement:
    """One run of placeholders: ``token_ids[offset : offset + tokens]`` stand for some of an item's rows, or for all.

    Attributes:
        offset: index of the first placeholder.
        plan: of the item.
        item: which item of the conversation it is.
        tokens: placeholders; as many as rows, but 1 where rows are read by cross-attention.
        first_row: the first of the item's rows that this run stands for.
        rows: how many of them.
    """

    offset: int
    plan: ItemPlan
    item: int
    tokens: int
    first_row: int
    rows: int

    @property
    def grid(self) -> Grid:
        """How the run's rows are arranged: the item's grid, or its steps of ``t`` that the run has."""
        whole = self.plan.grid
        return whole if self.rows == self.plan.rows else Grid(whole.t * self.rows // self.plan.rows, whole.h, whole.w)


@dataclass(frozen=True)
class Layout:
    """A prompt; placements are in prompt order, those of one item beside each other."""

    token_ids: list[int]
    placements: list[Placement]

    def tokens_of(self, modality: Modality) -> int:
        """Prompt tokens that stand for this modality."""
        return sum(p.tokens for p in self.placements if p.plan.modality is modality)


class PromptLayout:
    """Lays out conversations for one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        family = checkpoint.family
        ids = {m: checkpoint.placeholder_id(m) for m in family.modalities}
        self._placeholder_ids = frozenset(ids.values())
        self.tokenizer = PromptTokenizer(checkpoint.path, tuple(self._placeholder_ids))
        self._placeholders = {m: str(self.tokenizer.fast.id_to_token(i)) for m, i in ids.items()}
        self._modality_of = {self._written(m): m for m in family.modalities}
        self._written_pattern = re.compile("|".join(map(re.escape, self._modality_of)) or r"(?!)")

    def _written(self, modality: Modality) -> str:
        """What the chat template writes for an item."""
        name = self.checkpoint.family.written.get(modality)
        token = self.tokenizer.named(name) if name else self._placeholders[modality]
        if token is None:
            raise UnsupportedModel(f"{self.checkpoint.path}/tokenizer_config.json names no {name}, which media are written with")
        return token

    def lay_out(self, turns: Sequence[Turn]) -> Layout:
        """Token ids equal to those of the checkpoint's own processor.

        Raises:
            ChatTemplateError: the template refuses the conversation, or leaves out one of its media.
        """
        family = self.checkpoint.family
        multimodal = bool(family.modalities)
        messages = [{"role": t.role, "content": _content(t, multimodal)} for t in turns]
        plans = [part for turn in turns for part in turn.parts if isinstance(part, ItemPlan)]
        runs: list[Run] = []
        # transformers adds BOS behind a processor's template, never behind a bare tokenizer's
        compact = self.tokenizer.encode_chat(
            messages,
            add_special_tokens=multimodal and not family.bos_after_images,
            rewrite=lambda text: self._finish(self._spell(text, plans, runs)),
        )
        return self._expand(compact, plans, iter(runs))

    def _spell(self, text: str, plans: list[ItemPlan], runs: list[Run]) -> str:
        """Put an item's texts and one placeholder a run where the template wrote the item; ``runs`` gets their lengths.

        Special tokens part the text that is tokenised, so a single placeholder gives its neighbours the same tokens as many.
        """
        waiting = {m: iter([i for i, plan in enumerate(plans) if plan.modality is m]) for m in self._placeholders}
        used = 0

        def spell(match: re.Match[str]) -> str:
            nonlocal used
            modality = self._modality_of[match.group()]
            item = next(waiting[modality], None)
            if item is None:
                raise ChatTemplateError(f"it writes {modality.word} placeholders that no part asked for")
            used += 1
            spelling = plans[item].spelling
            runs.extend((item, part) for part in spelling if isinstance(part, int))
            return "".join(part if isinstance(part, str) else self._placeholders[modality] for part in spelling)

        spelled = self._written_pattern.sub(spell, text)
        if used < len(plans):
            raise ChatTemplateError(f"it leaves out {len(plans) - used} of {len(plans)} media parts; move them to a user message")
        return spelled

    def _finish(self, text: str) -> str:
        """As ``PaliGemmaProcessor.prepare_inputs_layout`` of transformers 5.24, for the families that are like it."""
        if not self.checkpoint.family.bos_after_images:
            return text
        head, image, tail = text.rpartition(self._placeholders[Modality.IMAGE])
        if not image:
            raise ChatTemplateError("there is no picture and the model always needs one")
        return f"{head}{image}{self.tokenizer.bos}{tail}\n"

    def _expand(self, compact: list[int], plans: list[ItemPlan], runs: Iterator[Run]) -> Layout:
        """Replace each run's single placeholder by as many as it has."""
        ids: list[int] = []
        placements: list[Placement] = []
        for token in compact:
            if token not in self._placeholder_ids:
                ids.append(token)
                continue
            item, tokens = next(runs)
            rows = plans[item].rows if self.checkpoint.family.cross else tokens
            before = placements[-1] if placements and placements[-1].item == item else None
            first_row = before.first_row + before.rows if before else 0
            placements.append(Placement(len(ids), plans[item], item, tokens, first_row, rows))
            ids += [token] * tokens
        assert next(runs, None) is None, "a placeholder was not tokenised as one"
        return Layout(ids, placements)


def _content(turn: Turn, multimodal: bool) -> str | list[dict[str, Any]]:
    """A list of parts for multimodal templates, a string for text-only ones, as each kind expects."""
    if not multimodal:
        return "".join(part for part in turn.parts if isinstance(part, str))
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.modality.word} for p in turn.parts]
