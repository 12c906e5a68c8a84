"""One layer's attention of a random step, on any device: what a backend gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import Backend, GroupPlan
from services.llm.attention.pool import KvPool
from services.llm.kv_cache import KvCache
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.merge import MergedPrompt
from services.llm.scheduler import Chunk
from services.llm.sequence import Sequence, Status
from services.llm.step_builder import StepBuilder


@dataclass(frozen=True)
class Step:
    """A layer, its pool with the step's keys written, and the step's tensors ``[heads, tokens, head_dim]``."""

    pool: KvPool
    layer: KvLayer
    group: GroupPlan
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def attend(self, backend: Backend) -> torch.Tensor:
        """``[tokens, heads, head_dim]``."""
        scale = self.layer.head_dim**-0.5
        return backend.attend(self.pool, self.layer, self.group, self.query, self.key, self.value, scale, None)


def random_step(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spoil: bool = False,
) -> Step:
    """A step of ``decodes``, by tokens computed before, and prefill ``chunks``, by (tokens computed before, tokens).

    ``spoil``: whatever the step must not read is NaN, but the padding block.
    """
    torch.manual_seed(len(decodes) + 10 * len(chunks))
    lengths = [(n, 1) for n in decodes] + chunks
    blocks = sum(-(-(context + count) // block_size) + 1 for context, count in lengths)
    group = LayerGroup(Kind.SLIDING if window else Kind.FULL, blocks, window)
    kv = KvCache([group], block_size, enable_prefix_caching=False)
    layer = KvLayer(0, group.kind, window, heads[1], head_dim, head_dim, 0, "full_attention")
    pool = KvPool([(layer, 0)], [blocks], block_size, dtype, device)
    packed: tuple[list[Chunk], list[Chunk]] = ([], [])
    for i, (context, count) in enumerate(lengths):
        decoding = i < len(decodes)
        sequence = Sequence(str(i), [0] * (context if decoding else context + count), 9, frozenset(), slot=i)
        sequence.output, sequence.status = ([7] if decoding else []), Status.RUNNING
        kv.admit(sequence, 0)
        assert kv.allocate(sequence, context)
        sequence.computed = context
        kv.settle(sequence)
        assert kv.allocate(sequence, context + count) and sequence.decoding == decoding
        packed[not decoding].append(Chunk(sequence, context, count))
    for tensor in (pool.keys[0], pool.values[0]):
        tensor[:-1].normal_()
        if spoil:
            kept = torch.zeros(blocks * block_size, dtype=torch.bool)
            for chunk in (*packed[0], *packed[1]):
                table = chunk.sequence.tables[0]
                for at in range(table.first * block_size, chunk.start + chunk.count):
                    kept[table.blocks[at // block_size] * block_size + at % block_size] = True
            tensor[:-1].flatten(0, 1)[~kept.to(device)] = torch.nan
    builder = StepBuilder(pool, NO_BACKEND, [layer], {0: 0}, [group], len(lengths), 4096)
    none = torch.zeros(0, 1)
    prompts = {c.sequence.id: MergedPrompt(none, none, 0, []) for c in (*packed[0], *packed[1])}
    plan = builder.build(*packed, prompts).groups[0]
    tokens = sum(count for _, count in lengths)
    query, key, value = (torch.randn(n, tokens, head_dim, dtype=dtype, device=device) for n in (heads[0], heads[1], heads[1]))
    pool.write(0, plan.slots, key, value)
    return Step(pool, layer, plan, query, key, value)


class _NoBackend:
    def attend(self, *_: object) -> torch.Tensor:
        raise AssertionError("the step is only planned")


NO_BACKEND = _NoBackend()
