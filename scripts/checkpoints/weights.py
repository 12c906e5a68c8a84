"""Random weights under which a tiny model still answers differently to different prompts and pictures."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PretrainedConfig, PreTrainedModel

TIED_STD, UNTIED_STD, VECTOR_STD = 0.1, 0.5, 0.1
# Queries and keys: attention picks out positions, even among hundreds of picture tokens. MLP outputs: the last token
# counts for more than the shared context, so decoding does not settle on one token. Both were chosen by measurement.
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "qkv": 2.0, "down_proj": 2.0, "fc2": 2.0}
# Where queries and keys are normed, their projections' scale is lost and the norms' weights take its place.
NORM_GAINS = {"q_norm": 2.0, "k_norm": 2.0}


def build(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model whose every weight depends on ``seed`` alone; the process's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        fill(model, torch.Generator().manual_seed(seed))
    return model


def gain(name: str, gains: dict[str, float] = GAINS) -> float:
    """How much larger than usual the named matrix or norm is drawn."""
    return next((value for part, value in gains.items() if part in name), 1.0)


@torch.no_grad()
def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Matrices get std gain/sqrt(fan-in); vectors (norms, biases) are moved a little from where the model starts them.

    The usual std of 0.02 would give near-zero activations at these widths, hence one repeated token.
    """
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is embedding:
            parameter.copy_(noise * (TIED_STD if tied else UNTIED_STD))
        elif parameter.ndim >= 2:
            parameter.copy_(noise * gain(name) * parameter[0].numel() ** -0.5)
        else:
            parameter.add_(noise * VECTOR_STD).mul_(gain(name, NORM_GAINS))


@torch.no_grad()
def silence(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """Zero these rows of embedding and head, so that greedy decoding never emits them.

    Their logit is 0, which is never the largest. For placeholders, which features replace, and for the padding rows
    past the last token.
    """
    rows = torch.tensor(sorted(tokens))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.get_parameter("weight")[rows] = 0
