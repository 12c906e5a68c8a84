"""What single families' checkpoints must show: the published prompts and token counts, windows and changing positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.checkpoints.blueprint import Options
from scripts.checkpoints.llama import DYNAMIC_LENGTH
from scripts.checkpoints.qwen_vl import interleaved_section
from scripts.checkpoints.registry import FAMILIES
from scripts.checkpoints.text import MISTRAL_WINDOW, PHI3_SHORT
from services.models.hf import transformers

QUESTION = [{"role": "user", "content": "Hi"}]
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
USER, ASSISTANT = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
PROMPTS = {
    "qwen2_5_vl": SYSTEM + USER + ASSISTANT,
    "qwen3_vl": USER + ASSISTANT,
    "qwen3": USER + ASSISTANT,
    "qwen2_audio": SYSTEM + USER + ASSISTANT,
    "qwen2_5_omni_thinker": SYSTEM + USER + ASSISTANT,
    "mistral": "<s>[INST] Hi [/INST]",
    "phi3": "<|user|>\nHi<|end|>\n<|assistant|>\n",
    "voxtral": "<s>[INST]Hi[/INST]",
}


def render(family: str, messages: list[dict[str, Any]], **options: Any) -> str:
    text = FAMILIES[family](Options()).tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("family", PROMPTS)
def test_plain_question(family: str) -> None:
    assert render(family, QUESTION, add_generation_prompt=True) == PROMPTS[family]


def test_omni_template_with_all_media() -> None:
    parts = [{"type": "audio"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}]
    text = render("qwen2_5_omni_thinker", [{"role": "user", "content": parts}], add_audio_id=True)
    image, video = (f"<|vision_bos|><|{kind}|><|vision_eos|>" for kind in ("IMAGE", "VIDEO"))
    user = f"<|im_start|>user\nAudio 1: <|audio_bos|><|AUDIO|><|audio_eos|>a{image}{video}<|im_end|>\n"
    assert text == SYSTEM + user


def test_qwen2_audio_template_numbers_recordings() -> None:
    parts = [{"type": "audio"}, {"type": "text", "text": "a"}, {"type": "audio"}]
    user = "".join(f"Audio {i}: <|audio_bos|><|AUDIO|><|audio_eos|>\n{text}" for i, text in ((1, "a"), (2, "")))
    assert render("qwen2_audio", [{"role": "user", "content": parts}]) == f"{SYSTEM}<|im_start|>user\n{user}<|im_end|>\n"


def test_voxtral_template_over_turns() -> None:
    parts = [{"type": "audio"}, {"type": "text", "text": "what?"}]
    turns = [("system", "Be brief."), ("user", parts), ("assistant", "rain"), ("user", "sure?")]
    assert render("voxtral", [{"role": role, "content": content} for role, content in turns]) == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST][BEGIN_AUDIO][AUDIO]what?[/INST]rain</s>[INST]sure?[/INST]"
    )


def test_mistral_template_wants_alternating_turns() -> None:
    turns = [{"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "Yes."}, *QUESTION]
    assert render("mistral", turns) == "<s>[INST] Be brief.\n\nHi [/INST] Yes.</s>[INST] Hi [/INST]"
    with pytest.raises(Exception, match="must alternate"):
        render("mistral", QUESTION * 2)


def test_qwen3_forgets_earlier_thoughts_and_can_skip_thinking() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
    assert "hm" not in render("qwen3", [*QUESTION, thought, *QUESTION])
    assert "hm" in render("qwen3", [*QUESTION, thought])
    text = render("qwen3", QUESTION, add_generation_prompt=True, enable_thinking=False)
    assert text == USER + ASSISTANT + "<think>\n\n</think>\n\n"
    tokenizer = FAMILIES["qwen3"](Options()).tokenizer
    ids = tokenizer("<think>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "<think>"


SIZES = [(28, 28), (56, 56), (280, 420), (1500, 1500)]


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("qwen2_5_vl", [4, 4, 150, 2916]),
        ("qwen2_5_omni_thinker", [4, 4, 150, 2916]),
        ("qwen3_vl", [64, 64, 117, 2209]),
    ],
)
def test_pictures_cost_what_they_cost_the_real_model(
    family: str, counts: list[int], checkpoint_dir: Callable[[str], Path]
) -> None:
    processor = transformers.AutoProcessor.from_pretrained(checkpoint_dir(family))
    assert processor._get_num_multimodal_tokens(image_sizes=SIZES)["num_image_tokens"] == counts


@pytest.mark.parametrize(
    ("family", "rows"), [("qwen2_audio", {0.3: 7, 10: 250, 40: 750}), ("qwen2_5_omni_thinker", {0.3: 7, 10: 250, 40: 1000})]
)
def test_recordings_cost_25_tokens_a_second(family: str, rows: dict[float, int], checkpoint_dir: Callable[[str], Path]) -> None:
    processor = transformers.AutoProcessor.from_pretrained(checkpoint_dir(family))
    for seconds, count in rows.items():
        samples = np.zeros(round(seconds * 16000), np.float32)
        inputs = processor(text=[processor.audio_token], audio=[samples], return_tensors="pt", sampling_rate=16000)
        assert (inputs["input_ids"] == processor.audio_token_id).sum() == count


def test_voxtral_has_the_published_ids(checkpoint_dir: Callable[[str], Path]) -> None:
    processor = transformers.AutoProcessor.from_pretrained(checkpoint_dir("voxtral"))
    assert processor.audio_token == "[AUDIO]"
    tokens = ["<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[SYSTEM_PROMPT]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"]
    assert processor.tokenizer.convert_tokens_to_ids(tokens) == [1, 2, 3, 4, 11, 17, 25, 34]


def test_omnis_pictures_and_recordings_share_a_file(checkpoint_dir: Callable[[str], Path]) -> None:
    path = checkpoint_dir("qwen2_5_omni_thinker")
    assert transformers.AutoFeatureExtractor.from_pretrained(path).chunk_length == 300
    assert transformers.AutoImageProcessor.from_pretrained(path).patch_size == 14
    (path / "processor_config.json").rename(path / "away")
    try:
        old = transformers.AutoProcessor.from_pretrained(path)
    finally:
        (path / "away").rename(path / "processor_config.json")
    assert old.feature_extractor.chunk_length == 300 and old.image_processor.merge_size == 2


@torch.no_grad()
def test_mistral_does_not_see_past_its_windows(checkpoint_dir: Callable[[str], Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_dir("mistral"))
    reach = model.config.num_hidden_layers * (MISTRAL_WINDOW - 1) + 1
    ids = torch.randint(300, 900, (1, reach + 10), generator=torch.Generator().manual_seed(1))
    changed = [ids.clone() for _ in range(2)]
    changed[0][0, 9] = 299  # one further than the last token can reach
    changed[1][0, 10] = 299
    before, unseen, seen = (model(input_ids=i).logits[0, -1] for i in (ids, *changed))
    assert torch.allclose(before, unseen, atol=1e-5) and not torch.allclose(before, seen, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("family", "length"), [("phi3", PHI3_SHORT), ("llama_dynamic", DYNAMIC_LENGTH)])
def test_positions_change_past_a_length(family: str, length: int, checkpoint_dir: Callable[[str], Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_dir(family))

    def frequencies(tokens: int) -> torch.Tensor:
        model(input_ids=torch.full((1, tokens), 300))
        return model.model.rotary_emb.inv_freq.clone()

    assert torch.equal(frequencies(1), frequencies(length))
    assert not torch.equal(frequencies(length), frequencies(length + 1))
    assert torch.equal(frequencies(length + 2), frequencies(length + 3)) == (family == "phi3")


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 128])
def test_interleaved_section_fills_half_the_head(head_dim: int) -> None:
    assert sum(interleaved_section(head_dim)) == head_dim // 2
    assert interleaved_section(128) == [24, 20, 20]
