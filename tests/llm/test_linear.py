"""Faster linear layers: equal to torch's, exact about what they replace, and absent where they cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.llm.native import linear
from services.llm.native.linear import NativeLinear, PackedLinear, speed_up
from services.models.half import parameter_bytes
from services.models.hf import transformers
from services.native import build

KINDS = [(NativeLinear, torch.float32), (PackedLinear, torch.float32), (PackedLinear, torch.bfloat16)]


def replace(kind: Any, plain: nn.Linear) -> nn.Module:
    try:
        return kind(plain)
    except build.Unavailable as reason:
        pytest.skip(str(reason))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 1e-5 if want.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1.0, float(want.abs().max())) if want.numel() else 0)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(("wide", "outs"), [(16, 1), (48, 7), (576, 192), (1536, 66)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_equals_torch(kind: Any, dtype: torch.dtype, wide: int, outs: int, bias: bool) -> None:
    plain = nn.Linear(wide, outs, bias=bias, dtype=dtype)
    layer = replace(kind, plain)
    for rows in (0, 1, 2, 3, 4, 5, 33, 128, 129):
        x = torch.randn(1, rows, wide).to(dtype)
        close(layer(x), plain(x))


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@torch.inference_mode()
def test_takes_slices_of_other_tensors(kind: Any, dtype: torch.dtype) -> None:
    plain = nn.Linear(64, 24, dtype=dtype)
    layer = replace(kind, plain)
    slices = torch.randn(2, 5, 100).to(dtype)[:, :, 20:84]
    across = torch.randn(64, 10).to(dtype).T
    close(layer(slices), plain(slices))
    close(layer(across), plain(across))


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    layer = replace(NativeLinear, nn.Linear(576, 100))
    x = torch.randn(128, 576)
    together = layer(x)
    for rows in (1, 2, 3, 5, 32):
        assert torch.equal(layer(x[:rows]), together[:rows])


@torch.inference_mode()
def test_two_threads_give_the_same() -> None:
    layer = replace(NativeLinear, nn.Linear(576, 1001))
    x = torch.randn(9, 576)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = layer(x)
        torch.set_num_threads(2)
        got = layer(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(got, want)


def make_model(tied: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        vocab_size=320,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_model_says_the_same_and_its_memory_adds_up(
    kind: Any, dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tied, dtype)
    replace(kind, model.lm_head)
    ids = torch.randint(320, (2, 9))
    before, bytes_before, embedding = model(ids).logits, parameter_bytes(model), model.get_input_embeddings().weight
    monkeypatch.setattr(linear, "_fastest", lambda sample: kind)
    replaced = speed_up(model, model.model)
    after = model(ids).logits
    assert (after - before).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * before.abs().max()
    assert replaced.layers == {kind.__name__: 2 * 7 + 1}
    assert type(model.get_output_embeddings()) is kind
    assert model.get_input_embeddings().weight is embedding
    assert model.get_output_embeddings().weight.shape == (320, 128)
    if kind is NativeLinear:
        assert replaced.added_bytes == 0 and parameter_bytes(model) == bytes_before
        assert (model.lm_head.weight is embedding) == tied
    else:
        assert replaced.added_bytes == (embedding.nbytes if tied else 0)
        assert not any(type(m) is nn.Linear for m in model.modules())


class OtherLinear(nn.Linear):
    """Stands for a quantised or adapted layer."""


def test_leaves_other_kinds_of_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(False, torch.float32)
    attention = model.model.layers[0].self_attn
    attention.q_proj = OtherLinear(128, 128)
    attention.o_proj.register_forward_hook(lambda *_: None)
    tower = nn.Linear(128, 256)
    model.tower = tower
    replace(NativeLinear, tower)
    monkeypatch.setattr(linear, "_fastest", lambda sample: NativeLinear)
    speed_up(model, model.model)
    assert type(attention.q_proj) is OtherLinear and type(attention.o_proj) is nn.Linear
    assert model.tower is tower
    assert type(attention.k_proj) is NativeLinear


@torch.inference_mode()
def test_chooses_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear(64, 512)
    replace(NativeLinear, plain)
    seconds = {nn.Linear: 1.0, NativeLinear: 0.9, PackedLinear: 0.8}
    monkeypatch.setattr(linear, "_seconds", lambda layers, x: seconds[type(layers[0])])
    assert linear._fastest([plain]) is PackedLinear
    seconds[NativeLinear] = 0.5
    assert linear._fastest([plain]) is NativeLinear
    seconds.update({NativeLinear: 1.0, PackedLinear: 1.1})
    assert linear._fastest([plain]) is None


@torch.inference_mode()
def test_refuses_what_computes_something_else(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Linear(64, 512)
    replace(NativeLinear, plain)
    monkeypatch.setattr(linear, "_KINDS", (NativeLinear,))
    monkeypatch.setattr(linear, "_seconds", lambda layers, x: 1.0 if type(layers[0]) is nn.Linear else 0.1)
    assert linear._fastest([plain]) is NativeLinear
    monkeypatch.setattr(NativeLinear, "forward", lambda self, x: F.linear(x, self.weight))
    assert linear._fastest([plain]) is None
    assert "NativeLinear gives other results" in caplog.text


def _missing(*_: Any) -> None:
    raise RuntimeError("operator does not exist")


@torch.inference_mode()
def test_without_a_compiler_or_packing_layers_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear, "load_library", build.load_library.__wrapped__)
    with pytest.raises(build.Unavailable, match="no C"):
        NativeLinear(nn.Linear(64, 512))
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", _missing, raising=False)
    with pytest.raises(build.Unavailable, match="cannot pack"):
        PackedLinear(nn.Linear(64, 512))
    assert linear._fastest([nn.Linear(64, 512)]) is None
