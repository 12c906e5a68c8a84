"""The ranges of ``SamplingParams`` that gateway and language model check alike."""

from __future__ import annotations

from services.common.errors import invalid
from triptych.common.v1 import sampling_pb2

MAX_PENALTY, MAX_REPETITION_PENALTY = 2, 10
MAX_BIAS, MAX_BIASED_TOKENS = 100, 300
MAX_LOGPROBS = 20
MAX_ANSWERS = 8
MAX_CONSTRAINT_BYTES, MAX_CHOICES = 64 * 1024, 256


def check_ranges(params: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    """Refuse what no model can do. Left to the caller are the stops and what depends on the prompt.

    Raises:
        ServiceError: INVALID_ARGUMENT about a field of ``sampling``.
    """
    # Written so that NaN fails.
    if not 0 <= params.temperature <= 2:
        raise invalid("sampling.temperature", f"must be between 0 and 2, got {params.temperature:g}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise invalid("sampling.top_p", f"must be above 0 and at most 1, got {params.top_p:g}")
    if not 0 <= params.min_p <= 1:
        raise invalid("sampling.min_p", f"must be between 0 and 1, got {params.min_p:g}")
    if params.HasField("repetition_penalty") and not 0 < params.repetition_penalty <= MAX_REPETITION_PENALTY:
        text = f"must be above 0 and at most {MAX_REPETITION_PENALTY}, got {params.repetition_penalty:g}"
        raise invalid("sampling.repetition_penalty", text)
    for name, penalty in (("presence", params.presence_penalty), ("frequency", params.frequency_penalty)):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise invalid(f"sampling.{name}_penalty", f"must be between -{MAX_PENALTY} and {MAX_PENALTY}, got {penalty:g}")
    _check_bias(params, vocab_size)
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count > MAX_LOGPROBS:
            raise invalid(f"sampling.{field}", f"must be at most {MAX_LOGPROBS}, got {count}")
    if params.HasField("n") and not 1 <= params.n <= MAX_ANSWERS:
        raise invalid("sampling.n", f"must be between 1 and {MAX_ANSWERS}, got {params.n}")
    if params.HasField("visual_token_keep") and not 0 < params.visual_token_keep <= 1:
        raise invalid("sampling.visual_token_keep", f"must be above 0 and at most 1, got {params.visual_token_keep:g}")
    _check_constraint(params)


def constraint_of(params: sampling_pb2.SamplingParams) -> str | None:
    """Name of the constraint that is set; ``json_object = false`` is none."""
    name = params.WhichOneof("constraint")
    return None if name == "json_object" and not params.json_object else name


def _check_bias(params: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_BIASED_TOKENS:
        raise invalid("sampling.logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, got {len(params.logit_bias)}")
    for token, bias in params.logit_bias.items():
        if token >= vocab_size:
            raise invalid(
                f"sampling.logit_bias[{token}]", f"tokens must be below the vocabulary's size {vocab_size}, got {token}"
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(f"sampling.logit_bias[{token}]", f"must be between -{MAX_BIAS} and {MAX_BIAS}, got {bias:g}")


def _check_constraint(params: sampling_pb2.SamplingParams) -> None:
    name = constraint_of(params)
    if name is None:
        return
    texts = list(params.choice.texts) if name == "choice" else [params.json_schema or params.regex or params.grammar]
    if (size := sum(len(text.encode()) for text in texts)) > MAX_CONSTRAINT_BYTES:
        raise invalid(f"sampling.{name}", f"must have at most {MAX_CONSTRAINT_BYTES} bytes, got {size}")
    if name == "choice":
        if not 1 <= len(texts) <= MAX_CHOICES:
            raise invalid("sampling.choice", f"must have between 1 and {MAX_CHOICES} texts, got {len(texts)}")
        if "" in texts or len(set(texts)) < len(texts):
            raise invalid("sampling.choice", "its texts must differ and have a character each")
    # Where the text matches is where it ends, by an end token; neither can be put off.
    if params.min_tokens:
        raise invalid("sampling.min_tokens", f"must be 0 with {name}, got {params.min_tokens}; let the constraint say how long")
    if params.ignore_eos:
        raise invalid("sampling.ignore_eos", f"cannot go with {name}, whose end is marked by an end token")
