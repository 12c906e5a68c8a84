"""Replays steps that only decode as CUDA graphs, recorded at load for some batch sizes.

A graph reads and writes fixed memory. All of a step's inputs therefore live in buffers: embeddings, positions and the
attention plan of every layer group. A batch is padded to the next recorded size with copies of its first row. A copy computes
the same key and value and stores them in the same slot, so that no block is written that the step does not own, the padding
block stays zero, and a sequence whose values are not numbers spoils nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from services.common import logs
from services.llm.attention.cuda import CudaBackend, refusal
from services.llm.attention.plan import GroupPlan, StepPlan
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.step_builder import StepBuilder
from services.models.registry import UnsupportedModel

logger = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]
Forward = Callable[[dict[str, Any], StepPlan], torch.Tensor]  # the decoder: its arguments and a plan to [tokens, hidden]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: powers of two, and the largest batch there is."""
    sizes = [1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs]
    return [*sizes, max_num_seqs]


def not_recordable(builder: StepBuilder, arguments: Mapping[str, Any]) -> str | None:
    """Why a model's decoding steps cannot be graphs, as the end of a sentence; None if they can.

    ``arguments`` are those of a call of the decoder with one token.
    """
    if not isinstance(builder.backend, CudaBackend):
        return "the attention backend is not cuda"
    odd = {name for name, value in arguments.items() if isinstance(value, torch.Tensor)} - {"inputs_embeds", "position_ids"}
    if odd:
        return f"its decoder takes {', '.join(sorted(odd))}"
    if any(group.kind is Kind.PRUNED for group in builder.groups):
        return "it drops visual tokens"
    for layer in builder.layers.values():
        if reason := refusal(layer, builder.pool.keys[layer.source].dtype, builder.pool.block_size):
            return f"of layer {layer.index}: {reason}"
    return None


class Recorder:
    """Records computations as CUDA graphs that share one memory pool, so they must not run at the same time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        """A replay of ``compute``; its result is valid until the next replay of any graph."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):  # libraries set themselves up in a run that is not recorded
            compute()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """Decoding steps at fixed sizes, up to ``max_num_seqs`` sequences."""

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        builder: StepBuilder,
        arguments: Mapping[str, Any],
        max_num_seqs: int,
        max_model_len: int,
        record: Callable[[Compute], Compute],
    ) -> None:
        """Record every size, the largest first: the smaller ones find memory in its pool.

        Args:
            arguments: of a call with one token, ``inputs_embeds`` and ``position_ids`` among them.
            record: makes a computation replayable; a :class:`Recorder`.
        """
        self._forward, self._builder = forward, builder
        embeds, positions = arguments["inputs_embeds"], arguments["position_ids"]
        self._embeds = embeds.new_zeros(1, max_num_seqs, embeds.shape[-1])
        self._positions = positions.new_zeros(*positions.shape[:-1], max_num_seqs)  # [1, rows], for M-RoPE [3, 1, rows]
        pool = builder.pool
        self._plans = [
            _buffers(group, padding, pool.block_size, max_num_seqs, max_model_len, positions.device)
            for group, padding in zip(builder.groups, pool.num_blocks, strict=True)
        ]
        self._replays = {size: record(self._computation(size)) for size in reversed(graph_sizes(max_num_seqs))}
        pool.clear(list(enumerate(pool.num_blocks)))  # where the recorder's own runs stored keys

    def run(self, arguments: Mapping[str, Any], plan: StepPlan) -> torch.Tensor:
        """Hidden states ``[decodes, hidden]`` of a step without prefills, valid until the next call."""
        count = arguments["inputs_embeds"].shape[1]
        size = min(s for s in self._replays if s >= count)
        _fill(self._embeds[0, :size], arguments["inputs_embeds"][0])
        _fill(self._positions[..., :size].movedim(-1, 0), arguments["position_ids"].movedim(-1, 0))
        for buffers, group, padding in zip(self._plans, plan.groups, self._builder.pool.num_blocks, strict=True):
            width = group.decode_blocks.shape[1]
            assert group.decodes == len(group.slots) == count and width <= buffers.decode_blocks.shape[1]
            _fill(buffers.slots[:size], group.slots)
            _fill(buffers.decode_blocks[:size, :width], group.decode_blocks)
            buffers.decode_blocks[:size, width:] = padding
            _fill(buffers.decode_first[:size], group.decode_first)
            _fill(buffers.decode_end[:size], group.decode_end)
        return self._replays[size]()[:count]

    def _computation(self, size: int) -> Compute:
        """The decoder on the first ``size`` rows of the buffers."""
        arguments = {"inputs_embeds": self._embeds[:, :size], "position_ids": self._positions[..., :size]}
        b = self._builder

        def compute() -> torch.Tensor:
            # a plan keeps what it derives from its tensors: a new one, so that a recording holds the derivation
            groups = [_first_rows(group, size) for group in self._plans]
            return self._forward(arguments, StepPlan(b.pool, b.backend, b.layers, b.group_of, groups))

        return compute


def record_decodes(
    forward: Forward, builder: StepBuilder, arguments: Mapping[str, Any], max_num_seqs: int, max_model_len: int
) -> DecodeGraphs | None:
    """Graphs of a model on CUDA; None, and a line in the log, where its decoding steps cannot be graphs.

    Raises:
        UnsupportedModel: recording failed, for want of memory or because the decoder waits for the device.
    """
    reason = not_recordable(builder, arguments)
    if reason is not None:
        logs.event(logger, "no CUDA graphs", reason=reason)
        return None
    try:
        return DecodeGraphs(forward, builder, arguments, max_num_seqs, max_model_len, Recorder())
    except RuntimeError as error:
        raise UnsupportedModel(f"decoding could not be recorded as CUDA graphs: {error}; start with --enforce-eager") from error


def _buffers(group: LayerGroup, padding: int, block_size: int, rows: int, max_model_len: int, device: torch.device) -> GroupPlan:
    """The plan of a group as wide as it can get; every row stores into the padding block and sees its first token."""
    tokens = max_model_len if group.window is None else min(max_model_len, group.window + block_size - 1)
    ones = torch.ones(rows, dtype=torch.long, device=device)
    width = -(-tokens // block_size)
    return GroupPlan(
        group.window, ones * (padding * block_size), rows, ones[:, None].repeat(1, width) * padding, ones * 0, ones, []
    )


def _first_rows(group: GroupPlan, rows: int) -> GroupPlan:
    return GroupPlan(
        group.window, group.slots[:rows], rows, group.decode_blocks[:rows], group.decode_first[:rows], group.decode_end[:rows], []
    )


def _fill(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to the first rows of a buffer and copies of its first row to the rest."""
    buffer[: len(values)] = values
    buffer[len(values) :] = values[0]
