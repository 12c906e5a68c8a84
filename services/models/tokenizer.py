"""Text to tokens and chat to text, without torch or transformers: ``tokenizers`` and the checkpoint's own jinja template.

What a user writes never becomes a special token: see :meth:`PromptTokenizer.encode_chat`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.models.checkpoint import named_tokens
from services.models.registry import UnsupportedModel


class ChatTemplateError(ValueError):
    """The checkpoint's chat template refused the conversation; the text is the template's own."""


class PromptTokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        path: the checkpoint's folder.
        placeholders: tokens that user text may never become, whether or not the tokenizer calls them special.
    """

    def __init__(self, path: Path, placeholders: Sequence[int] = ()) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise UnsupportedModel(f"{path} holds no tokenizer.json; save the tokenizer with transformers' save_pretrained first")
        self.fast = tokenizers.Tokenizer.from_file(str(file))
        self.fast.no_truncation()
        self.fast.no_padding()
        self._literal = tokenizers.Tokenizer.from_file(str(file))  # reads special tokens as plain text
        self._literal.encode_special_tokens = True
        added = self.fast.get_added_tokens_decoder()
        self._special = {t.content: i for i, t in added.items() if t.special or i in placeholders}
        self._literal.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in self._special])
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        config = json.loads((path / "tokenizer_config.json").read_text()) if (path / "tokenizer_config.json").is_file() else {}
        self._variables = named_tokens(config)
        source = _chat_template(path, config)
        if source is None:
            raise UnsupportedModel(f"{path} has no chat template; add chat_template.jinja beside its tokenizer.json")
        self._template = _environment().from_string(source)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return int(self.fast.get_vocab_size(with_added_tokens=True))

    @property
    def bos(self) -> str:
        """The token that begins a text, or nothing."""
        return self._variables.get("bos_token", "")

    def named(self, name: str) -> str | None:
        """The token that tokenizer_config.json calls ``name``."""
        return self._variables.get(name)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool,
        rewrite: Callable[[str], str] = lambda text: text,
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Args:
            messages: ``{"role", "content"}`` as the template expects; text parts are ``{"type": "text", "text"}``.
            add_special_tokens: let the tokenizer add its own (BOS), unless the template already wrote it.
            rewrite: changes what the template made before it is tokenised. No user's text spells a special token there.

        Where a user's text spells a special token, that place is marked before the template runs and the marked text is
        tokenised literally afterwards, so that it comes out as ordinary tokens.

        Raises:
            ChatTemplateError: the template raised.
        """
        mark = _unused_mark(_all_text(messages))
        marked = [self._mark_message(message, mark) for message in messages]
        rendered = self._render(marked)
        add_special_tokens = add_special_tokens and not (self.bos and rendered.startswith(self.bos))
        rendered = rewrite(rendered)
        if mark not in rendered:
            ids = _encode(self.fast, rendered, add_special_tokens)
            if self._count_special(ids) == self._special_written(rendered, add_special_tokens):
                return ids
        return self._encode_marked(rendered, mark, add_special_tokens)

    def _count_special(self, ids: list[int]) -> int:
        special = set(self._special.values())
        return sum(token in special for token in ids)

    def _special_written(self, rendered: str, add_special_tokens: bool) -> int:
        """Special tokens that the template and the tokenizer itself write; more of them means that normalising made some."""
        own = _encode(self.fast, "", add_special_tokens)
        return self._count_special(own) + sum(1 for _ in self._special_pattern.finditer(rendered))

    def _encode_marked(self, rendered: str, mark: str, add_special_tokens: bool) -> list[int]:
        ids = _encode(self.fast, "", add_special_tokens)
        at = 0
        for match in self._special_pattern.finditer(rendered):
            ids += self._encode_literal(rendered[at : match.start()].replace(mark, ""))
            ids.append(self._special[match.group()])
            at = match.end()
        return ids + self._encode_literal(rendered[at:].replace(mark, ""))

    def _encode_literal(self, text: str) -> list[int]:
        return _encode(self._literal, text, False) if text else []

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            variables = {"tools": None, "documents": None, **self._variables}
            return self._template.render(messages=messages, add_generation_prompt=True, **variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error

    def _mark_message(self, message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
        """Put ``mark`` inside every special token that the message's text spells.

        Spellings across parts count, with media between them too: some templates move the media to the front.
        """
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._mark_texts([content], mark)[0]}
        texts = iter(self._mark_texts([part["text"] for part in content if part["type"] == "text"], mark))
        return {**message, "content": [{**p, "text": next(texts)} if p["type"] == "text" else p for p in content]}

    def _mark_texts(self, texts: list[str], mark: str) -> list[str]:
        joined = "".join(texts)
        cuts = [m.start() + 1 for m in re.finditer(f"(?={self._special_pattern.pattern})", joined)]
        if not cuts:
            return texts
        marked, start = [], 0
        for text in texts:
            end = start + len(text)
            places = [start, *cuts[bisect_left(cuts, start) : bisect_left(cuts, end)], end]
            marked.append(mark.join(joined[a:b] for a, b in pairwise(places)))
            start = end
        return marked


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """As ``tokenizer.encode``, which would hold Python's lock all the while."""
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _unused_mark(text: str) -> str:
    """A string that ``text`` does not hold, framed by noncharacters so that no neighbour can complete or prolong it."""
    used = set(re.findall("\ufdd0([0-9]+)\ufdd1", text))
    return next(f"\ufdd0{n}\ufdd1" for n in count() if str(n) not in used)


def _all_text(messages: Sequence[Mapping[str, Any]]) -> str:
    contents = (m["content"] for m in messages)
    return "".join(c if isinstance(c, str) else "".join(p.get("text", "") for p in c) for c in contents)


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template where transformers looks for it: its own file, the older JSON file, the tokenizer's config."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    if (path / "chat_template.json").is_file():
        return str(json.loads((path / "chat_template.json").read_text(encoding="utf-8"))["chat_template"])
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """The names that chat templates may use, as transformers defines them."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
