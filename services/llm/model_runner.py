"""Runs packed steps of the language-model half. Knows sequences only through chunks; never chooses what to run."""

from __future__ import annotations

from typing import Any

import torch

from services.llm import attention
from services.llm.attention import KvPool, PrefillRows, StepPlan
from services.llm.config import LlmConfig
from services.llm.merge import MediaRun, MergedPrompt, Merger
from services.llm.scheduler import Chunk
from services.models.checkpoint import Checkpoint
from services.models.half import choose_device, choose_dtype, load_half, parameter_bytes
from services.models.registry import UnsupportedModel


class ModelRunner:
    """The loaded half, its KV pool, and the merged prompts of unfinished sequences.

    Attributes:
        num_blocks: KV blocks in the pool, from the memory that was granted.
        max_model_len: most tokens of prompt and answer together.
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
        self.decoder.config._attn_implementation = attention.NAME
        self.parameter_bytes = parameter_bytes(self.model)
        self.max_model_len = config.max_model_len or checkpoint.max_position_embeddings
        self.block_size = config.block_size
        self.num_blocks = self._affordable_blocks(config)
        text = self.decoder.config
        self.pool = KvPool(
            text.num_hidden_layers,
            self.num_blocks,
            config.block_size,
            text.num_key_value_heads,
            self._head_dim(),
            self.dtype,
            self.device,
        )
        self._prompts: dict[str, MergedPrompt] = {}

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row."""
        return self.merger.hidden_size

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def add(self, sequence_id: str, prompt: list[int], media: list[MediaRun]) -> None:
        """Merge a new sequence's prompt; its media rows are zero until :meth:`write_rows`."""
        self._prompts[sequence_id] = self.merger.merge(prompt, media)

    @torch.inference_mode()
    def write_rows(self, sequence_id: str, offset: int, rows: torch.Tensor) -> None:
        """Put embedding rows ``[count, hidden]`` at ``offset`` in the prompt."""
        embeds = self._prompts[sequence_id].embeds
        embeds[offset : offset + len(rows)] = rows.to(embeds.dtype).to(embeds.device)

    def remove(self, sequence_id: str) -> None:
        """Forget a sequence's prompt."""
        self._prompts.pop(sequence_id, None)

    @torch.inference_mode()
    def clear_blocks(self, blocks: list[int]) -> None:
        """Forget what blocks hold."""
        self.pool.clear(blocks)

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> tuple[list[Chunk], torch.Tensor]:
        """Compute one step.

        Returns:
            The chunks that yield a token, and their logits ``[len, vocab]`` in float32.
        """
        decodes = [c for c in chunks if c.sequence.decoding]
        prefills = [c for c in chunks if not c.sequence.decoding]
        ordered = decodes + prefills
        embeds, positions = self._inputs(decodes, prefills)
        token = attention.current_plan.set(self._plan(decodes, prefills))
        try:
            hidden = self.decoder(
                inputs_embeds=embeds[None],
                position_ids=positions[:, None] if len(positions) > 1 else positions,
                attention_mask=None,
                use_cache=False,
            ).last_hidden_state[0]  # [tokens, hidden]
        finally:
            attention.current_plan.reset(token)
        ends = torch.tensor([c.count for c in ordered]).cumsum(0) - 1
        sampling = [i for i, c in enumerate(ordered) if c.samples]
        logits = self.model.lm_head(hidden[ends[sampling].to(hidden.device)])
        return [ordered[i] for i in sampling], logits.float()

    def _inputs(self, decodes: list[Chunk], prefills: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings ``[tokens, hidden]`` and positions ``[axes, tokens]`` of a step."""
        embeds: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        answers = [t for c in decodes for t in self._answer_tokens(c)]
        answers += [t for c in prefills for t in self._answer_tokens(c)]
        embedded = self.merger.embed(torch.tensor(answers, dtype=torch.long, device=self.device))  # [answers, hidden]
        at = len(decodes)
        if decodes:
            embeds.append(embedded[:at])
            numbers = [self._prompts[c.sequence.id].position(c.start) for c in decodes]
            positions.append(torch.tensor([numbers], device=self.device).expand(self._axes(decodes), -1))
        for c in prefills:
            prompt, length = self._prompts[c.sequence.id], len(c.sequence.prompt)
            stop = c.start + c.count
            embeds.append(prompt.embeds[c.start : min(stop, length)])
            positions.append(prompt.positions[:, c.start : min(stop, length)])
            if stop > length:  # a preempted sequence computes its own answer again
                first = max(c.start, length)
                embeds.append(embedded[at : at + stop - first])
                numbers = [prompt.position(i) for i in range(first, stop)]
                positions.append(torch.tensor([numbers], device=self.device).expand(len(prompt.positions), -1))
                at += stop - first
        axes = max(len(p) for p in positions)
        return torch.cat(embeds), torch.cat([p.expand(axes, -1) for p in positions], dim=1)

    def _axes(self, chunks: list[Chunk]) -> int:
        return max(len(self._prompts[c.sequence.id].positions) for c in chunks)

    @staticmethod
    def _answer_tokens(chunk: Chunk) -> list[int]:
        length = len(chunk.sequence.prompt)
        return chunk.sequence.output[max(0, chunk.start - length) : max(0, chunk.start + chunk.count - length)]

    def _plan(self, decodes: list[Chunk], prefills: list[Chunk]) -> StepPlan:
        size = self.block_size
        slots = [
            c.sequence.block_table[i // size] * size + i % size
            for c in decodes + prefills
            for i in range(c.start, c.start + c.count)
        ]
        most = max((len(c.sequence.block_table) for c in decodes), default=0)
        padding = self.pool.padding_block
        tables = [c.sequence.block_table + [padding] * (most - len(c.sequence.block_table)) for c in decodes]
        rows, start = [], len(decodes)
        for c in prefills:
            blocks = c.sequence.block_table[: -(-(c.start + c.count) // size)]
            rows.append(PrefillRows(start, c.count, c.start, torch.tensor([blocks], device=self.device)))
            start += c.count
        return StepPlan(
            self.pool,
            torch.tensor(slots, device=self.device),
            len(decodes),
            torch.tensor(tables, dtype=torch.long, device=self.device).reshape(len(decodes), most),
            torch.tensor([c.start + 1 for c in decodes], dtype=torch.long, device=self.device),
            rows,
        )

    def _head_dim(self) -> int:
        text: Any = self.decoder.config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    def _affordable_blocks(self, config: LlmConfig) -> int:
        """Blocks that fit into the granted memory, at most what ``max_num_seqs`` full contexts need."""
        text: Any = self.decoder.config
        row = 2 * text.num_hidden_layers * text.num_key_value_heads * self._head_dim() * self.dtype.itemsize
        budget = config.kv_cache_memory_bytes
        if self.device != "cpu":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = min(budget, int(free - (1 - config.gpu_memory_utilization) * total))
        affordable = budget // (row * config.block_size)
        useful = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        if affordable < 1:
            raise UnsupportedModel(
                f"the KV pool may take {budget} bytes but one block needs {row * config.block_size}; grant it more memory"
            )
        return int(min(affordable, useful))
