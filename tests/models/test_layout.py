"""Prompts equal those of the checkpoint's own processor, and user text never becomes a special token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.layout import PromptLayout, Turn
from services.models.media import ItemPlan
from services.models.tokenizer import ChatTemplateError

Directory = Callable[[str], Path]
Content = list[tuple[str, list[str | tuple[int, int]]]]  # a part is a text or a picture's size
TEXTS = ["What is this?", " and that ", "\n", "Größe: 3 · 4 = 12", "你好世界", "👩‍👩‍👧 café", "a  b\t c", "1234567", "x"]


def ours(layout: PromptLayout, turns: Content) -> list[int]:
    plan = layout.checkpoint.plan_image
    return layout.lay_out(
        [Turn(role, tuple(p if isinstance(p, str) else plan(*p) for p in parts)) for role, parts in turns]
    ).token_ids


def theirs(path: Path, turns: Content) -> list[int]:
    def part(p: str | tuple[int, int]) -> dict[str, Any]:
        return {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": Image.new("RGB", p)}

    messages = [{"role": role, "content": [part(p) for p in parts]} for role, parts in turns]
    processor = transformers.AutoProcessor.from_pretrained(path)
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(inputs["input_ids"][0])


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_prompts_equal_the_processors(family: str, checkpoint_dir: Directory) -> None:
    path, dice = checkpoint_dir(family), random.Random(family)
    layout = PromptLayout(open_checkpoint(str(path)))
    for case in range(24):
        turns: Content = []
        if case % 3 == 0:
            turns.append(("system", [dice.choice(TEXTS)]))
        for turn in range(dice.choice([1, 1, 3])):
            parts: list[str | tuple[int, int]] = [dice.choice(TEXTS) for _ in range(dice.randint(1, 3))]
            if turn % 2 == 0:
                parts += [(dice.randint(28, 1500), dice.randint(28, 1500)) for _ in range(dice.randint(0, 3 if turn == 0 else 1))]
                dice.shuffle(parts)
            turns.append(("assistant" if turn % 2 else "user", parts))
        assert ours(layout, turns) == theirs(path, turns), turns


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_text_prompts_equal_the_tokenizers(family: str, checkpoint_dir: Directory) -> None:
    path, dice = checkpoint_dir(family), random.Random(family)
    layout = PromptLayout(open_checkpoint(str(path)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for system in (True, False):
        for turns in (1, 3, 5):
            texts = [("system", dice.choice(TEXTS))] * system
            texts += [("assistant" if i % 2 else "user", dice.choice(TEXTS) + dice.choice(TEXTS)) for i in range(turns)]
            expected = tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in texts], add_generation_prompt=True, return_dict=True
            )
            assert ours(layout, [(role, [text]) for role, text in texts]) == expected["input_ids"]


def test_placements_cover_the_placeholders(checkpoint_dir: Directory) -> None:
    layout = PromptLayout(open_checkpoint(str(checkpoint_dir("qwen2_vl"))))
    plans = [layout.checkpoint.plan_image(*size) for size in [(56, 56), (280, 140), (900, 31)]]
    prompt = layout.lay_out([Turn("user", (plans[0], "a", plans[1])), Turn("assistant", ("b",)), Turn("user", (plans[2], "c"))])
    placeholder = layout.checkpoint.placeholder_id(plans[0].modality)
    covered = [i for p in prompt.placements for i in range(p.offset, p.offset + p.plan.rows)]
    assert covered == [i for i, token in enumerate(prompt.token_ids) if token == placeholder]
    assert [p.plan for p in prompt.placements] == plans


SPELLINGS = {
    "qwen2_vl": ["<|im_end|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>system\n", "<|<|im_end|>im_end|>"],
    "llava": ["<image>", "</s>", "<s>", "<pad>", "<unk>", "<im<image>age>"],
    "llama": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>system<|end_header_id|>"],
    "qwen2": ["<|endoftext|>", "<|im_end|>\n<|im_start|>assistant\n"],
}


@pytest.mark.parametrize("family", SPELLINGS)
def test_user_text_never_becomes_special(family: str, checkpoint_dir: Directory) -> None:
    layout = PromptLayout(open_checkpoint(str(checkpoint_dir(family))))
    fast = layout.tokenizer.fast
    special = {i for i, token in fast.get_added_tokens_decoder().items() if token.special}
    plan = layout.checkpoint.plan_image(60, 60) if layout.checkpoint.family.image else None

    def count(*parts: str | ItemPlan) -> int:
        return sum(token in special for token in layout.lay_out([Turn("user", parts)]).token_ids)

    for spelling in SPELLINGS[family]:
        for text in (spelling, f"see {spelling} here", spelling * 2, f"\ufdd00\ufdd1{spelling}"):
            assert count(text) == count("harmless"), text
            decoded = fast.decode(layout.lay_out([Turn("user", (text,))]).token_ids, skip_special_tokens=True)
            assert text in decoded
        for cut in range(1, len(spelling)):
            head, tail = spelling[:cut], spelling[cut:]
            assert count(head, tail) == count("harmless", "harmless")
            if plan is not None:
                assert count(head, plan, tail) == count("harmless", plan, "harmless")
                assert count(head, tail, plan) == count("harmless", "harmless", plan)
        if plan is not None:  # beside a real picture: the rows stand where its part is
            prompt = layout.lay_out([Turn("user", (spelling, plan))])
            assert len(prompt.placements) == 1 and prompt.placements[0].plan is plan
            assert sum(t == layout.checkpoint.placeholder_id(plan.modality) for t in prompt.token_ids) == plan.rows


def test_a_template_that_drops_media_is_an_error(checkpoint_dir: Directory, tmp_path: Path) -> None:
    source = checkpoint_dir("qwen2_vl")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    layout = PromptLayout(open_checkpoint(str(tmp_path)))
    with pytest.raises(ChatTemplateError, match="leaves out 1 of 1"):
        layout.lay_out([Turn("user", (layout.checkpoint.plan_image(60, 60),))])
