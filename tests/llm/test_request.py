"""From a GenerateRequest to plain values: every field, and every refusal with the field it names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.errors import ServiceError
from services.llm.config import Pruning
from services.llm.engine import _identity
from services.llm.merge import MediaRun
from services.llm.request import GenerateArguments, Limits, read_generate
from services.llm.sampler import Sampling
from services.llm.structured import Constraint, Grammars
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Grid, Modality
from triptych.common.v1 import media_pb2, sampling_pb2
from triptych.llm.v1 import llm_pb2

Dirs = Callable[[str], Path]
LIMITS = Limits(vocab_size=1024, max_model_len=100, pool_tokens=80, pruning=Pruning(2))
REF = media_pb2.EmbeddingRef(id="x", encoder_address="127.0.0.1:1")
GRID = media_pb2.Grid(t=1, h=4, w=4)


class Reader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.image = checkpoint.placeholder_id(Modality.IMAGE) if checkpoint.family.modalities else -1
        self.grammars = Grammars(checkpoint.path, LIMITS.vocab_size, checkpoint.end_token_ids)

    def read(self, *spans: media_pb2.Span, seed: int = 7, **changes: Any) -> GenerateArguments:
        """Three tokens in front of those of ``spans`` and one behind; ``changes`` of the request or its sampling."""
        names = {field.name for field in llm_pb2.GenerateRequest.DESCRIPTOR.fields}
        tokens = [5, 6, 7, *[self.image] * sum(span.rows for span in spans), 8]
        fields = {"request_id": "r", "token_ids": tokens, **{k: v for k, v in changes.items() if k in names}}
        sampling = sampling_pb2.SamplingParams(**({"max_tokens": 4} | {k: v for k, v in changes.items() if k not in names}))
        request = llm_pb2.GenerateRequest(spans=spans, sampling=sampling, **fields)
        return asyncio.run(read_generate(request, LIMITS, self.checkpoint, self.grammars, seed))

    def refusal(self, *spans: media_pb2.Span, **changes: Any) -> ServiceError:
        with pytest.raises(ServiceError) as caught:
            self.read(*spans, **changes)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT and str(caught.value).startswith(f"{caught.value.field}: ")
        return caught.value


@pytest.fixture(scope="module")
def text(checkpoint_dir: Dirs) -> Iterator[Reader]:
    made = Reader(open_checkpoint(str(checkpoint_dir("llama"))))
    yield made
    made.grammars.close()


@pytest.fixture(scope="module")
def qwen(checkpoint_dir: Dirs) -> Iterator[Reader]:
    made = Reader(open_checkpoint(str(checkpoint_dir("qwen2_vl"))))
    yield made
    made.grammars.close()


def span(offset: int = 3, rows: int = 4, **changes: Any) -> media_pb2.Span:
    return media_pb2.Span(**({"modality": 1, "offset": offset, "rows": rows, "grid": GRID, "ref": REF} | changes))


def test_what_is_left_open(text: Reader) -> None:
    found = text.read()
    assert found == GenerateArguments(
        id="r", prompt=[5, 6, 7, 8], max_tokens=4, end_token_ids=frozenset(text.checkpoint.end_token_ids), min_tokens=0,
        priority=0, n=1, media=[], digests=[], salt=b"", sampling=Sampling(seed=7), grammar=None, include_first_logits=False,
        prompt_logprobs=None, visual_token_keep=None,
    )  # fmt: skip


def test_everything_said(text: Reader) -> None:
    found = text.read(
        cache_salt="ä", temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, seed=2**64 - 1, max_tokens=50, min_tokens=2,
        stop_token_ids=[3], ignore_eos=True, include_first_logits=True, repetition_penalty=1.5, presence_penalty=-2,
        frequency_penalty=2, logit_bias={1: 1.0, 1023: -100}, logprobs=0, prompt_logprobs=20, n=8, priority=-5,
        visual_token_keep=0.5,
    )  # fmt: skip
    assert found.sampling == Sampling(
        temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=2,
        logit_bias={1: 1.0, 1023: -100.0}, seed=2**64 - 1, logprobs=0,
    )  # fmt: skip
    assert (found.max_tokens, found.min_tokens, found.end_token_ids) == (50, 2, frozenset([3]))
    assert (found.salt, found.n, found.priority, found.prompt_logprobs) == ("ä".encode(), 8, -5, 20)
    assert (found.include_first_logits, found.visual_token_keep) == (True, 0.5)
    assert text.read(stop_token_ids=[3]).end_token_ids == {3, *text.checkpoint.end_token_ids}


def test_media(qwen: Reader) -> None:
    found = qwen.read(span(digest=b"d" * 32), span(7), token_ids=[5, 6, 7, *[qwen.image] * 8, 8])
    assert found.media == [MediaRun(Modality.IMAGE, offset, 4, Grid(1, 4, 4), 1.0, 4) for offset in (3, 7)]
    assert found.digests == [b"d" * 32, b""]


def test_what_a_run_shows_is_named_by_all_that_changes_it(qwen: Reader) -> None:
    """Runs of one item share its digest: rows 4 to 8 are not rows 0 to 4."""
    first, second = qwen.read(
        span(digest=b"d"), span(7, digest=b"d", first_row=4), token_ids=[5, 6, 7, *[qwen.image] * 8, 8]
    ).media
    again = replace(first, offset=second.offset)
    other = [second, *(replace(again, **change) for change in ({"whole_rows": 8}, {"rows": 5}, {"grid": Grid(1, 2, 8)}))]
    assert _identity(first, b"d") == _identity(again, b"d")
    assert len({_identity(run, b"d") for run in [first, *other]}) == 5


@pytest.mark.parametrize(
    ("spans", "field", "words"),
    [
        ([span(modality=2)], "spans[0].modality", "a qwen2_vl model does not take this modality"),
        ([span(2)], "spans[0]", "must stand over placeholder tokens"),
        ([span(5)], "spans[0]", "must start at 0 or later, have a row and end inside the prompt of 8 tokens"),
        ([span(rows=0)], "spans[0]", "have a row"),
        ([span(), span(6)], "spans[1]", "must start at 7 or later"),
        ([span(grid=media_pb2.Grid(t=1, h=8, w=8))], "spans[0].grid", "must give the span's 4 rows"),
        ([span(ref=media_pb2.EmbeddingRef(id="x"))], "spans[0].ref", "must name a ref and its encoder"),
        ([], "spans", "4 placeholder tokens of the prompt belong to no span"),
    ],
)
def test_refused_media(qwen: Reader, spans: list[media_pb2.Span], field: str, words: str) -> None:
    error = qwen.refusal(*spans, token_ids=[5, 6, 7, *[qwen.image] * 4, 8])
    assert error.field == field and words in error.message


def test_pruned_items_are_bounded_together(qwen: Reader) -> None:
    video, grid = qwen.checkpoint.placeholder_id(Modality.VIDEO), media_pb2.Grid(t=2**15, h=8, w=8)
    spans = [span(3 + 4 * i, modality=3, grid=grid, whole_rows=2**19) for i in range(3)]
    assert len(qwen.read(*spans[:2], token_ids=[5, 6, 7, *[video] * 8, 8]).media) == 2
    error = qwen.refusal(*spans, token_ids=[5, 6, 7, *[video] * 12, 8])
    assert error.field == "spans[2].whole_rows" and f"are {3 * 2**19}" in error.message


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"request_id": ""}, "request_id", "1 to 128 characters, got 0"),
        ({"request_id": "x" * 129}, "request_id", "got 129"),
        ({"token_ids": []}, "token_ids", "must not be empty"),
        ({"token_ids": [1024]}, "token_ids", "below the vocabulary size 1024, got 1024"),
        ({"cache_salt": "ä" * 65}, "cache_salt", "at most 128 bytes, got 130"),
        ({"max_tokens": 0}, "sampling.max_tokens", "at least 1"),
        ({"stop_token_ids": [2000]}, "sampling.stop_token_ids", "below the vocabulary size 1024, got 2000"),
        *(({"temperature": t}, "sampling.temperature", f"must be between 0 and 2, got {t:g}") for t in (-1, 2.5, NAN)),
        *(({"top_p": p}, "sampling.top_p", f"must be above 0 and at most 1, got {p:g}") for p in (0, 1.5, NAN)),
        *(({"min_p": p}, "sampling.min_p", f"must be between 0 and 1, got {p:g}") for p in (-0.5, 1.5, NAN)),
        *(({"repetition_penalty": p}, "sampling.repetition_penalty", "above 0 and at most 10") for p in (0, -1, 10.5, NAN)),
        *(({"presence_penalty": p}, "sampling.presence_penalty", "between -2 and 2") for p in (-2.5, 2.5, NAN)),
        *(({"frequency_penalty": p}, "sampling.frequency_penalty", "between -2 and 2") for p in (-2.5, 2.5, NAN)),
        *(({"logit_bias": {9: b}}, "sampling.logit_bias[9]", "between -100 and 100") for b in (-101, 101, NAN)),
        ({"logit_bias": {1024: 1.0}}, "sampling.logit_bias[1024]", "below the vocabulary's size 1024"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "sampling.logit_bias", "at most 300 tokens, got 301"),
        ({"logprobs": 21}, "sampling.logprobs", "at most 20, got 21"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs", "at most 20, got 21"),
        ({"n": 0}, "sampling.n", "between 1 and 8, got 0"),
        ({"n": 9}, "sampling.n", "between 1 and 8, got 9"),
        *(({"visual_token_keep": k}, "sampling.visual_token_keep", "above 0 and at most 1") for k in (0, 1.5, NAN)),
        ({"json_schema": "{"}, "sampling.json_schema", "not valid JSON"),
        ({"json_schema": " " * 65537}, "sampling.json_schema", "at most 65536 bytes, got 65537"),
        ({"json_schema": '{"type": "frob"}'}, "sampling.json_schema", "frob"),
        ({"regex": "(a"}, "sampling.regex", "unclosed group"),
        ({"regex": "ä" * 32769}, "sampling.regex", "at most 65536 bytes, got 65538"),
        ({"grammar": "start: nothing"}, "sampling.grammar", "unknown name"),
        ({"choice": {"texts": []}}, "sampling.choice", "between 1 and 256 texts, got 0"),
        ({"choice": {"texts": [str(i) for i in range(257)]}}, "sampling.choice", "got 257"),
        ({"choice": {"texts": ["a", ""]}}, "sampling.choice", "must differ and have a character each"),
        ({"choice": {"texts": ["a", "a"]}}, "sampling.choice", "must differ"),
        ({"choice": {"texts": ["a" * 40_000, "b" * 40_000]}}, "sampling.choice", "at most 65536 bytes, got 80000"),
        ({"json_object": True, "min_tokens": 2}, "sampling.min_tokens", "must be 0 with json_object"),
        ({"regex": "a", "ignore_eos": True}, "sampling.ignore_eos", "cannot go with regex"),
        ({"answer_token_ids": [1], "n": 2}, "answer_token_ids", "must be empty where several answers are asked for, here 2"),
        ({"answer_token_ids": [1, 2, 3, 4]}, "answer_token_ids", "fewer than the 4 that the answer may have, got 4"),
        ({"answer_token_ids": [1024]}, "answer_token_ids", "below the vocabulary size 1024, got 1024"),
    ],
)
def test_refused_values(text: Reader, changes: dict[str, Any], field: str, words: str) -> None:
    error = text.refusal(**changes)
    assert error.field == field and words in error.message


def test_prompt_and_answer_that_are_too_long(text: Reader) -> None:
    error = text.refusal(max_tokens=77)
    assert (error.reason, error.metadata) == ("CONTEXT_LENGTH_EXCEEDED", {"limit": "80", "requested": "81"})
    assert error.message.endswith("prompt and answer may have 80 tokens together; the prompt has 4, max_tokens is 77")
    assert text.read(max_tokens=76).max_tokens == 76


def test_an_answer_of_any_length_takes_the_room_there_is(text: Reader) -> None:
    request = llm_pb2.GenerateRequest(request_id="r", token_ids=[1, 2])
    limits = Limits(vocab_size=1024, max_model_len=60, pool_tokens=80)
    assert asyncio.run(read_generate(request, limits, text.checkpoint, text.grammars, 0)).max_tokens == 58


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("json_schema", '{"type": "integer"}', '{"type": "integer"}'),
        ("regex", "a+", "a+"),
        ("choice", {"texts": ["ä", '"']}, json.dumps(["ä", '"'])),
        ("grammar", 'start: "a"', 'start: "a"'),
        ("json_object", True, ""),
    ],
)
def test_constraints_are_compiled_once(text: Reader, kind: Any, value: Any, kept: str) -> None:
    grammar = text.read(**{kind: value}).grammar
    assert grammar is not None and text.read(**{kind: value}).grammar is grammar
    assert asyncio.run(text.grammars.compile(Constraint(kind, kept))) is grammar
    assert text.read(json_object=False, min_tokens=1).grammar is None


def test_a_model_without_an_end_cannot_be_constrained(text: Reader, checkpoint_dir: Dirs) -> None:
    endless = Reader(open_checkpoint(str(checkpoint_dir("llama"))))
    endless.grammars = Grammars(endless.checkpoint.path, LIMITS.vocab_size, ())
    error = endless.refusal(regex="a")
    assert error.field == "sampling.regex" and "no end token" in error.message
