"""Runs packed steps of the language-model half. Knows sequences only through chunks; never chooses what to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.llm import pruning, rope
from services.llm.attention import choose_backend, choose_block_size, hook
from services.llm.attention.cut import Visual
from services.llm.attention.layers import probe_layers
from services.llm.attention.plan import StepPlan
from services.llm.attention.pool import KvPool
from services.llm.capacity import Demand, assign_groups, size_groups
from services.llm.config import LlmConfig
from services.llm.cuda_graphs import DecodeGraphs, record_decodes
from services.llm.merge import MediaRun, MergedPrompt, Merger
from services.llm.native import replace_layers
from services.llm.scheduler import Chunk
from services.llm.step_builder import StepBuilder
from services.models.checkpoint import Checkpoint
from services.models.half import choose_device, choose_dtype, load_half, parameter_bytes
from services.models.registry import UnsupportedModel


@dataclass(frozen=True)
class StepOutput:
    """What a step yields.

    Attributes:
        sampling: chunks that yield a token, in the order of ``logits``.
        logits: ``[len(sampling), vocab]`` in float32.
        broken: chunks whose values are not numbers; none of them is in ``sampling``.
        scored: by sequence id, float32 logits of every token of its chunk, where they were asked for.
    """

    sampling: list[Chunk]
    logits: torch.Tensor
    broken: list[Chunk]
    scored: dict[str, torch.Tensor]


class ModelRunner:
    """The loaded half, its KV pool, and the merged prompts of unfinished sequences.

    Attributes:
        groups: layer groups with the blocks that the granted memory holds.
        max_model_len: most tokens of prompt and answer together.
        pruning: from which layer on visual tokens are dropped; None if none is.
        pruning_obstacle: why this model cannot drop any; "" if it can.
    """

    def __init__(self, checkpoint: Checkpoint, config: LlmConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, checkpoint, self.device)
        self.model = load_half(checkpoint, "llm", self.dtype, self.device)
        self.merger = Merger(self.model, checkpoint)
        self.decoder = self.merger.decoder
        if not type(self.decoder)._supports_attention_backend:
            raise UnsupportedModel(f"{type(self.decoder).__name__} does not take a custom attention function, which paging needs")
        self.decoder.config._attn_implementation = hook.NAME
        self.parameter_bytes = parameter_bytes(self.model)
        self.max_model_len = config.max_model_len or checkpoint.max_position_embeddings
        backend = choose_backend(config.attention_backend, self.device)
        self.block_size = choose_block_size(config.block_size, backend, self.dtype)
        rope.pin(self.decoder, self.max_model_len)
        self._softcap = getattr(self.decoder.config, "final_logit_softcapping", None)
        self._head = self.model.get_output_embeddings()

        layers = probe_layers(self.decoder, self._probe_arguments(), self.max_model_len)
        if self.device == "cpu" and config.native_layers:
            replace_layers(self.model, self.decoder)
            self._head = self.model.get_output_embeddings()
        self.pruning, self.pruning_obstacle = config.pruning, pruning.obstacle(self.merger, layers)
        if self.pruning:
            pruning.check(self.pruning, self.pruning_obstacle, self.merger, layers)
            pruning.install(self.decoder.layers, self.pruning.layer)
        kinds, group_of = assign_groups(layers, self.pruning)
        demand = Demand(
            self.block_size, self.max_model_len, config.max_num_seqs, config.max_num_batched_tokens, self.merger.cross_rows
        )
        self.groups = size_groups(kinds, group_of, layers, demand, self._budget(config), self.dtype.itemsize, self.pruning)
        pool = KvPool(
            [(layer, group_of[layer.index]) for layer in layers],
            [group.blocks for group in self.groups],
            self.block_size,
            self.dtype,
            self.device,
        )
        self.pool = pool
        self.builder = StepBuilder(
            pool,
            backend,
            layers,
            group_of,
            self.groups,
            config.max_num_seqs,
            self.max_model_len,
            self.pruning.layer if self.pruning else None,
        )
        self._prompts: dict[str, MergedPrompt] = {}
        self.graphs: DecodeGraphs | None = None  # of steps that only decode
        if self.device != "cpu" and not config.enforce_eager:
            self.graphs = record_decodes(
                self._decode, self.builder, self._probe_arguments(), config.max_num_seqs, self.max_model_len
            )

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row."""
        return self.merger.hidden_size

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._head.weight.shape[0])

    @torch.inference_mode()
    def add(self, sequence_id: str, prompt: list[int], media: Sequence[MediaRun]) -> Sequence[tuple[int, int]]:
        """Merge a new sequence's prompt; its media rows are zero until :meth:`write_rows`.

        Returns:
            The token ranges that one step must hold whole.
        """
        self._prompts[sequence_id] = merged = self.merger.merge(prompt, media)
        if self.pruning:
            merged.visual = Visual(pruning.visual_runs(media))
        return merged.atoms

    def share(self, sequence_id: str, child_id: str) -> None:
        """A further sequence with the same prompt."""
        self._prompts[child_id] = self._prompts[sequence_id]

    @torch.inference_mode()
    def write_rows(self, sequence_id: str, item: int, run: MediaRun, first: int, feature: int, rows: torch.Tensor) -> None:
        """Put an item's rows ``[first, first + count)`` of a feature into the prompt."""
        self._prompts[sequence_id].write(item, run, first, feature, rows.to(self.dtype).to(self.device))

    @torch.inference_mode()
    def keep_rows(self, sequence_id: str, item: int, run: MediaRun, kept: torch.Tensor) -> None:
        """Which of a pruned item's rows are left: their tokens take these rows' positions."""
        self._prompts[sequence_id].keep(item, run, kept.to(self.device))

    def remove(self, sequence_id: str) -> None:
        """Forget a sequence's prompt."""
        self._prompts.pop(sequence_id, None)

    @torch.inference_mode()
    def prepare(self, copies: Sequence[tuple[int, int, int]], stale: Sequence[tuple[int, int]]) -> None:
        """Carry out what the next step needs of the pool: copies (group, from, to), then blocks (group, block) to clear."""
        self.pool.copy(copies)
        self.pool.clear(stale)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], scores: Collection[str] = ()) -> StepOutput:
        """Compute one step; ``scores`` are the sequences whose every token's logits are wanted."""
        decodes = [c for c in chunks if c.sequence.decoding]
        prefills = [c for c in chunks if not c.sequence.decoding] if len(decodes) < len(chunks) else []
        ordered = decodes + prefills
        arguments = self._inputs(decodes, prefills)
        plan = self.builder.build(decodes, prefills, self._prompts)
        hidden = self._decode(arguments, plan) if self.graphs is None or prefills else self.graphs.run(arguments, plan)
        counts = plan.cut.counts if plan.cut else [c.count for c in ordered]  # rows of each chunk
        if not prefills:
            last = hidden
        else:
            ends = torch.tensor(counts).cumsum(0) - 1
            last = hidden[ends.to(hidden.device)]  # [chunks, hidden]
        # values that are not numbers spread to every later token of their sequence, so the last token tells
        sound = torch.isfinite(last).all(1).tolist()
        sampling = [i for i, c in enumerate(ordered) if sound[i] and c.samples]
        logits = self._logits(last if len(sampling) == len(ordered) else last[sampling])
        scored = {}
        if scores:
            start = 0
            for chunk, count in zip(ordered, counts, strict=True):
                if chunk.sequence.id in scores:
                    scored[chunk.sequence.id] = self._logits(hidden[start : start + count])
                start += count
        return StepOutput(
            [ordered[i] for i in sampling], logits, [c for c, ok in zip(ordered, sound, strict=True) if not ok], scored
        )

    def _decode(self, arguments: dict[str, Any], plan: StepPlan) -> torch.Tensor:
        """The decoder's last hidden states ``[tokens, hidden]``."""
        token = hook.current.set(plan)
        try:
            return self.decoder(attention_mask=None, use_cache=False, **arguments).last_hidden_state[0]  # type: ignore[no-any-return]
        finally:
            hook.current.reset(token)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()  # type: ignore[no-any-return]

    def _inputs(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk]) -> dict[str, Any]:
        """The decoder's arguments for a step."""
        prompts = self._prompts
        answers = [c.sequence.output[-1] for c in decodes]
        numbers = [prompts[c.sequence.id].position(c.start) for c in decodes]
        for c in prefills:  # a preempted sequence computes its own answer again
            if c.start + c.count > len(c.sequence.prompt):
                first = max(c.start, len(c.sequence.prompt))
                answers += c.sequence.tokens(first, c.start + c.count)
                numbers += [prompts[c.sequence.id].position(i) for i in range(first, c.start + c.count)]
        ids = torch.tensor(answers, dtype=torch.long, device=self.device)
        embedded = self.merger.embed(ids)  # [answers, hidden]
        positions = torch.tensor(numbers, dtype=torch.long, device=self.device).expand(self.merger.axes, -1)
        per_layer = self.merger.per_layer_inputs(ids)
        if prefills:
            cuts = _Cuts(decodes, prefills, prompts)
            embedded = cuts.mix(embedded, [p.embeds for p in cuts.prompts])
            positions = cuts.mix(positions.T, [p.positions.expand(self.merger.axes, -1).T for p in cuts.prompts]).T
            if per_layer is not None:
                per_layer = cuts.mix(per_layer, [p.per_layer for p in cuts.prompts])
        arguments: dict[str, Any] = {"inputs_embeds": embedded[None], "position_ids": positions[:, None]}
        if self.merger.axes == 1:
            arguments["position_ids"] = positions
        if per_layer is not None:
            arguments["per_layer_inputs"] = per_layer[None]
        if self.merger.deepstack_levels and prefills:
            arguments |= self._deepstack(decodes, prefills)
        if self.merger.family.cross:
            arguments |= self._cross([*decodes, *prefills])
        return arguments

    def _deepstack(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk]) -> dict[str, Any]:
        """Features that are added to media tokens inside the decoder."""
        where = [torch.zeros(len(decodes), dtype=torch.bool, device=self.device)]
        features = []
        for c in prefills:
            prompt, stop = self._prompts[c.sequence.id], c.start + c.count
            inside = torch.zeros(c.count, dtype=torch.bool, device=self.device)
            if prompt.media is not None and prompt.media_before is not None and prompt.deepstack is not None:
                end = min(stop, len(prompt.embeds))
                if end > c.start:
                    inside[: end - c.start] = prompt.media[c.start : end]
                    features.append(prompt.deepstack[:, int(prompt.media_before[c.start]) : int(prompt.media_before[end])])
            where.append(inside)
        if not features:
            return {}
        return {"visual_pos_masks": torch.cat(where)[None], "deepstack_visual_embeds": list(torch.cat(features, dim=1))}

    def _cross(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Media rows whose keys this step stores, and which tokens follow a picture; nothing if no sequence has media."""
        counts, states = [], []
        for c in chunks:
            cross = self._prompts[c.sequence.id].cross
            if cross is None:
                counts.append(torch.zeros(c.count, dtype=self.dtype, device=self.device))
                continue
            at = torch.arange(c.start, c.start + c.count, device=self.device).clamp(max=len(cross.counts) - 1)
            counts.append(cross.counts[at].to(self.dtype))
            if c.start == c.sequence.started:
                states.append(cross.states)
        if all(self._prompts[c.sequence.id].cross is None for c in chunks):
            return {"cross_attention_states": None}
        none = torch.zeros(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return {
            "cross_attention_states": torch.cat([none, *states])[None],
            "full_text_row_masked_out_mask": torch.cat(counts)[None, None, :, None],
        }

    def _probe_arguments(self) -> dict[str, Any]:
        """A call with one token and, for cross-attention, two rows."""
        ids = torch.zeros(1, dtype=torch.long, device=self.device)
        positions = torch.zeros(self.merger.axes, 1, dtype=torch.long, device=self.device)
        arguments: dict[str, Any] = {
            "inputs_embeds": self.merger.embed(ids)[None],
            "position_ids": positions[:, None] if self.merger.axes > 1 else positions,
            "attention_mask": None,
            "use_cache": False,
        }
        if (per_layer := self.merger.per_layer_inputs(ids)) is not None:
            arguments["per_layer_inputs"] = per_layer[None]
        if self.merger.family.cross:
            arguments["cross_attention_states"] = arguments["inputs_embeds"].repeat(1, 2, 1)
        return arguments

    def _budget(self, config: LlmConfig) -> int:
        """Bytes that the KV pool may take."""
        budget = config.kv_cache_memory_bytes
        if self.device != "cpu":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = min(budget, int(free - (1 - config.gpu_memory_utilization) * total))
        return budget


class _Cuts:
    """Assembles rows of a step: decoding tokens, then each chunk's share of its prompt and of its answer."""

    def __init__(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk], prompts: dict[str, MergedPrompt]) -> None:
        self.prompts = [prompts[c.sequence.id] for c in prefills]
        self._decodes, self._prefills = len(decodes), prefills

    def mix(self, answers: torch.Tensor, prompts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """``answers``: rows of answer tokens, first one per decode, then those of the chunks; ``prompts``: all rows of each."""
        parts, at = [answers[: self._decodes]], self._decodes
        for chunk, rows in zip(self._prefills, prompts, strict=True):
            assert rows is not None
            stop = chunk.start + chunk.count
            parts.append(rows[chunk.start : min(stop, len(rows))])
            more = stop - max(chunk.start, len(rows))
            if more > 0:
                parts.append(answers[at : at + more])
                at += more
        return torch.cat(parts)
