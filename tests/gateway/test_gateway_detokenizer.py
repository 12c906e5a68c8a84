"""Text in pieces: whatever the cuts, the pieces add up to the text decoded at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.detokenizer import Detokenizer

Directory = Callable[[str], Path]
# byte-level; byte-fallback that strips the first space (llava), and that does not (gemma3); Metaspace; no decoder at all
FAMILIES = ["qwen2_vl", "llava", "llama", "qwen2", "gemma3"]
BUILT = ["metaspace", "metaspace_never", "words", "byte_level_in_a_sequence"]
TEXTS = [
    "👩‍👩‍👧‍👦 hi 🏳️‍🌈",
    "你好世界。",
    "naïve café — “ok”",
    "日本語とEnglish",
    "  two  spaces \n\n end ",
    "🇩🇪🇫🇷",
    "\ufffd is a character",
]


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, checkpoint_dir: Directory) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_dir(request.param) / "tokenizer.json"))


@pytest.fixture(scope="module", params=[*FAMILIES, *BUILT])
def any_tokenizer(request: pytest.FixtureRequest, checkpoint_dir: Directory) -> Tokenizer:
    if request.param in FAMILIES:
        return Tokenizer.from_file(str(checkpoint_dir(request.param) / "tokenizer.json"))
    if request.param == "byte_level_in_a_sequence":
        nested = Tokenizer.from_file(str(checkpoint_dir("qwen2") / "tokenizer.json"))
        nested.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        return nested
    pieces = ["<unk>", "\u2581", "\u2581\u2581", "\u2581a", "a", "ab", "b\u2581", "\ufffd", "é", "<0xC3>", "<0xA9>", "a b"]
    built = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    built.add_special_tokens(["<s>"])
    built.add_tokens(["added one"])
    if request.param != "words":
        built.decoder = decoders.Metaspace(prepend_scheme="always" if request.param == "metaspace" else "never")
    return built


def stream(tokenizer: Tokenizer, ids: Sequence[int], **options: object) -> tuple[list[str], Detokenizer]:
    text = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            return pieces, text
    return [*pieces, text.finish(ended_by_token=True)], text


def whole(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def test_pieces_add_up_for_texts(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == whole(tokenizer, ids) and whole(tokenizer, ids).strip() == text.strip()
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
        for cut in range(len(ids)):  # an answer may begin or end anywhere
            for part in (ids[cut:], ids[:cut]):
                assert "".join(stream(tokenizer, part)[0]) == whole(tokenizer, part)


def test_pieces_add_up_for_random_tokens(tokenizer: Tokenizer) -> None:
    dice = random.Random(3)
    size = tokenizer.get_vocab_size() + 20  # ids beyond the tokenizer's, too
    letters = [
        i for i in range(size) if len(tokenizer.id_to_token(i) or "") == 1 or (tokenizer.id_to_token(i) or "").startswith("<0x")
    ]
    for _ in range(300):
        ids = [dice.choice(letters) if dice.random() < 0.7 else dice.randrange(size) for _ in range(dice.randint(0, 60))]
        assert "".join(stream(tokenizer, ids)[0]) == whole(tokenizer, ids), ids


def some_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, those of single bytes, letters and special tokens often; some are beyond the vocabulary."""
    size = tokenizer.get_vocab_size()
    texts = {i: tokenizer.id_to_token(i) or "" for i in range(size)}
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special] or [size]
    small = [i for i, text in texts.items() if len(text) == 1 or text.startswith("<0x") or not text.strip("\u2581")]
    return st.lists(st.one_of(*map(st.sampled_from, (small, special)), st.integers(0, size + 5)), max_size=40)


SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(st.data())
def test_pieces_add_up_for_any_tokens(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(some_ids(any_tokenizer))
    pieces, _ = stream(any_tokenizer, ids)
    assert "".join(pieces) == whole(any_tokenizer, ids)


@SETTINGS
@given(st.data())
def test_a_stop_cuts_any_tokens_as_it_cuts_their_text(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Stops are pieces of the text, so most are met, over borders of tokens wherever those are."""
    ids = data.draw(some_ids(any_tokenizer))
    text = whole(any_tokenizer, ids)
    places = data.draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 4)), min_size=1, max_size=3))
    stops = [text[at : at + n] or "never" for at, n in places]
    pieces, detokenizer = stream(any_tokenizer, ids, stop=stops)
    assert "".join(pieces) == expected_stop(text, stops)
    assert detokenizer.stopped == any(s in text for s in stops)


@SETTINGS
@given(st.data())
def test_only_the_last_end_token_has_no_text(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(some_ids(any_tokenizer))
    end = set(data.draw(st.lists(st.sampled_from(ids), max_size=3))) if ids else set()
    shown = ids[:-1] if ids and ids[-1] in end else ids
    assert "".join(stream(any_tokenizer, ids, end_token_ids=end)[0]) == whole(any_tokenizer, shown)
    text = Detokenizer(any_tokenizer, end_token_ids=end)
    assert "".join(map(text.push, ids)) + text.finish(ended_by_token=False) == whole(any_tokenizer, ids)


def test_malformed_bytes_are_not_held_back(checkpoint_dir: Directory) -> None:
    """Nothing that follows can mend a byte that begins no character; held back, they would be decoded again and again."""
    tokenizer = Tokenizer.from_file(str(checkpoint_dir("qwen2") / "tokenizer.json"))
    continuation = tokenizer.token_to_id("\u00a2")  # byte-level for 0xA2
    text = Detokenizer(tokenizer)
    assert [text.push(continuation) for _ in range(50)] == ["\ufffd"] * 50
    euro = [tokenizer.token_to_id(letter) for letter in ("\u00e2", "\u0124", "\u00ac")]  # 0xE2 0x82 0xAC
    assert [text.push(token) for token in euro] == ["", "", "€"]


def test_the_first_space_alone_is_dropped(checkpoint_dir: Directory) -> None:
    """A Llama 2's tokenizer puts a space before all text, whose decoder takes it away; every other space stays."""
    tokenizer = Tokenizer.from_file(str(checkpoint_dir("llava") / "tokenizer.json"))
    ids = [
        tokenizer.token_to_id("\u2581"),
        *tokenizer.encode("a b", add_special_tokens=False).ids,
        tokenizer.token_to_id("\u2581"),
    ]
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == whole(tokenizer, ids) == " a b "


def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids
    pieces, _ = stream(tokenizer, ids)
    assert pieces[-1] == "" and sum(map(bool, pieces)) > 3


def test_end_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello there", add_special_tokens=False).ids
    last = ids[-1]  # an ordinary token, asked for as a stop token
    assert "".join(stream(tokenizer, ids, end_token_ids={last})[0]) == whole(tokenizer, ids[:-1])
    assert "".join(stream(tokenizer, [*ids, ids[0]], end_token_ids={last})[0]) == whole(tokenizer, [*ids, ids[0]])
    text = Detokenizer(tokenizer, end_token_ids={last})
    assert "".join(map(text.push, ids)) + text.finish(ended_by_token=False) == whole(tokenizer, ids)


def expected_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        met = [end - len(s) for s in stops if text[:end].endswith(s)]
        if met:
            return text[: min(met)]
    return text


@pytest.mark.parametrize(
    "stops", [["three"], ["wo thr"], ["e f", "ee fo"], ["zzz", "👧"], [" "], ["three!"], ["two t", "o th"], ["界"]]
)
def test_stop_strings_over_token_boundaries(tokenizer: Tokenizer, stops: list[str]) -> None:
    for text in ("one two three four", "a👩‍👩‍👧b 世界c", "thre three three!"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        full = whole(tokenizer, ids)
        pieces, detokenizer = stream(tokenizer, ids, stop=stops)
        assert "".join(pieces) == expected_stop(full, stops)
        assert detokenizer.stopped == any(s in full for s in stops)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stops_do_not_depend_on_the_cuts(data: st.DataObject) -> None:
    """With a tokenizer of single letters every cut of a text into tokens is the same; pieces of letters test the search."""
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
    text = data.draw(st.text("abc", max_size=20))
    detokenizer = Detokenizer(Tokenizer.from_str(LETTERS), stop=stops)
    pieces = [detokenizer._search(piece) for piece in _cut(data, text) if not detokenizer.stopped]
    shown = "".join(pieces) + detokenizer.finish(ended_by_token=False) + detokenizer._tail
    assert shown == expected_stop(text, stops)


def _cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


def test_min_tokens_come_before_any_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("stop stop stop stop", add_special_tokens=False).ids
    pieces, text = stream(tokenizer, ids, stop=["stop"], min_tokens=len(ids) // 2 + 1)
    assert text.stopped and text.tokens > len(ids) // 2 and "stop" in "".join(pieces)


LETTERS = '{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0,"b":1,"c":2},"unk_token":"a"}}'
