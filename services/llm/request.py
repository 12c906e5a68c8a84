"""Checks a ``GenerateRequest`` and turns it into plain values. Knows no engine: what it admits by is given as figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import invalid
from services.common.salts import check_salt
from services.common.sampling_ranges import MAX_ANSWERS, check_ranges, constraint_of
from services.llm.config import Pruning
from services.llm.merge import MediaRun
from services.llm.pruning import VISUAL, dropping
from services.llm.sampler import Sampling
from services.llm.structured import Constraint, ConstraintError, Grammar, Grammars
from services.models.checkpoint import Checkpoint
from services.models.media import Grid, Modality
from triptych.common.v1 import media_pb2, sampling_pb2
from triptych.llm.v1 import llm_pb2

MAX_WHOLE_ROWS = 1 << 20  # of all pruned items of a request


@dataclass(frozen=True)
class Limits:
    """What one request may take.

    Attributes:
        vocab_size: columns of the logits.
        max_model_len: most tokens of prompt and answer together that the model takes.
        pool_tokens: tokens that the whole KV pool holds.
        pruning: how visual tokens are dropped; None if they are not.
        pruning_obstacle: why this model could not, whatever the options; "" if it could.
        max_num_seqs: most sequences in a step; each answer is one.
    """

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    pruning: Pruning | None = None
    pruning_obstacle: str = ""
    max_num_seqs: int = MAX_ANSWERS


@dataclass(frozen=True)
class GenerateArguments:
    """A request whose every value is in range.

    Attributes:
        id: unique among running requests only.
        max_tokens: most tokens of each answer.
        end_token_ids: end an answer.
        media: the items, in order; ``digests`` are those of their content, "" where the caller knows none.
        salt: keeps cached prefixes apart.
        grammar: what each answer must match.
        prompt_logprobs: as ``Sampling.logprobs``, for the prompt.
        visual_token_keep: share of visual tokens to keep; 1 is all, None what the service was started with.
        answer: tokens that the answer begins with, made elsewhere.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    end_token_ids: frozenset[int]
    min_tokens: int
    priority: int
    n: int
    media: list[MediaRun]
    digests: list[bytes]
    salt: bytes
    sampling: Sampling
    grammar: Grammar | None
    include_first_logits: bool
    prompt_logprobs: int | None
    visual_token_keep: float | None
    answer: tuple[int, ...] = ()


async def read_generate(
    request: llm_pb2.GenerateRequest, limits: Limits, checkpoint: Checkpoint, grammars: Grammars, seed: int
) -> GenerateArguments:
    """The request's values; ``seed`` is for one that names none. Suspends only while a new constraint compiles.

    Raises:
        ServiceError: INVALID_ARGUMENT naming the field and the limit.
    """
    prompt = list(request.token_ids)
    if not request.request_id or len(request.request_id) > 128:
        raise invalid("request_id", f"must have 1 to 128 characters, got {len(request.request_id)}")
    if not prompt:
        raise invalid("token_ids", "must not be empty")
    placeholders = {checkpoint.placeholder_id(modality) for modality in checkpoint.family.modalities}  # may lie past the logits
    if (last := max(set(prompt) - placeholders, default=0)) >= limits.vocab_size:
        raise invalid("token_ids", f"must be below the vocabulary size {limits.vocab_size}, got {last}")
    media = _media(request.spans, prompt, checkpoint)
    salt = check_salt(request.cache_salt)
    given = request.sampling
    max_tokens = _max_tokens(given, len(prompt), limits)
    if (last := max(given.stop_token_ids, default=0)) >= limits.vocab_size:
        raise invalid("sampling.stop_token_ids", f"must be below the vocabulary size {limits.vocab_size}, got {last}")
    check_ranges(given, limits.vocab_size)
    if given.n > limits.max_num_seqs:
        raise invalid("sampling.n", f"must be at most {limits.max_num_seqs}, the service's --max-num-seqs, got {given.n}")
    _check_keep(given, media, len(prompt), limits)
    _check_answer(request, max_tokens, limits)
    return GenerateArguments(
        id=request.request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        end_token_ids=frozenset(given.stop_token_ids).union(() if given.ignore_eos else checkpoint.end_token_ids),
        min_tokens=given.min_tokens,
        priority=given.priority,
        n=given.n or 1,
        media=media,
        digests=[span.digest for span in request.spans],
        salt=salt,
        sampling=_sampling(given, seed),
        grammar=await _grammar(given, grammars),
        include_first_logits=given.include_first_logits,
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
        visual_token_keep=given.visual_token_keep if given.HasField("visual_token_keep") else None,
        answer=tuple(request.answer_token_ids),
    )


def _max_tokens(given: sampling_pb2.SamplingParams, prompt: int, limits: Limits) -> int:
    """Most tokens of an answer to a prompt of ``prompt`` tokens."""
    max_tokens = given.max_tokens if given.HasField("max_tokens") else max(1, limits.max_model_len - prompt)
    if max_tokens < 1:
        raise invalid("sampling.max_tokens", "must be at least 1")
    limit = min(limits.max_model_len, limits.pool_tokens)
    if prompt + max_tokens > limit:
        raise invalid(
            "token_ids",
            f"prompt and answer may have {limit} tokens together; the prompt has {prompt}, max_tokens is {max_tokens}",
            reason="CONTEXT_LENGTH_EXCEEDED", limit=limit, requested=prompt + max_tokens,
        )  # fmt: skip
    return max_tokens


def _check_keep(given: sampling_pb2.SamplingParams, media: Sequence[MediaRun], prompt: int, limits: Limits) -> None:
    """Visual tokens can be dropped only where the service was started so, and where no answer hangs on a dropped one."""
    asked = given.visual_token_keep if given.HasField("visual_token_keep") else None
    if limits.pruning is None:
        if asked is not None and asked < 1:
            hint = limits.pruning_obstacle or "start the llm service with --visual-token-pruning fastv:K=2 to drop visual tokens"
            raise invalid("sampling.visual_token_keep", f"must be 1 here, got {asked:g}: {hint}")
        return
    keep = limits.pruning.share(asked)
    if not dropping(media, keep)[0]:
        return
    if given.HasField("prompt_logprobs"):
        raise invalid("sampling.visual_token_keep", f"must be 1 beside prompt_logprobs, which score every token; got {keep:g}")
    if media[-1].stop == prompt and media[-1].modality in VISUAL:
        raise invalid("sampling.visual_token_keep", f"must be 1 for a prompt whose last token is visual, got {keep:g}")


def _check_answer(request: llm_pb2.GenerateRequest, max_tokens: int, limits: Limits) -> None:
    """The beginning of an answer that another server made."""
    answer = request.answer_token_ids
    if answer and request.sampling.n > 1:
        raise invalid("answer_token_ids", f"must be empty where several answers are asked for, here {request.sampling.n}")
    if len(answer) >= max_tokens:
        raise invalid("answer_token_ids", f"must be fewer than the {max_tokens} that the answer may have, got {len(answer)}")
    if (last := max(answer, default=0)) >= limits.vocab_size:
        raise invalid("answer_token_ids", f"must be below the vocabulary size {limits.vocab_size}, got {last}")


def _sampling(given: sampling_pb2.SamplingParams, seed: int) -> Sampling:
    return Sampling(
        temperature=given.temperature,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=dict(given.logit_bias),
        seed=given.seed if given.HasField("seed") else seed,
        logprobs=given.logprobs if given.HasField("logprobs") else None,
    )


async def _grammar(given: sampling_pb2.SamplingParams, grammars: Grammars) -> Grammar | None:
    match constraint_of(given):
        case None:
            return None
        case "json_schema":
            constraint = Constraint("json_schema", given.json_schema)
        case "regex":
            constraint = Constraint("regex", given.regex)
        case "grammar":
            constraint = Constraint("grammar", given.grammar)
        case "choice":
            constraint = Constraint("choice", json.dumps(list(given.choice.texts)))
        case _:
            constraint = Constraint("json_object", "")
    if not grammars.end_token_ids:
        raise invalid(f"sampling.{constraint.kind}", "this model has no end token, which a constraint needs")
    try:
        return await grammars.compile(constraint)
    except ConstraintError as error:
        raise invalid(f"sampling.{constraint.kind}", str(error)) from error


def _media(spans: Sequence[media_pb2.Span], prompt: list[int], checkpoint: Checkpoint) -> list[MediaRun]:
    """The spans, checked against the prompt: known modality, sorted, disjoint, inside, over placeholders only and over all."""
    runs: list[MediaRun] = []
    end = covered = whole = 0
    family = checkpoint.family
    placeholders = {checkpoint.placeholder_id(m): m for m in family.modalities}
    for i, span in enumerate(spans):
        if int(span.modality) not in set(family.modalities):
            raise invalid(f"spans[{i}].modality", f"a {family.model_type} model does not take this modality")
        modality = Modality(span.modality)
        tokens = 1 if family.cross else span.rows
        if span.offset < end or span.rows < 1 or span.offset + tokens > len(prompt):
            raise invalid(
                f"spans[{i}]", f"must start at {end} or later, have a row and end inside the prompt of {len(prompt)} tokens"
            )
        end = span.offset + tokens
        token = checkpoint.placeholder_id(modality)
        if any(t != token for t in prompt[span.offset : end]):
            raise invalid(f"spans[{i}]", f"must stand over placeholder tokens {token} only")
        if family.positions_from_grid and modality is not Modality.AUDIO:
            _check_grid(f"spans[{i}].grid", span, int(checkpoint.config["vision_config"].get("spatial_merge_size", 2)))
        if family.cross:
            _check_tiles(f"spans[{i}]", span, checkpoint)
        if not span.ref.id or not span.ref.encoder_address:
            raise invalid(f"spans[{i}].ref", "must name a ref and its encoder")
        if not (math.isfinite(span.seconds_per_grid) and span.seconds_per_grid >= 0):
            raise invalid(f"spans[{i}].seconds_per_grid", f"must be a time, got {span.seconds_per_grid:g}")
        covered += tokens
        if span.whole_rows:
            whole += span.whole_rows
            _check_pruned(f"spans[{i}].whole_rows", span, whole, checkpoint)
        grid = Grid(span.grid.t, span.grid.h, span.grid.w)
        seconds = span.seconds_per_grid or 1.0
        runs.append(MediaRun(modality, span.offset, span.rows, grid, seconds, tokens, span.whole_rows, span.first_row))
    stray = sum(t in placeholders for t in prompt) - covered
    if stray:
        raise invalid("spans", f"{stray} placeholder tokens of the prompt belong to no span")
    return runs


def _check_tiles(field: str, span: media_pb2.Span, checkpoint: Checkpoint) -> None:
    """A picture that is read by cross-attention has the rows of all tiles, used or not."""
    vision = checkpoint.config["vision_config"]
    tiles = int(vision["max_num_tiles"])
    rows = tiles * ((int(vision["image_size"]) // int(vision["patch_size"])) ** 2 + 1)
    if span.rows != rows:
        raise invalid(f"{field}.rows", f"must be {rows}, those of {tiles} tiles, got {span.rows}")
    if not 1 <= span.grid.t <= tiles:
        raise invalid(f"{field}.grid", f"t, the tiles that hold picture, must be between 1 and {tiles}, got {span.grid.t}")


def _check_grid(field: str, span: media_pb2.Span, merge: int) -> None:
    """The grid says as many rows as the span has: positions are made from it, as many as it says."""
    t, h, w = span.grid.t, span.grid.h, span.grid.w
    rows = span.whole_rows or span.rows
    if h % merge or w % merge or t * h * w != rows * merge**2:
        raise invalid(field, f"{t} x {h} x {w} patches, merged {merge} x {merge}, must give the span's {rows} rows")


def _check_pruned(field: str, span: media_pb2.Span, whole: int, checkpoint: Checkpoint) -> None:
    """Rows can be dropped where a video stands in one run and its positions come from its grid."""
    if not checkpoint.family.prunes_video or int(span.modality) != Modality.VIDEO:
        model_type = checkpoint.family.model_type
        raise invalid(
            field, f"rows can be dropped of videos where positions come from a grid, not of this of a {model_type} model"
        )
    if whole > MAX_WHOLE_ROWS:
        raise invalid(field, f"all together may be {MAX_WHOLE_ROWS}, these and those before are {whole}")
    if span.whole_rows <= span.rows or span.first_row:
        raise invalid(field, f"must be more than the {span.rows} rows that are left, got {span.whole_rows}")
