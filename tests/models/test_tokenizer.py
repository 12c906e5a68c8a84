"""The tokenizer's own rules: templates that refuse, placeholders that no one called special, texts that look like marks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.models.registry import UnsupportedModel
from services.models.tokenizer import ChatTemplateError, PromptTokenizer

Directory = Callable[[str], Path]


@pytest.fixture
def folder(checkpoint_dir: Directory, tmp_path: Path) -> Path:
    """A copy of a checkpoint's tokenizer, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((checkpoint_dir("llava") / name).read_bytes())
    return tmp_path


def test_a_template_s_own_refusal(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        PromptTokenizer(folder).encode_chat([{"role": "user", "content": "x"}], add_special_tokens=True)


def test_templates_cannot_reach_python(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError):
        PromptTokenizer(folder).encode_chat([{"role": "user", "content": "x"}], add_special_tokens=True)


@pytest.mark.parametrize("missing", ["tokenizer.json", "chat_template.jinja"])
def test_missing_files_are_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(UnsupportedModel, match=missing.replace(".", r"\.")):
        PromptTokenizer(folder)


def test_a_placeholder_is_special_even_where_the_tokenizer_does_not_say_so(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    [image] = [token for token in content["added_tokens"] if token["content"] == "<image>"]
    image["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PromptTokenizer(folder, (image["id"],))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "an <image> here"}]}
    assert tokenizer.encode_chat([message], add_special_tokens=True).count(image["id"]) == 1


def test_normalising_makes_no_special_token(folder: Path) -> None:
    """Fullwidth letters become a special token's spelling under NFKC; that token, too, is only text."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, content["normalizer"]]}
    for token in content["added_tokens"]:
        token["normalized"] = token["content"] == "</s>"
    [end] = [token["id"] for token in content["added_tokens"] if token["content"] == "</s>"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PromptTokenizer(folder)
    assert end not in tokenizer.encode_chat([{"role": "user", "content": "x \uff1c/s\uff1e y"}], add_special_tokens=True)


def test_text_that_looks_like_a_mark_is_kept(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    text = "".join(f"\ufdd0{n}\ufdd1" for n in range(5)) + "<s>"
    ids = tokenizer.encode_chat([{"role": "user", "content": text}], add_special_tokens=True)
    assert text in tokenizer.fast.decode(ids, skip_special_tokens=True)


def test_texts_full_of_marks_or_special_tokens_take_no_time(folder: Path) -> None:
    """Each took time by the square of its length."""
    tokenizer = PromptTokenizer(folder)
    marks = "".join(f"\ufdd0{n}\ufdd1" for n in range(100_000))
    special = [{"type": "text", "text": "</s>" * 200} for _ in range(1000)]
    for content in marks, special:
        started = time.process_time()
        tokenizer.encode_chat([{"role": "user", "content": content}], add_special_tokens=True)
        assert time.process_time() - started < 15.0  # the square would be minutes
