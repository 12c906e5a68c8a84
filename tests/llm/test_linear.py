"""Faster linear layers: equal to torch's, exact about what they replace, and absent where they cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.llm.native import large_pages, linear
from services.llm.native.linear import NativeLinear, speed_up
from services.models.half import parameter_bytes
from services.models.hf import transformers
from services.native import build

DTYPES = [torch.float32, torch.bfloat16]


def replace(plain: nn.Linear) -> NativeLinear:
    try:
        return NativeLinear(plain)
    except build.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=["rows", "tiles"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel multiplies bfloat16."""
    if request.param == "rows":
        monkeypatch.setattr(linear, "takes_tiles", lambda width, outs: False)
    elif not linear.takes_tiles(64, 64):
        pytest.skip("this CPU has no tiles, or the system does not lend them")
    return str(request.param)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 1e-5 if want.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1.0, float(want.abs().max())) if want.numel() else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("wide", "outs"), [(16, 1), (48, 7), (32, 48), (576, 192), (1536, 66), (1536, 80)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_equals_torch(dtype: torch.dtype, wide: int, outs: int, bias: bool) -> None:
    plain = nn.Linear(wide, outs, bias=bias, dtype=dtype)
    layer = replace(plain)
    for rows in (0, 1, 2, 3, 4, 5, 16, 33, 128, 129, 530):
        x = torch.randn(1, rows, wide).to(dtype)
        close(layer(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_takes_slices_of_other_tensors(dtype: torch.dtype) -> None:
    plain = nn.Linear(64, 32, dtype=dtype)
    layer = replace(plain)
    slices = torch.randn(2, 5, 100).to(dtype)[:, :, 20:84]
    across = torch.randn(64, 10).to(dtype).T
    close(layer(slices), plain(slices))
    close(layer(across), plain(across))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    layer = replace(nn.Linear(576, 112, dtype=dtype))
    x = torch.randn(128, 576).to(dtype)
    together = layer(x)
    for rows in (1, 2, 3, 5, 32):
        assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_two_threads_give_the_same(dtype: torch.dtype) -> None:
    layer = replace(nn.Linear(576, 1008, dtype=dtype))
    x = torch.randn(39, 576).to(dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_model_says_the_same_and_holds_no_weight_twice(dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tied, dtype)
    replace(model.lm_head)
    ids = torch.randint(320, (2, 9))
    before, bytes_before, embedding = model(ids).logits, parameter_bytes(model), model.get_input_embeddings().weight
    monkeypatch.setattr(linear, "_is_worth_it", lambda sample: True)
    layers = speed_up(model, model.model)
    after = model(ids).logits
    assert (after - before).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * before.abs().max()
    assert layers == {"NativeLinear": 2 * 7 + 1, "Linear": 0}
    assert type(model.get_output_embeddings()) is NativeLinear
    assert model.get_input_embeddings().weight is embedding
    assert parameter_bytes(model) == bytes_before
    assert (model.lm_head.weight is embedding) == tied


@torch.inference_mode()
def test_weights_lie_side_by_side_and_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_REGION", 200_000)
    parameters = [nn.Parameter(torch.randn(rows, 100)) for rows in (33, 64, 7, 1200, 5)]
    values = [parameter.detach().clone() for parameter in parameters]
    large_pages.lay_out(parameters)
    at = [parameter.data_ptr() for parameter in parameters]
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))
    assert at[0] % (2 << 20) == 0 and at[1] == at[0] + 13248 and at[2] == at[1] + 25600  # of 13200 and 25600 bytes
    assert at[3] % (2 << 20) == 0


class OtherLinear(nn.Linear):
    """Stands for a quantised or adapted layer."""


def test_leaves_other_kinds_of_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(False, torch.float32)
    attention = model.model.layers[0].self_attn
    attention.q_proj = OtherLinear(128, 128)
    attention.o_proj.register_forward_hook(lambda *_: None)
    tower = nn.Linear(128, 256)
    model.tower = tower
    replace(tower)
    monkeypatch.setattr(linear, "_is_worth_it", lambda sample: True)
    speed_up(model, model.model)
    assert type(attention.q_proj) is OtherLinear and type(attention.o_proj) is nn.Linear
    assert model.tower is tower
    assert type(attention.k_proj) is NativeLinear


@torch.inference_mode()
def test_chooses_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear(64, 512)
    replace(plain)
    seconds = {nn.Linear: 1.0, NativeLinear: 0.9}
    monkeypatch.setattr(linear, "_seconds", lambda layers, x: seconds[type(layers[0])])
    assert linear._is_worth_it([plain])
    seconds[NativeLinear] = 1.2
    assert not linear._is_worth_it([plain])


@torch.inference_mode()
def test_refuses_what_computes_something_else(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Linear(64, 512)
    replace(plain)
    monkeypatch.setattr(linear, "_seconds", lambda layers, x: 1.0 if type(layers[0]) is nn.Linear else 0.1)
    assert linear._is_worth_it([plain])
    monkeypatch.setattr(NativeLinear, "forward", lambda self, x: F.linear(x, self.weight))
    assert not linear._is_worth_it([plain])
    assert "gives other results" in caplog.text


@torch.inference_mode()
def test_without_a_compiler_layers_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear, "load_library", build.load_library.__wrapped__)
    with pytest.raises(build.Unavailable, match="no C"):
        NativeLinear(nn.Linear(64, 512))
    assert not linear._is_worth_it([nn.Linear(64, 512)])
