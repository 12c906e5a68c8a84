"""Structured output: whatever the logits, the answer has the form asked for; bad constraints are refused with their reason."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from services.llm.events import Refused
from services.llm.sampler import Sampling, TokenChooser, choose
from services.llm.structured import Constraint, ConstraintError, Grammar, GrammarFailure, Grammars
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.registry import text_config
from tests.patience import PATIENCE

Dirs = Callable[[str], Path]
SEEDS = 50

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None, 3]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "minItems": 1, "maxItems": 3},
        "at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False},
    },
    "required": ["name", "age", "kind", "tags", "at"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", " a space first", 'quotes " and \\', "ünïcode 🎉", "two\nlines", "yes indeed"]
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'


class Harness:
    """A checkpoint's tokenizer and grammars, without its weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.vocab_size = int(text_config(checkpoint.config)["vocab_size"])
        self.placeholders = [checkpoint.placeholder_id(m) for m in checkpoint.family.modalities]
        self.grammars = Grammars(checkpoint.path, self.vocab_size, checkpoint.end_token_ids, self.placeholders)
        self.tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))

    def compile(self, kind: Any, text: str = "") -> Grammar:
        return asyncio.run(self.grammars.compile(Constraint(kind, text)))

    def answer(self, grammar: Grammar, seed: int, most: int = 2000) -> tuple[str, list[int]]:
        """Text and tokens drawn from random logits, the same for all tokens of a step on average."""
        source = torch.Generator().manual_seed(seed)
        chooser = TokenChooser(Sampling(temperature=1.0, seed=seed), [1, 2], self.grammars.end_token_ids, 0, grammar.start())
        tokens: list[int] = []
        while len(tokens) < most:
            [choice] = choose([chooser], 4 * torch.randn(1, self.vocab_size, generator=source))
            assert choice is not None, chooser.failure
            tokens.append(choice.token)
            chooser.accept(choice.token)
            if choice.token in self.grammars.end_token_ids:
                return self.tokenizer.decode(tokens[:-1]), tokens[:-1]
        raise AssertionError(f"no end after {most} tokens: {self.tokenizer.decode(tokens)[-300:]!r}")


# llama: byte-level BPE. llava: byte fallback, and a decoder that drops a leading space. Both have fewer tokens than columns.
@pytest.fixture(scope="module", params=["llama", "llava", "qwen2_vl"])
def harness(request: pytest.FixtureRequest, checkpoint_dir: Dirs) -> Iterator[Harness]:
    made = Harness(open_checkpoint(str(checkpoint_dir(request.param))))
    assert made.vocab_size > made.tokenizer.get_vocab_size()
    yield made
    made.grammars.close()


def is_person(value: Any) -> bool:
    """By hand, what PERSON says."""
    return (
        list(value) == list(PERSON["properties"])  # type: ignore[call-overload]
        and isinstance(value["name"], str) and len(value["name"]) <= 12
        and isinstance(value["age"], int) and 0 <= value["age"] <= 150
        and value["kind"] in ("cat", "dog", None, 3)
        and 1 <= len(value["tags"]) <= 3 and all(re.fullmatch("[a-c]{1,3}", tag) for tag in value["tags"])
        and list(value["at"]) == ["x"] and isinstance(value["at"]["x"], bool)
    )  # fmt: skip


def test_json_follows_its_schema(harness: Harness) -> None:
    grammar = harness.compile("json_schema", json.dumps(PERSON))
    people = [json.loads(harness.answer(grammar, seed)[0]) for seed in range(SEEDS)]
    assert all(is_person(person) for person in people)
    assert len({str(person) for person in people}) > SEEDS // 2


@pytest.mark.parametrize(
    "pattern", [r"[a-f]{2,9}x?|no+!{3}", r" {1,2}lead", r"(ä|<image>|</s>|<\|im_end\|>){1,3}", r"[0-9]{1,4}:[^a]{2}", r"a{0,4}"]
)
def test_text_matches_its_regex(harness: Harness, pattern: str) -> None:
    grammar = harness.compile("regex", pattern)
    for seed in range(SEEDS):
        text, tokens = harness.answer(grammar, seed)
        assert re.fullmatch(pattern, text), text
        assert not set(tokens) & set(harness.placeholders)


def test_one_of_the_choices(harness: Harness) -> None:
    grammar = harness.compile("choice", json.dumps(CHOICES))
    seen = {harness.answer(grammar, seed)[0] for seed in range(SEEDS)}
    assert len(seen) > 2 and seen <= set(CHOICES)


def test_a_grammar(harness: Harness) -> None:
    grammar = harness.compile("grammar", LARK)
    for seed in range(SEEDS):
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", harness.answer(grammar, seed)[0])


def test_any_json_object_as_far_as_it_gets(harness: Harness) -> None:
    grammar = harness.compile("json_object")
    ended = 0
    for seed in range(SEEDS):
        try:
            text, _ = harness.answer(grammar, seed, most=150)
        except AssertionError:
            continue  # an object may go on for as long as it likes
        ended += 1
        assert isinstance(json.loads(text), dict)
    assert ended > 5


def test_forks_go_their_own_ways(harness: Harness) -> None:
    state = harness.compile("regex", "(ab|cd)e").start()
    a, c = (harness.tokenizer.token_to_id(letter) for letter in "ac")
    if harness.grammars._leading_space:
        state.accept(harness.tokenizer.token_to_id("\u2581"))
    fork = state.fork()
    state.accept(a)
    fork.accept(c)
    assert not torch.equal(state.mask(), fork.mask())
    chooser = TokenChooser(Sampling(), [1], (), 0, state)
    other = chooser.fork(1)
    assert other.grammar is not state and other.grammar is not None and torch.equal(other.grammar.mask(), state.mask())


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", r"[^\s\S]", "no token"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[" * 30_000, "not valid JSON|nested"),
        ("json_schema", "[]", "object or a boolean, got list"),
        ("json_schema", '{"type": "frob"}', "frob"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', r"minimum \(5\) is greater than maximum \(3\)"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', "not fetch"),
        ("json_schema", '{"items": ' * 70 + "true" + "}" * 70, "nested at most 64 deep, got 70"),
        ("json_schema", json.dumps({"allOf": [{"anyOf": [{"const": j} for j in range(40)]} for _ in range(40)]}), "too large"),
        ("grammar", "start: nothing", "unknown name"),
        ("grammar", "start: <image>", "unknown special token"),
        ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested"),
        ("grammar", "start: <[998]>", "no token"),
        ("grammar", "start: <[1010]>", "no token"),
    ],
)
def test_constraints_that_cannot_be(checkpoint_dir: Dirs, kind: Any, text: str, reason: str) -> None:
    harness = Harness(open_checkpoint(str(checkpoint_dir("llava"))))
    with pytest.raises(ConstraintError, match=reason) as error:
        harness.compile(kind, text)
    assert "\n" not in str(error.value) and len(harness.grammars) == 0
    harness.grammars.close()


def test_the_latest_constraints_are_kept(checkpoint_dir: Dirs) -> None:
    grammars = Grammars(checkpoint_dir("llama"), 1024, [991], capacity=2)

    async def compile() -> None:
        a, b = [await grammars.compile(Constraint("regex", pattern)) for pattern in "ab"]
        assert await grammars.compile(Constraint("regex", "a")) is a
        assert await grammars.compile(Constraint("regex", "c")) is not b and len(grammars) == 2
        assert await grammars.compile(Constraint("regex", "a")) is a
        assert await grammars.compile(Constraint("regex", "b")) is not b
        assert await grammars.compile(Constraint("choice", '["a"]')) is not a

    asyncio.run(compile())
    grammars.close()


def test_a_compilation_that_takes_too_long_is_refused(checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(checkpoint_dir("llama"), 1024, [991], compile_seconds=0.05)
    done, ticks = threading.Event(), 0
    monkeypatch.setattr(grammars, "_compile", lambda constraint: done.wait(PATIENCE))

    async def compile() -> None:
        nonlocal ticks
        refused = asyncio.create_task(grammars.compile(Constraint("regex", "a")))
        while not refused.done():
            ticks += 1
            await asyncio.sleep(0.001)
        done.set()
        with pytest.raises(ConstraintError, match=r"more than 0\.05 seconds"):
            await refused

    asyncio.run(compile())
    assert ticks > 5 and len(grammars) == 0  # the loop went on
    grammars.close()


def test_masks_are_made_while_nobody_waits(checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(checkpoint_dir("llama"), 1024, [991])
    state = asyncio.run(grammars.compile(Constraint("regex", "aaa"))).start()
    made, go = threading.Event(), threading.Event()
    allowed = grammars.allowed

    def slow(matcher: Any) -> torch.Tensor:
        assert go.wait(PATIENCE) and threading.current_thread() is not threading.main_thread()
        mask = allowed(matcher)
        made.set()
        return mask

    monkeypatch.setattr(grammars, "allowed", slow)
    state.accept(Tokenizer.from_file(str(checkpoint_dir("llama") / "tokenizer.json")).token_to_id("a"))  # waits for nothing
    assert not made.is_set()
    go.set()
    assert made.wait(PATIENCE)
    assert state.mask().any()
    grammars.close()


def test_a_failing_grammar_fails_its_own_answer_only(checkpoint_dir: Dirs) -> None:
    grammars = Grammars(checkpoint_dir("llama"), 1024, [991])
    grammar = asyncio.run(grammars.compile(Constraint("regex", "aaa")))
    states = [grammar.start(), grammar.start()]
    states[0].accept(5)  # not an "a": nobody but a bug would
    with pytest.raises(GrammarFailure):
        states[0].mask()
    choosers = [TokenChooser(Sampling(), [1], (), 0, state) for state in (states[0], None, states[1])]
    choices = choose(choosers, torch.randn(3, 1024))
    assert choices[0] is None and choices[1] and choices[2]
    failure = choosers[0].failure
    assert isinstance(failure, Refused) and failure.field == "sampling.regex" and choosers[2].failure is None
    grammars.close()


def test_an_ambiguous_grammar_gives_up_before_it_holds_up_others(checkpoint_dir: Dirs) -> None:
    harness = Harness(open_checkpoint(str(checkpoint_dir("llama"))))
    state = harness.compile("grammar", 'start: s\ns: s s s s s | s s s | s s | "a" | ').start()
    a = harness.tokenizer.token_to_id("a")
    with pytest.raises(GrammarFailure, match=r"too complex .* max is 1000"):
        for _ in range(1000):  # each step has more ways to read the text than the one before
            state.accept(a)
            state.mask()
    harness.grammars.close()
