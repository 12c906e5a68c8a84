"""Random weights under which a tiny model still answers differently to different prompts and pictures."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PretrainedConfig, PreTrainedModel

TIED_STD, UNTIED_STD, VECTOR_STD = 0.1, 0.5, 0.1
# Queries and keys: attention picks out positions, even among hundreds of picture tokens. MLP outputs: the last token
# counts for more than the shared context, so decoding does not settle on one token. Both were chosen by measurement.
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "qkv": 2.0, "gate_up_proj": 2.0, "down_proj": 2.0, "fc2": 2.0}
# Added to norms that undo those gains: the one after an MLP, and the one of the keys. Chosen by measurement as well.
LIFTS = {"post_feedforward_layernorm": 4.0, "k_norm": 2.0}
GATE = 0.5  # a lone number gates a branch that is shut where training starts


def build(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model whose every weight depends on ``seed`` alone; the process's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        fill(model, torch.Generator().manual_seed(seed))
    return model


def gain(name: str) -> float:
    """How much larger than 1/sqrt(fan-in) the named matrix is drawn."""
    return next((value for part, value in GAINS.items() if part in name), 1.0)


def shift(name: str, parameter: torch.nn.Parameter) -> float:
    """How far the named vector is moved, on average, from where the model starts it."""
    return GATE if parameter.numel() == 1 else next((value for part, value in LIFTS.items() if part in name), 0.0)


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
            parameter.add_(noise * VECTOR_STD + shift(name, parameter))


@torch.no_grad()
def silence(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """Zero these rows of embedding and head, so that greedy decoding never emits them.

    Their logit is 0, which is never the largest. For placeholders, which features replace, and for the padding rows
    past the last token.
    """
    rows = torch.tensor(sorted(tokens))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.get_parameter("weight")[rows] = 0
