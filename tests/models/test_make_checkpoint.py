"""Every family's checkpoint is complete, loads with stock Auto classes, answers with variety and is reproducible."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_checkpoint import main
from services.models.torchvision_shim import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    GenerationConfig,
    PreTrainedModel,
)

from scripts.checkpoints.blueprint import Options  # noqa: E402
from scripts.checkpoints.qwen import mrope_section  # noqa: E402
from scripts.checkpoints.registry import FAMILIES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VISION = tuple(family for family, build in FAMILIES.items() if hasattr(build(Options()).processor, "image_processor"))
PLACES = 1152  # tokens that PaliGemma's processor adds
SIZES = {
    "mllama": (1025, 1032),
    "paligemma": (1000 + PLACES, 2176),
}  # tokens and embedding rows, where they are not 1000 and 1024
UNORDERED = ("mllama",)  # cross-attention has no positions, so pictures side by side are a set
TEXTS = (
    "Hello, world!",
    "don't  stop\n\n\tnow 12345",
    " leading and trailing ",
    "naïve café, Ελληνικά, русский",
    "你好世界。日本語のテキスト 한국어",
    "🙂👩‍👩‍👧 🏳️‍🌈",
)


def make(out: Path, family: str, *options: str) -> Path:
    if family == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
    assert main(["--family", family, "--out", str(out), "--layers", "3", *options]) == 0
    return out


def digests(directory: Path, pattern: str = "*") -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob(pattern)}


def load(directory: Path) -> tuple[PreTrainedModel, dict]:
    listed_as_text = directory.name == "phi4_multimodal"
    auto = (
        AutoModelForMultimodalLM
        if not listed_as_text and (directory / "processor_config.json").exists()
        else AutoModelForCausalLM
    )
    return auto.from_pretrained(directory, output_loading_info=True)


def picture(width: int, height: int, colour: str) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((width // 5, height // 5, width - 3, height - 3), fill=colour)
    return image


def ask(directory: Path, question: str, *images: Image.Image) -> BatchFeature:
    """One chat turn as tensors, through the checkpoint's own template."""
    if directory.name not in VISION:
        message = {"role": "user", "content": question}
        return AutoTokenizer.from_pretrained(directory).apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    processor = AutoProcessor.from_pretrained(directory)
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    turns = [{"role": "user", "content": parts}]
    template = processor.tokenizer.chat_template  # phi4_multimodal's processor drops its own on loading
    return processor.apply_chat_template(
        turns, template, tokenize=True, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


@torch.no_grad()
def last_logits(model: PreTrainedModel, inputs: BatchFeature) -> torch.Tensor:
    return model(**inputs).logits[0, -1]


def answer(model: PreTrainedModel, inputs: BatchFeature, tokens: int = 24) -> list[int]:
    return model.generate(**inputs, max_new_tokens=tokens)[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)


@pytest.fixture(scope="module", params=VISION)
def vision_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("vision") / request.param, request.param)


def test_loads_completely(checkpoint: Path) -> None:
    _, info = load(checkpoint)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_is_sharded_and_indexed(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    shards = {path.name for path in checkpoint.glob("*.safetensors")}
    assert len(shards) > 1 and set(index["weight_map"].values()) == shards


def test_text_survives_the_tokenizer(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.chat_template
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_embedding_covers_the_tokenizer(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = model.get_input_embeddings().weight.shape[0]
    assert (len(tokenizer), rows) == SIZES.get(checkpoint.name, (1000, 1024))
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1


def test_generation_config_stops_at_the_tokenizers_end(checkpoint: Path) -> None:
    generation = GenerationConfig.from_pretrained(checkpoint)
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    assert generation.do_sample is False
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id in ends


def test_answers_vary(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    model.generation_config.eos_token_id = None
    images = [picture(97, 203, "red"), picture(150, 31, "blue")] if checkpoint.name in VISION else []
    answers = [answer(model, ask(checkpoint, question, *images)) for question in ("Hello", "What is shown here?")]
    assert all(len(set(tokens)) >= 8 for tokens in answers), answers
    assert answers[0] != answers[1]
    assert max(map(max, answers)) < len(AutoTokenizer.from_pretrained(checkpoint))


def test_picture_changes_the_answer(vision_checkpoint: Path) -> None:
    model, _ = load(vision_checkpoint)
    question = "What is it?"
    red = ask(vision_checkpoint, question, picture(203, 97, "red"))
    blue = ask(vision_checkpoint, question, picture(203, 97, "blue"))
    assert torch.equal(red["input_ids"], blue["input_ids"])
    assert (last_logits(model, red) - last_logits(model, blue)).abs().max() > 0.1
    assert answer(model, red) != answer(model, blue)


def test_pictures_are_told_apart_by_order(vision_checkpoint: Path) -> None:
    if vision_checkpoint.name in UNORDERED:
        pytest.skip("no order to tell")
    model, _ = load(vision_checkpoint)
    red, blue = picture(120, 120, "red"), picture(120, 120, "blue")
    first, second = (last_logits(model, ask(vision_checkpoint, "Compare.", *pair)) for pair in ((red, blue), (blue, red)))
    assert (first - second).abs().max() > 0.1


def test_text_alone_is_answered(vision_checkpoint: Path) -> None:
    if vision_checkpoint.name == "paligemma":
        pytest.skip("its processor requires a picture")
    model, _ = load(vision_checkpoint)
    assert answer(model, ask(vision_checkpoint, "Hello"), tokens=4)


def test_qwen2_vl_counts_tokens_like_the_real_model(tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make(tmp_path / "qwen2_vl", "qwen2_vl"))
    sizes = [(28, 28), (56, 56), (280, 420), (1500, 1500)]
    assert processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"] == [4, 4, 150, 1225]


def test_llava_spends_576_tokens_per_picture(tmp_path: Path) -> None:
    directory = make(tmp_path / "llava", "llava")
    inputs = ask(directory, "Hi", picture(40, 700, "green"), picture(9, 9, "green"))
    image = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids("<image>")
    assert (inputs["input_ids"] == image).sum() == 2 * 576
    assert inputs["input_ids"][0, 0] == AutoTokenizer.from_pretrained(directory).bos_token_id


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("llama", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                  "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("qwen2", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                  "<|im_start|>assistant\n"),
        ("qwen2_vl", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                     "<|im_start|>assistant\n"),
        ("llava", "USER: Hi ASSISTANT:"),
    ],
)  # fmt: skip
def test_chat_template_of_plain_text(family: str, prompt: str) -> None:
    tokenizer = FAMILIES[family](Options()).tokenizer
    turn = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) == prompt


def test_qwen2_vl_template_with_parts_and_numbering() -> None:
    tokenizer = FAMILIES["qwen2_vl"](Options()).tokenizer
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}, {"type": "image", "image": "x.png"}]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_vision_id=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nPicture 1: {image}andVideo 1: {video}Picture 2: {image}<|im_end|>\n"
    )


def test_llava_template_puts_pictures_first() -> None:
    tokenizer = FAMILIES["llava"](Options()).tokenizer
    parts = [{"type": "text", "text": "What is"}, {"type": "image"}, {"type": "text", "text": "this?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "USER: <image>\nWhat is this? ASSISTANT: A cat. "


@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_seed_same_bytes_other_seed_other_weights(family: str, tmp_path: Path) -> None:
    one, two, other = (make(tmp_path / str(i), family, "--seed", seed) for i, seed in enumerate(("5", "5", "6")))
    assert digests(one) == digests(two)
    assert digests(one, "*.json") == digests(other, "*.json")
    weights, others = digests(one, "*.safetensors"), digests(other, "*.safetensors")
    assert all(weights[name] != others[name] for name in weights)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_sizes_and_dtype_are_honoured(family: str, tmp_path: Path) -> None:
    options = ("--hidden-size", "128", "--vocab-size", "1200", "--dtype", "bfloat16", "--shard-size", "200KB")
    model, info = load(make(tmp_path / family, family, *options))
    assert not info["missing_keys"] and not info["unexpected_keys"]
    text = model.config.get_text_config()
    assert (text.hidden_size, text.num_hidden_layers) == (128, 3)
    assert text.vocab_size == (1216 if family != "paligemma" else 1216 + PLACES)
    always_float32 = tuple(model._keep_in_fp32_modules_strict or ())
    changed = [value.dtype for name, value in model.named_parameters() if not any(part in name for part in always_float32)]
    assert set(changed) == {torch.bfloat16}


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 128])
def test_mrope_section_fills_half_the_head(head_dim: int) -> None:
    assert sum(mrope_section(head_dim)) == head_dim // 2
    assert mrope_section(128) == [16, 24, 24]


def test_unknown_family_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "gpt5", "--out", str(tmp_path / "x")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "gpt5" in line and all(family in line for family in FAMILIES)
    assert not (tmp_path / "x").exists()


def test_keeps_a_directory_in_use_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "qwen2_vl")
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["--family", "llama", "--out", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["--family", "llama", "--out", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "processor_config.json").exists()
    assert len({path.name.partition("-of-")[2] for path in tmp_path.glob("model-*.safetensors")}) == 1


@pytest.mark.parametrize("bad", [("--hidden-size", "48"), ("--layers", "0"), ("--vocab-size", "200")])
def test_impossible_sizes_are_refused(bad: tuple[str, str], tmp_path: Path) -> None:
    assert main(["--family", "llava", "--out", str(tmp_path / "x"), *bad]) == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["scripts/make_checkpoint.py"], ["-m", "scripts.make_checkpoint"]])
def test_runs_as_a_path_and_as_a_module(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout and "qwen2_vl" in done.stdout
