"""How tokens are chosen: ranges checked, and what a request leaves open filled in from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import invalid
from services.common.sampling_ranges import check_ranges, constraint_of
from triptych.common.v1 import sampling_pb2

MAX_STOP, MAX_STOP_BYTES, MAX_STOP_TOKENS = 16, 256, 64


@dataclass(frozen=True)
class Sampling:
    """``triptych.common.v1.SamplingParams`` with nothing left open but the length of the answer and the seed.

    Attributes:
        constraint: the field of ``SamplingParams.constraint`` that is set, with its value as protobuf has it.
        logprobs: None reports none; 0 those of the chosen tokens alone.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_first_logits: bool
    priority: int
    visual_token_keep: float | None
    constraint: Mapping[str, Any]
    n: int = 1
    logprobs: int | None = None


def read_sampling(params: sampling_pb2.SamplingParams, generation: Mapping[str, Any], vocab_size: int) -> Sampling:
    """Check ``params``; defaults come from ``generation``, the checkpoint's generation_config.json.

    A checkpoint that does not say ``do_sample`` is greedy; its repetition penalty holds either way, as in transformers.

    Raises:
        ServiceError: INVALID_ARGUMENT about a field of ``sampling``.
    """
    _check_ranges(params, vocab_size)
    default = generation if generation.get("do_sample") else {"temperature": 0.0}
    default = {**default, "repetition_penalty": generation.get("repetition_penalty")}

    def choose(name: str, neutral: float) -> Any:
        if params.HasField(name):  # type: ignore[arg-type]
            return getattr(params, name)
        value = default.get(name)
        return neutral if value is None else value

    constraint = constraint_of(params)
    return Sampling(
        temperature=float(choose("temperature", 1.0)),
        top_p=float(choose("top_p", 1.0)),
        top_k=min(max(0, int(choose("top_k", 0))), vocab_size),
        min_p=float(choose("min_p", 0.0)),
        repetition_penalty=float(choose("repetition_penalty", 1.0)),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        include_first_logits=params.include_first_logits,
        priority=params.priority,
        visual_token_keep=params.visual_token_keep if params.HasField("visual_token_keep") else None,
        constraint={constraint: getattr(params, constraint)} if constraint else {},
        n=params.n if params.HasField("n") else 1,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def _check_ranges(params: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    check_ranges(params, vocab_size)
    if params.HasField("prompt_logprobs"):
        text = "is served by the language model service only, not by the gateway; leave it out"
        raise invalid("sampling.prompt_logprobs", text)
    if params.HasField("max_tokens") and params.max_tokens < 1:
        raise invalid("sampling.max_tokens", f"must be at least 1, got {params.max_tokens}")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise invalid("sampling.min_tokens", f"must be at most max_tokens = {params.max_tokens}, got {params.min_tokens}")
    if len(params.stop) > MAX_STOP:
        raise invalid("sampling.stop", f"at most {MAX_STOP} stop strings, got {len(params.stop)}")
    for index, stop in enumerate(params.stop):
        if not 1 <= (size := len(stop.encode())) <= MAX_STOP_BYTES:
            raise invalid(f"sampling.stop[{index}]", f"must have between 1 and {MAX_STOP_BYTES} bytes, got {size}")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid("sampling.stop_token_ids", f"at most {MAX_STOP_TOKENS} stop tokens, got {len(params.stop_token_ids)}")
    for index, token in enumerate(params.stop_token_ids):
        if token >= vocab_size:
            raise invalid(f"sampling.stop_token_ids[{index}]", f"must be below the vocabulary's size {vocab_size}, got {token}")
