"""Opening a checkpoint: folder, hub id or the embedded one; what is refused says why and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from services.models.checkpoint import EMBEDDED, open_checkpoint
from services.models.half import choose_device, choose_dtype, load_half, parameter_bytes
from services.models.hf import transformers
from services.models.registry import FAMILIES, UnsupportedModel, family_of

Directory = Callable[[str], Path]


def test_without_a_name_it_is_the_embedded_one() -> None:
    checkpoint = open_checkpoint("")
    assert checkpoint.path == EMBEDDED
    assert (checkpoint.name, checkpoint.family.model_type) == ("triptych-embedded", "qwen2_vl")


def test_a_hub_id_is_fetched_as_safetensors_only(checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(checkpoint_dir("llava"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("llava-hf/llava-1.5-7b-hf")
    assert (checkpoint.name, asked["repository"]) == ("llava-hf/llava-1.5-7b-hf",) * 2
    assert "*.safetensors" in asked["allow_patterns"] and not any("bin" in p or "pt" in p for p in asked["allow_patterns"])


def test_a_hub_that_is_out_of_reach_is_told_as_such() -> None:
    with pytest.raises(UnsupportedModel, match=r"nobody/nothing-here is not a local folder and could not be fetched"):
        open_checkpoint("nobody/nothing-here")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox' is not supported; supported are gemma2, gemma3"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention is not supported"),
        (
            {"model_type": "qwen3", "layer_types": ["chunked_attention"]},
            "chunked_attention is not supported",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        family_of(config)


@pytest.mark.parametrize(
    ("removed", "text"),
    [
        ("config.json", "holds no config.json"),
        ("*.safetensors", "holds no .safetensors"),
        ("tokenizer.json", "no tokenizer.json"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(removed: str, text: str, checkpoint_dir: Directory, tmp_path: Path) -> None:
    from services.models.layout import PromptLayout

    folder = shutil.copytree(checkpoint_dir("qwen2"), tmp_path / "copy")
    for file in folder.glob(removed):
        file.unlink()
    with pytest.raises(UnsupportedModel, match=text):
        PromptLayout(open_checkpoint(str(folder)))


def test_the_fingerprint_follows_content_not_place(checkpoint_dir: Directory, tmp_path: Path) -> None:
    original = open_checkpoint(str(checkpoint_dir("qwen2"))).fingerprint
    folder = shutil.copytree(checkpoint_dir("qwen2"), tmp_path / "copy")
    assert open_checkpoint(str(folder)).fingerprint == original
    weights = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert open_checkpoint(str(folder)).fingerprint != original


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.modalities))
def test_the_halves_are_the_whole_and_share_nothing(family: str, checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    whole = getattr(transformers, checkpoint.family.architecture).from_pretrained(checkpoint.path).state_dict()
    encoder, llm = (load_half(checkpoint, half, torch.float32, "cpu") for half in ("encoder", "llm"))
    for half in (encoder, llm):
        assert all(torch.equal(value, whole[name]) for name, value in half.state_dict().items())
    names = [{n for n, _ in half.named_parameters()} for half in (encoder, llm)]
    assert names[0] and names[1]
    both = names[0] & names[1]
    assert all(name.endswith("image_newline") for name in both)  # one row, which transformers initialises in either half
    parts = {v.data_ptr(): v for v in whole.values()}
    doubled = sum(whole[name].nbytes for name in both)
    buffers = {n for half in (encoder, llm) for n, _ in half.named_buffers()}
    assert parameter_bytes(encoder) + parameter_bytes(llm) - doubled == sum(
        v.nbytes for v in parts.values() if not any(whole[n] is v for n in buffers if n in whole)
    )


def test_an_omni_checkpoint_as_published_is_opened_at_its_thinker(checkpoint_dir: Directory, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain = checkpoint_dir("qwen2_5_omni_thinker")
    folder = shutil.copytree(plain, tmp_path / "omni")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": config}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {f"thinker.{name}": shard for name, shard in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in set(index["weight_map"].values()):
        save_file({f"thinker.{n}": t for n, t in load_file(folder / shard).items()}, folder / shard, metadata={"format": "pt"})
    for half in ("encoder", "llm"):
        nested, expected = (load_half(open_checkpoint(str(p)), half, torch.float32, "cpu").state_dict() for p in (folder, plain))
        assert nested.keys() == expected.keys() and all(torch.equal(nested[name], expected[name]) for name in expected)


def test_a_missing_weight_fails_the_load(checkpoint_dir: Directory, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_dir("qwen2"), tmp_path / "copy")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone = next(name for name in index["weight_map"] if "q_proj.weight" in name)
    from safetensors.torch import load_file, save_file

    shard = folder / index["weight_map"].pop(gone)
    tensors = load_file(shard)
    del tensors[gone]
    save_file(tensors, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weights of the llm half, the first is .*q_proj\.weight"):
        load_half(open_checkpoint(str(folder)), "llm", torch.float32, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_that_is_not_there_is_told_as_such() -> None:
    with pytest.raises(UnsupportedModel, match="--device cuda"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("stored", "device", "tiles", "chosen"),
    [
        ("float32", "cpu", True, torch.float32),
        ("bfloat16", "cpu", True, torch.bfloat16),
        ("bfloat16", "cpu", False, torch.float32),
        ("float16", "cpu", True, torch.float32),
        ("float16", "cuda:0", False, torch.float16),
    ],
)
def test_the_element_type_is_what_the_machine_does_well(
    stored: str, device: str, tiles: bool, chosen: torch.dtype, checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("llava")))
    monkeypatch.setitem(checkpoint.config, "dtype", stored)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": tiles})
    assert choose_dtype("auto", checkpoint, device) == chosen
    assert choose_dtype("float16", checkpoint, device) == torch.float16


def test_every_family_names_a_class_of_transformers() -> None:
    for family in FAMILIES.values():
        assert hasattr(transformers, family.architecture)
