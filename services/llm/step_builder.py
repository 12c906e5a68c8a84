"""Turns a step's chunks into a plan for attention: block tables kept from step to step, brought up to date entry by entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from services.llm.attention.cut import Cut, Stretch
from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import Backend, GroupPlan, Rows, StepPlan
from services.llm.attention.pool import KvPool
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.merge import MergedPrompt
from services.llm.scheduler import Chunk

Ints = np.ndarray


class StepBuilder:
    """Holds one table ``[max_num_seqs, blocks]`` per layer group; a sequence's row is its slot."""

    def __init__(
        self,
        pool: KvPool,
        backend: Backend,
        layers: Sequence[KvLayer],
        group_of: Mapping[int, int],
        groups: Sequence[LayerGroup],
        max_num_seqs: int,
        max_model_len: int,
        pruned_from: int | None = None,
    ) -> None:
        """``pruned_from``: the first layer that may see fewer rows, where any does."""
        self.pool, self.backend, self.groups, self.group_of = pool, backend, groups, group_of
        self.layers = {layer.index: layer for layer in layers}
        self._size, self._pruned_from = pool.block_size, pruned_from
        width = [-(-max_model_len // self._size) + 1 if g.kind is not Kind.CROSS else g.blocks for g in groups]
        self._tables = [np.zeros((max_num_seqs, w), dtype=np.int64) for w in width]
        self._device = next(iter(pool.keys.values())).device

    def build(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk], prompts: Mapping[str, MergedPrompt]) -> StepPlan:
        """The plan of a step whose rows are ``decodes``, then ``prefills``."""
        self._update([*decodes, *prefills])
        slots = np.fromiter((c.sequence.slot for c in decodes), dtype=np.int64, count=len(decodes))
        plans = [
            self._cross(g, [*decodes, *prefills], prompts)
            if group.kind is Kind.CROSS
            else self._self_attention(g, group, slots, decodes, prefills, prompts)
            for g, group in enumerate(self.groups)
        ]
        cut = None if self._pruned_from is None else self._cut(self._pruned_from, decodes, prefills, plans, prompts)
        return StepPlan(self.pool, self.backend, self.layers, self.group_of, plans, cut)

    def _update(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            for rows, table in zip(self._tables, sequence.tables, strict=True):
                if table.changed < len(table.blocks):
                    rows[sequence.slot, table.changed : len(table.blocks)] = table.blocks[table.changed :]
                    table.changed = len(table.blocks)

    def _self_attention(
        self,
        g: int,
        group: LayerGroup,
        slots: Ints,
        decodes: Sequence[Chunk],
        prefills: Sequence[Chunk],
        prompts: Mapping[str, MergedPrompt],
    ) -> GroupPlan:
        pruned = group.kind is Kind.PRUNED
        table, size = self._tables[g], self._size
        kept = (c.sequence.kept(c.start) for c in decodes) if pruned else (c.start for c in decodes)
        contexts = np.fromiter(kept, dtype=np.int64, count=len(decodes))
        ends = contexts + 1
        first = np.maximum(ends - group.window, 0) if group.window else np.zeros_like(ends)
        first_block = first // size
        count = -(-ends // size) - first_block
        columns = np.arange(count.max(initial=0))
        blocks = table[slots[:, None], np.minimum(first_block[:, None] + columns, table.shape[1] - 1)]
        blocks = np.where(columns < count[:, None], blocks, self.pool.num_blocks[g])
        stored = [table[slots, contexts // size] * size + contexts % size]
        rows = []
        start = len(decodes)
        for chunk in prefills:
            for begin, stop in _parts(chunk):
                context, end = (chunk.sequence.kept(begin), chunk.sequence.kept(stop)) if pruned else (begin, stop)
                own, at = table[chunk.sequence.slot], np.arange(context, end)
                stored.append(own[at // size] * size + at % size)
                masks = prompts[chunk.sequence.id].masks if stop <= len(chunk.sequence.prompt) else None
                rows.append(
                    Rows(
                        start,
                        end - context,
                        context,
                        self._tensor(own[: -(-end // size)].copy()),
                        {name: mask[begin:stop, :stop] for name, mask in masks.items()} if masks else None,
                    )
                )
                start += end - context
        return GroupPlan(
            group.window,
            self._tensor(np.concatenate(stored)),
            len(decodes),
            self._tensor(blocks),
            self._tensor(first - first_block * size),
            self._tensor(ends - first_block * size),
            rows,
        )

    def _cut(
        self,
        layer: int,
        decodes: Sequence[Chunk],
        prefills: Sequence[Chunk],
        plans: Sequence[GroupPlan],
        prompts: Mapping[str, MergedPrompt],
    ) -> Cut | None:
        """What the step's layers from ``layer`` on do not see; None if they see all."""
        seen = iter(plans[self.group_of[layer - 1]].rows)
        stretches, counts = [], [1] * len(decodes)
        for chunk in prefills:
            rows, *_ = [next(seen) for _ in _parts(chunk)]
            sequence, count = chunk.sequence, chunk.count
            if sequence.dropped and chunk.start <= sequence.drop_from < chunk.start + chunk.count:
                visual = prompts[sequence.id].visual
                assert visual is not None and rows.length == len(sequence.prompt)
                stretches.append(Stretch(rows, visual, sequence.dropped))
                count -= sequence.dropped
            counts.append(count)
        return Cut.of(layer, len(decodes) + sum(c.count for c in prefills), counts, stretches) if stretches else None

    def _cross(self, g: int, chunks: Sequence[Chunk], prompts: Mapping[str, MergedPrompt]) -> GroupPlan:
        table, size = self._tables[g], self._size
        stored = [np.zeros(0, dtype=np.int64)]
        rows, start = [], 0
        for chunk in chunks:
            cross, sequence = prompts[chunk.sequence.id].cross, chunk.sequence
            if cross is not None:
                at = np.arange(len(cross.states))
                if chunk.start == sequence.started:
                    stored.append(table[sequence.slot, at // size] * size + at % size)
                seen = torch.arange(chunk.start, chunk.start + chunk.count, device=self._device).clamp(max=len(cross.mask) - 1)
                blocks = self._tensor(table[sequence.slot, : -(-len(at) // size)].copy())
                rows.append(Rows(start, chunk.count, 0, blocks, media_mask=cross.mask[seen]))
            start += chunk.count
        none = torch.zeros(0, dtype=torch.long, device=self._device)
        return GroupPlan(None, self._tensor(np.concatenate(stored)), 0, none, none, none, rows)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _parts(chunk: Chunk) -> list[tuple[int, int]]:
    """A chunk, cut where the prompt ends: behind it no family's own mask applies."""
    prompt, stop = len(chunk.sequence.prompt), chunk.start + chunk.count
    if chunk.start < prompt < stop:
        return [(chunk.start, prompt), (prompt, stop)]
    return [(chunk.start, stop)]
