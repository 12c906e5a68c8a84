"""The text and the bytes of single tokens, as log probabilities show them."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece spells it


def _bytes_of_letters() -> dict[str, int]:
    """Byte by the letter that stands for it (GPT-2's ``bytes_to_unicode``): printable ones for themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = _bytes_of_letters()


class TokenTexts:
    """Looks tokens up, each once.

    Joined, the bytes of a text's tokens are the text's, but for a space that some tokenizers put before the first word. Special
    tokens are spelled as in the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._byte_of = BYTE_OF_LETTER if _is_byte_level(tokenizer) else None
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token: int) -> tuple[str, bytes]:
        """A token's text, in which bytes that are no character alone are U+FFFD, and its bytes."""
        known = self._known.get(token)
        if known is None:
            data = self._bytes(token)
            known = self._known[token] = data.decode(errors="replace"), data
        return known

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        word = self._tokenizer.id_to_token(token) or ""
        if self._byte_of is not None and all(letter in self._byte_of for letter in word):
            return bytes(self._byte_of[letter] for letter in word)
        if byte := _BYTE_TOKEN.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return word.replace(_SPACE, " ").encode()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether words of the vocabulary are bytes, spelled by letters."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return any(decoder["type"] == "ByteLevel" for decoder in (state, *state.get("decoders", ())) if "type" in decoder)
