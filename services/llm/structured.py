"""Answers of a given form: which tokens may come next so that the whole text matches a schema, regex, choice or grammar.

llguidance does the parsing. This module gives it the checkpoint's vocabulary, compiles on threads of its own, and computes each
mask on another thread as soon as the token before it is known, while the model computes the logits that the mask is for.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llguidance
import numpy as np
import tokenizers
import torch

from services.models.registry import UnsupportedModel

_MAX_DEPTH = 64  # of a JSON schema
_COMPILE_THREADS, _MASK_THREADS = 2, 2
_WHITESPACE = r"[ \n\r\t]{0,64}"  # between the parts of JSON: bounded, or an answer might be nothing else
# Of the parser, for one mask and at one place of the text: with the library's own 50,000 and 2,000 an ambiguous grammar can hold
# up a batch for seconds a step.
_STEP_ITEMS, _ROW_ITEMS = 10_000, 1_000

Kind = Literal["json_schema", "regex", "choice", "grammar", "json_object"]


class ConstraintError(ValueError):
    """A constraint that no answer can be held to; the text says why."""


class GrammarFailure(Exception):
    """No token can follow, or finding one takes more than the limits allow. The text is for the client."""


@dataclass(frozen=True)
class Constraint:
    """What the text of an answer must match.

    Attributes:
        kind: field of ``SamplingParams.constraint``.
        text: its value; for ``choice`` the texts as a JSON array, for ``json_object`` nothing.
    """

    kind: Kind
    text: str


class Grammars:
    """Compiled constraints for one checkpoint; the latest ones are kept.

    Args:
        path: the checkpoint's folder, with its tokenizer.json.
        vocab_size: columns of the logits; those that are no token of the tokenizer are never allowed.
        end_token_ids: allowed when the text matches, and only then.
        banned: never allowed: placeholders. Special tokens are not either.
        capacity: constraints kept.
        compile_seconds: longest compilation. It goes on behind a refusal, but not for long: the parser counts its own work.

    Raises:
        UnsupportedModel: there is no tokenizer.json.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        end_token_ids: Collection[int],
        banned: Collection[int] = (),
        *,
        capacity: int = 64,
        compile_seconds: float = 5.0,
    ) -> None:
        if not (path / "tokenizer.json").is_file():
            raise UnsupportedModel(f"{path} holds no tokenizer.json; save the tokenizer with transformers' save_pretrained first")
        source = (path / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(source)
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special} | set(banned)
        self.end_token_ids = frozenset(end_token_ids)
        self._capacity, self._compile_seconds = capacity, compile_seconds
        self._texts = _packed(set(tokenizer.get_vocab().values()) - special - self.end_token_ids, vocab_size)
        self._ends = _packed(self.end_token_ids, vocab_size)
        self._leading_space = _strips_leading_space(tokenizer)
        columns = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        source = _with_unspellable(json.loads(source), special | self.end_token_ids)
        self._tokenizer = llguidance.LLTokenizer(source, n_vocab=columns, eos_token=sorted(self.end_token_ids) or None)
        self._limits = llguidance.LLParserLimits(step_max_items=_STEP_ITEMS, max_items_in_row=_ROW_ITEMS)
        self._compilers = ThreadPoolExecutor(_COMPILE_THREADS, "grammar-compile")
        self.mask_threads = ThreadPoolExecutor(_MASK_THREADS, "grammar-mask")
        self._compiled: OrderedDict[Constraint, Grammar] = OrderedDict()

    def __len__(self) -> int:
        """Constraints kept."""
        return len(self._compiled)

    async def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint, compiled on a thread unless it is at hand.

        Raises:
            ConstraintError: it is malformed, nothing matches it, or compiling it takes too long.
        """
        if (grammar := self._compiled.get(constraint)) is None:
            work = asyncio.get_running_loop().run_in_executor(self._compilers, self._compile, constraint)
            try:
                async with asyncio.timeout(self._compile_seconds):
                    grammar = await work
            except TimeoutError:
                text = f"takes more than {self._compile_seconds:g} seconds to compile; simplify it"
                raise ConstraintError(text) from None
            self._compiled[constraint] = grammar
            if len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return grammar

    def close(self) -> None:
        """End the threads once they are done with what they have."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self.mask_threads.shutdown(wait=False, cancel_futures=True)

    def allowed(self, matcher: llguidance.LLMatcher) -> torch.Tensor:
        """The tokens that may come next, a bit each, ``[ceil(vocab / 8)]`` in uint8, lowest bit first.

        Raises:
            GrammarFailure: there is none.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: len(self._texts)]
        if matcher.is_error():
            raise _too_complex(matcher)
        allowed = self._texts & bits
        if matcher.is_accepting():
            allowed |= self._ends
        if not allowed.any():
            raise GrammarFailure("no token of the model can go on in the form that was asked for")
        return torch.from_numpy(allowed)

    def _compile(self, constraint: Constraint) -> Grammar:
        source = _source(constraint)
        grammar = self._start(constraint.kind, source)
        return self._start(constraint.kind, _after_a_space(source)) if self._leading_space else grammar

    def _start(self, kind: Kind, source: str) -> Grammar:
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ConstraintError(_reason(matcher))
        try:
            return Grammar(self, kind, matcher, self.allowed(matcher))
        except GrammarFailure:
            raise ConstraintError("no token of the model begins a text that matches it") from None


class Grammar:
    """A compiled constraint. Shared by the answers that it constrains and never moved on itself."""

    def __init__(self, grammars: Grammars, kind: Kind, matcher: llguidance.LLMatcher, first: torch.Tensor) -> None:
        self._grammars, self._kind, self._matcher, self._first = grammars, kind, matcher, first

    def start(self) -> GrammarState:
        """For a new answer."""
        known: Future[torch.Tensor] = Future()
        known.set_result(self._first)
        return GrammarState(self._grammars, self._kind, self._matcher.deep_copy(), known)


class GrammarState:
    """How far one answer has come. Its matcher belongs to the mask threads from :meth:`accept` until the mask is there.

    Attributes:
        kind: of the constraint.
    """

    def __init__(self, grammars: Grammars, kind: Kind, matcher: llguidance.LLMatcher, pending: Future[torch.Tensor]) -> None:
        self._grammars, self.kind, self._matcher, self._pending = grammars, kind, matcher, pending

    def accept(self, token: int) -> None:
        """The answer goes on with ``token``; starts on the next mask. After an end token there is none."""
        if token not in self._grammars.end_token_ids:
            self._pending = self._grammars.mask_threads.submit(self._advance, self._pending, token)

    def mask(self) -> torch.Tensor:
        """The tokens that may come next, as :meth:`Grammars.allowed`; waits until they are known.

        Raises:
            GrammarFailure: there is none.
        """
        return self._pending.result()

    def fork(self) -> GrammarState:
        """One that goes its own way from here."""
        self._pending.exception()  # wait: the matcher is not ours before
        return GrammarState(self._grammars, self.kind, self._matcher.deep_copy(), self._pending)

    def _advance(self, before: Future[torch.Tensor], token: int) -> torch.Tensor:
        before.result()  # submitted earlier to the same first-in-first-out threads, so it never waits for this
        if not self._matcher.consume_token(token):
            raise _too_complex(self._matcher)
        return self._grammars.allowed(self._matcher)


def _source(constraint: Constraint) -> str:
    """A constraint in llguidance's own terms.

    Raises:
        ConstraintError: it is too deep or no JSON.
    """
    match constraint.kind:
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(constraint.text))
        case "grammar":
            return json.dumps({"grammars": [{"lark_grammar": constraint.text}]})
        case "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text))
            return json.dumps({"grammars": [{"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}]})
        case "json_object" | "json_schema":
            schema: object = {"type": "object"} if constraint.kind == "json_object" else _schema(constraint.text)
            options: Any = {"whitespace_pattern": _WHITESPACE}
            return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _schema(text: str) -> object:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"must be a JSON object or a boolean, got {type(schema).__name__}")
    if (depth := _depth(schema)) > _MAX_DEPTH:
        raise ConstraintError(f"may be nested at most {_MAX_DEPTH} deep, got {depth}")
    return schema


def _depth(value: object) -> int:
    """How deep lists and objects are nested."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth


def _after_a_space(source: str) -> str:
    """The same grammar behind one space."""
    grammars = json.loads(source)["grammars"]
    grammars[0]["name"] = "body"
    return json.dumps({"grammars": [{"name": "top", "lark_grammar": 'start: " " @body'}, *grammars]})


def _too_complex(matcher: llguidance.LLMatcher) -> GrammarFailure:
    return GrammarFailure(f"became too complex to follow: {_reason(matcher)}; simplify it")


def _reason(matcher: llguidance.LLMatcher) -> str:
    """What went wrong, in one line; the others show the parser's insides."""
    lines = str(matcher.get_error()).splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _packed(tokens: Collection[int], vocab_size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A bit for each of the tokens that the model has, lowest bit first."""
    flags = np.zeros(vocab_size, dtype=np.uint8)
    flags[[token for token in tokens if token < vocab_size]] = 1
    return np.packbits(flags, bitorder="little")


def _strips_leading_space(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the decoder drops a space before the first word, as those of sentencepiece do: an answer's text then lacks it."""
    space = tokenizer.token_to_id("\u2581")
    return space is not None and tokenizer.decode([space, space]) == " "


def _with_unspellable(tokenizer: dict[str, Any], hidden: Collection[int]) -> str:
    """A tokenizer.json in which no text becomes one of the tokens ``hidden``: they are renamed to noncharacters."""
    model, names = tokenizer["model"], {}
    for added in tokenizer["added_tokens"]:
        if added["id"] in hidden:
            names[added["content"]] = added["content"] = f"\ufdd0{added['id']}\ufdd1"
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:  # unigram: [token, score] each
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps({**tokenizer, "post_processor": None, "truncation": None, "padding": None})
