"""Token ids to text, a token at a time. Whatever the tokens' cuts, the pieces add up to the text decoded at once.

Held back are: bytes that do not make a character yet, tokens that later ones can still change, and the longest end that
can still become a stop string. A stop string is met where the first of them is complete; neither it nor what follows is text.
What a token costs does not grow with the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from services.gateway.token_text import BYTE_TOKEN, spelled


class Detokenizer:
    """The text of one answer.

    Args:
        tokenizer: whose tokens they are; its special tokens have no text.
        stop: strings that end the answer.
        end_token_ids: tokens that end the answer; as its last token they have no text either.
        min_tokens: text of earlier tokens is not searched for stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), end_token_ids: Collection[int] = (), min_tokens: int = 0
    ) -> None:
        self.stopped = False
        self.tokens = 0  # pushed so far
        self._stop, self._end, self._min_tokens = stop, frozenset(end_token_ids), min_tokens
        self._decoder = _decoder(tokenizer)
        self._ends: list[int] = []  # end tokens pushed last, which have text only if others follow
        self._tail = ""  # the end of the text, which may become a stop string

    def push(self, token: int) -> str:
        """The text that is certain after one more token; sets :attr:`stopped` when a stop string is complete."""
        assert not self.stopped, "no token follows a stop string"
        self.tokens += 1
        self._ends.append(token)
        if token in self._end:
            return ""
        return self._search(self._decode_ends())

    def finish(self, *, ended_by_token: bool) -> str:
        """The text still held back; ``ended_by_token`` says that the last token may be an end token."""
        if self.stopped:
            return ""
        if ended_by_token and self._ends:
            self._ends.pop()
        text = self._search(self._decode_ends() + self._decoder.flush())
        text, self._tail = text + self._tail, ""
        return text

    def _decode_ends(self) -> str:
        text = "".join(map(self._decoder.push, self._ends))
        self._ends.clear()
        return text

    def _search(self, text: str) -> str:
        if not text:
            return ""
        self._tail += text
        if self.tokens < self._min_tokens:
            shown, self._tail = self._tail, ""
            return shown
        met = min(((at + len(s), at) for s in self._stop if (at := self._tail.find(s)) >= 0), default=None)
        if met is not None:
            self.stopped = True
            shown, self._tail = self._tail[: met[1]], ""
            return shown
        cut = len(self._tail) - self._undecided()
        shown, self._tail = self._tail[:cut], self._tail[cut:]
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the tail that begins a stop string."""
        longest = min(len(self._tail), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._tail[-n:]) for s in self._stop)), 0)


class _ByteDecoder:
    """For byte-level tokenizers: a token is bytes, wherever it stands; malformed ones are U+FFFD, as Unicode recommends."""

    def __init__(self, tokens: _TokenBytes) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Characters that are complete."""
        return self._utf8.decode(self._tokens[token])

    def flush(self) -> str:
        """U+FFFD where a character was not completed."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For every other tokenizer: tokens are decoded behind those before them, since a space at the very start is none."""

    def __init__(self, tokenizer: Tokenizer, is_open: _OpenTokens) -> None:
        self._tokenizer, self._is_open = tokenizer, is_open
        self._before: list[int] = []  # the last tokens whose text is out; the last of them is not open
        self._before_length = 0  # characters of those alone
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text of what was held and of this token, unless it is open."""
        self._held.append(token)
        if self._is_open[token]:
            return ""
        text = self.flush()
        self._before, self._held = self._held, []
        self._before_length = len(self._decode(self._before))
        return text

    def flush(self) -> str:
        """The text of what is held."""
        return self._decode([*self._before, *self._held])[self._before_length :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes, found when they are first asked for; special tokens and unknown ids have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__((i, b"") for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        self[token] = spelled(self._tokenizer.id_to_token(token) or "")
        return self[token]


class _OpenTokens(dict[int, bool]):
    """Whether later tokens decide a token's text: a byte of a run that may prove malformed, the beginning of a character, or a
    token without text of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bool:
        is_byte = BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "")
        alone = self._tokenizer.decode([token], skip_special_tokens=True)
        self[token] = bool(is_byte) or not alone or alone.endswith("\ufffd")
        return self[token]


_token_bytes, _open_tokens = lru_cache(4)(_TokenBytes), lru_cache(4)(_OpenTokens)  # a process serves one model


def _decoder(tokenizer: Tokenizer) -> _ByteDecoder | _WindowDecoder:
    if isinstance(tokenizer.decoder, ByteLevel):
        return _ByteDecoder(_token_bytes(tokenizer))
    return _WindowDecoder(tokenizer, _open_tokens(tokenizer))
