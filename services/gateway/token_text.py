"""The text and the bytes of single tokens, as log probabilities show them."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece spells it


def _bytes_of_letters() -> dict[str, int]:
    """Byte by the letter that stands for it (GPT-2's ``bytes_to_unicode``): printable ones for themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_LETTER = _bytes_of_letters()


def spelled(word: str) -> bytes:
    """The bytes that a word of a byte-level vocabulary is; one with other letters, an added token, stands for its own."""
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in word)
    except KeyError:
        return word.encode()


class TokenTexts(dict[int, tuple[str, bytes]]):
    """Each token's text, in which bytes that are no character alone are U+FFFD, and its bytes; looked up when first asked for.

    Joined, the bytes of a text's tokens are the text's, but for a space that some tokenizers put before the first word. Special
    tokens are spelled as in the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer, self._is_byte_level = tokenizer, _is_byte_level(tokenizer)
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}

    def __missing__(self, token: int) -> tuple[str, bytes]:
        data = self._bytes(token)
        self[token] = data.decode(errors="replace"), data
        return self[token]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        word = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level:
            return spelled(word)
        byte = BYTE_TOKEN.fullmatch(word)
        return bytes([int(byte[1], 16)]) if byte else word.replace(_SPACE, " ").encode()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether words of the vocabulary are bytes, spelled by letters."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return any(decoder["type"] == "ByteLevel" for decoder in (state, *state.get("decoders", ())) if "type" in decoder)
