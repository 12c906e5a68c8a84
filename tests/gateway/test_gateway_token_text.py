"""Single tokens' texts and bytes: joined, the bytes of a text's tokens are the text's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.token_text import TokenTexts

TEXTS = ["👩‍👩‍👧‍👦 hi 🏳️‍🌈", "你好世界。", "naïve café — “ok”", "  two  spaces \n\n end ", "\ufffd", "<0x41> x"]


@pytest.fixture(scope="module", params=["qwen2_vl", "llava", "llama"])  # byte-level and byte-fallback
def tokenizer(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_dir(request.param) / "tokenizer.json"))


def joined(tokenizer: Tokenizer, text: str) -> str:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    data = b"".join(texts[token][1] for token in ids)
    assert all(texts[token][0] == texts[token][1].decode(errors="replace") for token in ids)
    return data.decode()


def test_bytes_add_up(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert joined(tokenizer, text) in (text, f" {text}")


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=12))
def test_bytes_add_up_for_any_text(tokenizer: Tokenizer, text: str) -> None:
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    assert joined(tokenizer, text) in (decoded, f" {decoded}")


def test_special_tokens_are_spelled_and_half_characters_are_marked(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    for token, added in tokenizer.get_added_tokens_decoder().items():
        assert texts[token] == (added.content, added.content.encode())
    crab = [texts[token] for token in tokenizer.encode("🦀", add_special_tokens=False).ids]
    halves = [(text, data) for text, data in crab if len(data) == 1 and data > b"\x7f"]
    assert len(halves) > 1 and all(text == "\ufffd" for text, _ in halves)
    assert texts[10**6] == ("", b"")
