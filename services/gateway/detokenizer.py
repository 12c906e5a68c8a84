"""Token ids to text, a token at a time. Whatever the tokens' cuts, the pieces add up to the text decoded at once.

Held back are: bytes that do not make a character yet, tokens that later ones can still change, and the longest end that
can still become a stop string. A stop string is met where the first of them is complete; neither it nor what follows is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


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
        self._tokenizer, self._stop, self._end, self._min_tokens = tokenizer, stop, frozenset(end_token_ids), min_tokens
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._held: list[int] = []  # tokens not given to the stream yet
        self._decoded = 0  # characters that the stream has yielded
        self._tail = ""  # the end of them, which may become a stop string

    @property
    def tokens(self) -> int:
        """Tokens pushed."""
        return len(self._ids)

    def push(self, token: int) -> str:
        """The text that is certain after one more token; sets :attr:`stopped` when a stop string is complete."""
        assert not self.stopped, "no token follows a stop string"
        self._ids.append(token)
        self._held.append(token)
        if self._is_open(token):
            return ""
        text = self._stream.step(self._tokenizer, self._held) or ""
        self._held = []
        self._decoded += len(text)
        return self._search(text)

    def finish(self, *, ended_by_token: bool) -> str:
        """The text still held back; ``ended_by_token`` says that the last token may be an end token."""
        if self.stopped:
            return ""
        shown = self._ids[:-1] if ended_by_token and self._ids and self._ids[-1] in self._end else self._ids
        text = self._search(self._tokenizer.decode(shown, skip_special_tokens=True)[self._decoded :])
        text, self._tail = text + self._tail, ""
        return text

    def _is_open(self, token: int) -> bool:
        """Whether later tokens decide its text: a byte of a run that may prove malformed, an end token, one without text."""
        if token in self._end or _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or ""):
            return True
        return not self._tokenizer.decode([token], skip_special_tokens=True)

    def _search(self, text: str) -> str:
        self._tail += text
        if len(self._ids) < self._min_tokens:
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
