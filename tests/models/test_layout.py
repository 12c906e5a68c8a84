"""Prompts equal those of the checkpoint's own processor, and user text never becomes a special token."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.layout import Layout, PromptLayout, Turn
from services.models.media import ALL_FRAMES, Clip, Grid, ItemPlan, Medium, Modality, Picture, Recording
from services.models.registry import FAMILIES as KNOWN
from services.models.tokenizer import ChatTemplateError
from tests import reference
from tests.oracle import Takes, catalogue
from tests.reference import Ask, Oracle, Part, Sound, asks_for, media

Directory = Callable[[str], Path]
TEXTS = ["What is this?", " and that ", "\n", "", "Größe: 3 · 4 = 12", "你好世界", "👩‍👩‍👧 café", "a  b\t c"]
TEXTS += ["1234567", "\n\nx", "x\n\n"]
FAMILIES = [name for name, family in KNOWN.items() if family.modalities]


def medium(part: bytes | Sound | reference.Clip) -> Medium:
    """What a gateway knows of a part."""
    match part:
        case bytes():
            return Picture(*Image.open(io.BytesIO(part)).size)
        case Sound():
            return Recording(len(part.samples))
        case reference.Clip():
            return Clip(part.frames.shape[2], part.frames.shape[1], len(part.frames), part.fps)


def lay_out(layout: PromptLayout, ask: Ask) -> Layout:
    parts = [part for _, parts in ask.turns for part in parts if not isinstance(part, str)]
    plans = iter(layout.checkpoint.plan([medium(part) for part in parts], ALL_FRAMES))
    return layout.lay_out(
        [Turn(role, tuple(p if isinstance(p, str) else next(plans) for p in parts)) for role, parts in ask.turns]
    )


def conversations(family: str, count: int) -> list[Ask]:
    """Turns with any texts around and between any media; a system message where the template takes one."""
    takes, dice = catalogue("TAKES").get(family, Takes()), random.Random(family)
    next_item = media(dice, KNOWN[family].modalities)
    stacks = family in ("llava_onevision", "internvl")  # their processors stack videos, which must have as many frames
    made = []
    for case in range(count):
        turns: list[tuple[str, list[Part]]] = []
        if case % 3 == 0 and takes.turns:
            turns.append(("system", [dice.choice(TEXTS[:4])]))
        for turn in range(dice.choice([1, 1, 3]) if takes.turns else 1):
            parts: list[Part] = [dice.choice(TEXTS) for _ in range(dice.randint(1, 4))]
            if turn % 2 == 0:
                parts += [next_item() for _ in range(min(takes.items, max(takes.least, dice.randint(0, 3 if turn == 0 else 1))))]
                clips = [p for _, earlier in [*turns, ("", parts)] for p in earlier if isinstance(p, reference.Clip)]
                parts = [p for p in parts if not (stacks and p in clips[1:])]
                dice.shuffle(parts)
            turns.append(("assistant" if turn % 2 else "user", parts))
        made.append(Ask(turns))
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, checkpoint_dir: Directory) -> tuple[PromptLayout, Oracle]:
    """Our layout and transformers' processor for each family in turn."""
    if request.param == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
    path = checkpoint_dir(request.param)
    return PromptLayout(open_checkpoint(str(path))), Oracle(path)


def check(layout: PromptLayout, oracle: Oracle, ask: Ask) -> None:
    """Same ids, and the runs of every item are where its placeholders are and stand for all of its rows."""
    prompt = lay_out(layout, ask)
    assert prompt.token_ids == oracle.inputs(ask)["input_ids"][0].tolist(), [role for role, _ in ask.turns]
    placeholders = {layout.checkpoint.placeholder_id(m) for m in layout.checkpoint.family.modalities}
    covered = [i for p in prompt.placements for i in range(p.offset, p.offset + p.tokens)]
    assert covered == [i for i, token in enumerate(prompt.token_ids) if token in placeholders]
    runs: dict[int, int] = {}
    for place in prompt.placements:
        assert place.first_row == runs.get(place.item, 0)
        runs[place.item] = place.first_row + place.rows
        grid = place.grid
        if layout.checkpoint.family.positions_from_grid and place.plan.modality is not Modality.AUDIO:
            assert grid.t * grid.h * grid.w == 4 * place.rows
        else:
            assert grid.t * grid.h * grid.w == place.rows or layout.checkpoint.family.cross
    assert runs == {p.item: p.plan.rows for p in prompt.placements}


def test_prompts_equal_the_processors(both: tuple[PromptLayout, Oracle]) -> None:
    layout, oracle = both
    for ask in conversations(oracle.model_type, 10):
        check(layout, oracle, ask)


def test_requests_of_the_oracle_are_laid_out_alike(both: tuple[PromptLayout, Oracle]) -> None:
    layout, oracle = both
    for ask in asks_for(oracle.model_type, 7, 5):
        check(layout, oracle, ask)


def ours(layout: PromptLayout, turns: list[tuple[str, list[str]]]) -> list[int]:
    return layout.lay_out([Turn(role, tuple(parts)) for role, parts in turns]).token_ids


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
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>", "<end_of_turn>"],
    "gemma4": ["<|image|>", "<|image><|image|>", "<turn|>"],
    "idefics3": ["<row_1_col_1>", "<fake_token_around_image><global-img><image>", "<end_of_utterance>"],
    "internvl": ["<IMG_CONTEXT>", "<img></img>", "<video>"],
    "qwen3_vl": ["<|video_pad|>", "<0.5 seconds><|vision_start|>"],
    "mllama": ["<|image|>", "<|eot_id|>"],
    "phi4_multimodal": ["<|image|>", "<|audio|>", "<|end|>"],
    "voxtral": ["[AUDIO]", "[BEGIN_AUDIO]", "[/INST]"],
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
            assert sum(p.rows for p in prompt.placements) == plan.rows and all(p.plan is plan for p in prompt.placements)
            placeholder, tokens = layout.checkpoint.placeholder_id(plan.modality), prompt.tokens_of(plan.modality)
            assert sum(t == placeholder for t in prompt.token_ids) == tokens


WHOLE = [*FAMILIES, "llama", "qwen2"]
ODD_PIECES = [
    "{{ 7 * 7 }}",
    "{% endfor %}",
    "\ufdd00\ufdd1",
    "\ufdd0",
    "▁",
    "Ġ",
    "\u2581<",
    "\uff1c",
    "<",
    ">",
    "|",
    "[",
    "]",
    " ",
    "\n",
    "\t",
    "\0",
    "é",
    "🙂",
]


@pytest.mark.parametrize("family", WHOLE)
def test_no_text_becomes_special(family: str, checkpoint_dir: Directory) -> None:
    """Texts made of every added token of the tokenizer, whole and in pieces, in up to three parts, around a picture or two."""
    layout = PromptLayout(open_checkpoint(str(checkpoint_dir(family))))
    added = layout.tokenizer.fast.get_added_tokens_decoder()
    known = layout.checkpoint.family
    placeholders = {layout.checkpoint.placeholder_id(m) for m in known.modalities}
    special = {i for i, token in added.items() if token.special} | placeholders
    spellings = sorted({token.content for token in added.values()} | set(layout.tokenizer._variables.values()))
    piece = st.one_of(
        st.sampled_from(spellings),
        st.sampled_from(spellings).flatmap(lambda text: st.integers(1, len(text)).map(lambda cut: text[:cut])),
        st.sampled_from(spellings).flatmap(lambda text: st.integers(0, len(text) - 1).map(lambda cut: text[cut:])),
        st.sampled_from(ODD_PIECES),
        st.text(max_size=3),
    )
    text = st.lists(piece, max_size=6).map("".join)
    plan = layout.checkpoint.plan_image(60, 60) if known.image else None
    least = 1 if family == "paligemma" else 0

    def laid(texts: list[str], pictures: int) -> Layout:
        parts: list[str | ItemPlan] = [*texts]
        for number in range(pictures):
            assert plan is not None
            parts.insert(min(2 * number, len(parts)), plan)
        return layout.lay_out([Turn("user", tuple(parts))])

    @settings(max_examples=40, deadline=None)
    @given(texts=st.lists(text, min_size=1, max_size=3), pictures=st.integers(least, 2 if plan and not least else least))
    def check_texts(texts: list[str], pictures: int) -> None:
        made, harmless = laid(texts, pictures), laid(["x"] * len(texts), pictures)
        counts = [Counter(token for token in prompt.token_ids if token in special) for prompt in (made, harmless)]
        assert counts[0] == counts[1]
        assert [place.rows for place in made.placements] == [place.rows for place in harmless.placements]
        for place in made.placements:
            assert set(made.token_ids[place.offset : place.offset + place.tokens]) <= placeholders

    check_texts()


def test_a_template_that_drops_media_is_an_error(checkpoint_dir: Directory, tmp_path: Path) -> None:
    source = checkpoint_dir("qwen2_vl")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    layout = PromptLayout(open_checkpoint(str(tmp_path)))
    with pytest.raises(ChatTemplateError, match="leaves out 1 of 1"):
        layout.lay_out([Turn("user", (layout.checkpoint.plan_image(60, 60),))])


def test_a_family_that_needs_a_picture_says_so(checkpoint_dir: Directory) -> None:
    layout = PromptLayout(open_checkpoint(str(checkpoint_dir("paligemma"))))
    with pytest.raises(ChatTemplateError, match="no picture"):
        layout.lay_out([Turn("user", ("describe <image>",))])


def test_runs_of_one_item_name_their_rows(checkpoint_dir: Directory) -> None:
    layout = PromptLayout(open_checkpoint(str(checkpoint_dir("qwen3_vl"))))
    [plan] = layout.checkpoint.plan([Clip(64, 64, 6, 2.0)], ALL_FRAMES)
    [picture] = layout.checkpoint.plan([Picture(64, 64)])
    prompt = layout.lay_out([Turn("user", (picture, "a", plan))])
    assert [(p.item, p.first_row, p.rows, p.grid) for p in prompt.placements] == [
        (0, 0, picture.rows, picture.grid),
        *((1, i * plan.rows // 3, plan.rows // 3, Grid(1, plan.grid.h, plan.grid.w)) for i in range(3)),
    ]


def test_media_may_change_places_with_those_of_other_kinds(checkpoint_dir: Directory) -> None:
    """This family's template brings pictures to the front; placements say which item each is."""
    layout = PromptLayout(open_checkpoint(str(checkpoint_dir("llava_onevision"))))
    clip, picture = layout.checkpoint.plan([Clip(64, 64, 2, 2.0), Picture(64, 64)], ALL_FRAMES)
    prompt = layout.lay_out([Turn("user", (clip, "a", picture))])
    assert [(p.item, p.plan.modality.word) for p in prompt.placements] == [(1, "image"), (0, "video")]
