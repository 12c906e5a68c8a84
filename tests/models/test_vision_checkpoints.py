"""What is particular to the vision families' checkpoints: prompts, token counts, structure, and how far pictures matter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from scripts.checkpoints.blueprint import Options
from scripts.checkpoints.registry import FAMILIES
from scripts.checkpoints.templates_vision import smolvlm
from services.models.hf import transformers
from tests.models.test_make_checkpoint import ask, last_logits, load, make
from tests.oracle.test_vision import read
from tests.reference import picture

SEEN = {
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\nWhat is<start_of_image>this?<end_of_turn>\n"
    "<start_of_turn>model\nA cat.<end_of_turn>\n<start_of_turn>model\n",
    "mllama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is<|image|>this?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA cat.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma4": "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nWhat is<|image|>this?<turn|>\n"
    "<|turn>model\nA cat.<turn|>\n<|turn>model\n",
    "llava_next": "<<SYS>>\nBe brief.\n<</SYS>>\n\n[INST] <image>\nWhat isthis? [/INST] A cat.</s>",
    "llava_onevision": "<|im_start|>system \nBe brief.<|im_end|><|im_start|>user <image>\nWhat is\nthis?<|im_end|>"
    "<|im_start|>assistant \nA cat.<|im_end|><|im_start|>assistant\n",
    "internvl": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is<IMG_CONTEXT>\nthis?<|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n<|im_start|>assistant\n",
    "smolvlm": "<|im_start|>System: Be brief.<end_of_utterance>\nUser: What is<image>this?<end_of_utterance>\n"
    "Assistant: A cat.<end_of_utterance>\nAssistant:",
    "idefics3": "<|begin_of_text|>System: Be brief.<end_of_utterance>\nUser: What is<image>this?<end_of_utterance>\n"
    "Assistant: A cat.<end_of_utterance>\nAssistant:",
    "phi4_multimodal": "<|system|>Be brief.<|end|><|user|>What is<|image|>this?<|end|><|assistant|>A cat.<|end|><|assistant|>",
}
# Rows of one picture, by (height, width); what the published model gives, except where tiles are fewer or smaller.
ROWS = {
    "gemma3": {(28, 28): 256, (900, 1500): 256},
    "paligemma": {(28, 28): 256, (900, 1500): 256},
    "mllama": {(28, 28): 1, (900, 1500): 1},
    "gemma4": {(28, 28): 256, (900, 1500): 252, (100, 1000): 260},
    "llava_next": {(112, 112): 64 + 8 * 9, (112, 224): 64 + 8 * 17, (100, 400): 64 + 6 * 25},
    "llava_onevision": {(128, 128): 81 + 9 * 10, (384, 384): 81 + 27 * 28, (768, 768): 81 + 27 * 28},
    "internvl": {(28, 28): 256, (448, 896): 3 * 256, (900, 1500): 7 * 256},
    "smolvlm": {(28, 28): 10 * 64, (100, 1500): 4 * 64},
    "idefics3": {(28, 28): 5 * 169, (100, 1500): 3 * 169},
    "phi4_multimodal": {(28, 28): 273 + 16 * 17, (448, 896): 273 + 16 * 33},
}


@pytest.fixture(scope="module", params=list(ROWS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)


def pictures(*sizes: tuple[int, int]) -> list:
    rng = random.Random(5)
    return [read(picture(rng, width, height, "PNG")) for height, width in sizes]


@pytest.mark.parametrize("family", list(SEEN))
def test_template_with_a_picture(family: str) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
    parts = [{"type": "text", "text": "What is"}, {"type": "image"}, {"type": "text", "text": "this?"}]
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    tokenizer = FAMILIES[family](Options()).tokenizer
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == SEEN[family]


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemmas_refuse_two_user_turns_in_a_row(family: str) -> None:
    tokenizer = FAMILIES[family](Options()).tokenizer
    with pytest.raises(Exception, match="alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}] * 2, tokenize=False)


def test_mllama_has_no_system_turn_beside_a_picture() -> None:
    tokenizer = FAMILIES["mllama"](Options()).tokenizer
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    assert "system" not in tokenizer.apply_chat_template(turn, tokenize=False)
    assert "system" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


def test_paligemma_puts_pictures_before_the_text(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "paligemma", "paligemma")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.decode(ask(checkpoint, "What is it?", *pictures((40, 40), (50, 50)))["input_ids"][0])
    assert text == "<image>" * 512 + "<bos>What is it?\n"


def test_smolvlm_leaves_no_space_before_a_leading_picture() -> None:
    tokenizer = FAMILIES["idefics3"](Options()).tokenizer
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    text = tokenizer.apply_chat_template(turn, chat_template=smolvlm("<s>"), tokenize=False)
    assert text == "<s>User:<image>Hi<end_of_utterance>\n"


def test_rows_of_a_picture(checkpoint: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    token = getattr(config, "image_token_id", None) or config.vision_config.image_token_id
    for size, rows in ROWS[checkpoint.name].items():
        assert (ask(checkpoint, "Hi", *pictures(size))["input_ids"] == token).sum() == rows, size


def test_llava_onevision_gives_each_of_several_pictures_one_tile(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "llava_onevision", "llava_onevision")
    inputs = ask(checkpoint, "Hi", *pictures((384, 384), (700, 200)))
    token = transformers.AutoConfig.from_pretrained(checkpoint).image_token_id
    assert (inputs["input_ids"] == token).sum() == 2 * (81 + 1)


def test_first_logits_depend_on_the_picture(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    logits = torch.stack([last_logits(model, ask(checkpoint, "Hi", one)) for one in pictures(*[(90, 120)] * 4)])
    apart = torch.cdist(logits, logits, p=float("inf"))
    assert apart[~torch.eye(4, dtype=torch.bool)].min() > 0.1


def test_mllama_gates_are_open(tmp_path: Path) -> None:
    model, _ = load(make(tmp_path / "mllama", "mllama"))
    gates = {name: parameter for name, parameter in model.named_parameters() if parameter.numel() == 1}
    assert {name.split(".")[-1] for name in gates} >= {"cross_attn_attn_gate", "cross_attn_mlp_gate", "gate"}
    assert all(abs(float(gate)) > 0.1 for gate in gates.values())


def test_gemma4_shares_keys_between_layers_of_two_head_sizes(tmp_path: Path) -> None:
    model, _ = load(make(tmp_path / "gemma4", "gemma4", "--layers", "4"))
    attention = [layer.self_attn for layer in model.model.language_model.layers]
    assert [one.is_kv_shared_layer for one in attention] == [False, False, True, True]
    assert [one.head_dim for one in attention] == [16, 32, 16, 32]
    assert model.model.language_model.embed_tokens_per_layer.weight.shape == (1024, 4 * 16)
