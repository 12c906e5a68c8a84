"""Visual token pruning (FastV): which models can drop tokens, how many a prompt loses, and where rows leave the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.llm.attention import hook
from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import StepPlan
from services.llm.config import Pruning
from services.llm.layer_groups import Kind
from services.llm.merge import MediaRun, Merger
from services.models.media import Modality
from services.models.registry import Attention, UnsupportedModel

VISUAL = frozenset({Modality.IMAGE, Modality.VIDEO})


def visual_runs(media: Sequence[MediaRun]) -> list[tuple[int, int]]:
    """Prompt tokens ``[start, stop)`` that are visual, run by run; audio is not."""
    return [(run.offset, run.stop) for run in media if run.modality in VISUAL]


def dropping(media: Sequence[MediaRun], keep: float) -> tuple[int, int]:
    """How many visual tokens a prompt loses when the share ``keep`` stays, and the first that may be among them."""
    runs = visual_runs(media)
    visual = sum(stop - start for start, stop in runs)
    dropped = visual - max(1, round(keep * visual)) if visual else 0
    return dropped, runs[0][0] if dropped else 0


def obstacle(merger: Merger, layers: Sequence[KvLayer]) -> str:
    """Why a model cannot drop visual tokens, in a sentence; "" if it can."""
    family = merger.family
    name = f"a {family.model_type} model cannot drop visual tokens"
    if not VISUAL & set(family.modalities):
        return f"{name}: it has none"
    if family.cross or any(layer.kind is Kind.CROSS for layer in layers):
        return f"{name}: its pictures are read by cross-attention and stand in no prompt"
    if family.attention is not Attention.CAUSAL:
        return f"{name}: tokens of its prompts see later ones, by masks made for whole prompts"
    if any(not layer.stores for layer in layers):
        return f"{name}: late layers read the keys of early ones, which are of all tokens"
    if any(layer.kind is Kind.SLIDING for layer in layers):
        return f"{name}: its sliding windows count tokens that would be gone"
    if merger.per_layer:
        return f"{name}: each of its layers has inputs of its own for every token"
    return ""


def check(pruning: Pruning, obstacle: str, merger: Merger, layers: Sequence[KvLayer]) -> None:
    """See that the model can be pruned as asked.

    Raises:
        UnsupportedModel: it cannot; the text says why and what to do.
    """
    if obstacle:
        raise UnsupportedModel(f"{obstacle}; leave out --visual-token-pruning")
    if pruning.layer >= len(layers):
        raise UnsupportedModel(f"--visual-token-pruning: K must be below the model's {len(layers)} layers, got {pruning.layer}")
    if pruning.layer < merger.deepstack_levels:
        raise UnsupportedModel(
            f"--visual-token-pruning: K must be at least {merger.deepstack_levels}, got {pruning.layer}: a "
            f"{merger.family.model_type} model adds features to every visual token after each of its first "
            f"{merger.deepstack_levels} layers"
        )


def install(layers: Sequence[Any], first: int) -> None:
    """Let the rows that a step's cut names leave a decoder before layer ``first``; later layers get no others."""
    for index in range(first, len(layers)):
        layers[index].register_forward_pre_hook(_cut_at_first if index == first else _cut_later, with_kwargs=True)


def _cut_at_first(_module: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    rows = _rows_left()
    return None if rows is None else ((args[0][:, rows], *args[1:]), _shortened(arguments, rows))


def _cut_later(_module: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    rows = _rows_left()
    return None if rows is None else (args, _shortened(arguments, rows))


def _rows_left() -> torch.Tensor | None:
    """Rows that go on; None where all do, or outside a step."""
    step = hook.current.get()
    if not isinstance(step, StepPlan) or step.cut is None:
        return None
    assert step.cut.rows is not None, "the layer before the cut did not choose"
    return step.cut.rows


def _shortened(arguments: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """A layer's arguments for some rows: rotary factors ``[..., tokens, dim]`` and positions ``[..., tokens]``."""
    arguments = dict(arguments)
    cos, sin = arguments["position_embeddings"]
    arguments["position_embeddings"] = (cos[..., rows, :], sin[..., rows, :])
    if arguments.get("position_ids") is not None:
        arguments["position_ids"] = arguments["position_ids"][..., rows]
    assert not any(isinstance(v, torch.Tensor) for k, v in arguments.items() if k != "position_ids"), "an unknown argument by row"
    return arguments
