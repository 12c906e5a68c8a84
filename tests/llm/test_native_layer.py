"""Decoder layers in native code: equal to each family's own, exact about what they replace, and no heavier."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.llm.attention import hook
from services.llm.native import layer as layers
from services.llm.native import linear
from services.llm.native.layer import NativeLayer, replace_decoder_layers
from services.llm.native.linear import speed_up
from services.models.half import parameter_bytes
from services.models.hf import transformers
from services.native import build

models = transformers.models
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (models.llama.modeling_llama.LlamaDecoderLayer, models.llama.LlamaConfig, {}),
    "llama with biases": (
        models.llama.modeling_llama.LlamaDecoderLayer, models.llama.LlamaConfig, {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": (models.mistral.modeling_mistral.MistralDecoderLayer, models.mistral.MistralConfig, {"sliding_window": 3}),
    "qwen2": (models.qwen2.modeling_qwen2.Qwen2DecoderLayer, models.qwen2.Qwen2Config, {}),
    "qwen2_vl": (
        models.qwen2_vl.modeling_qwen2_vl.Qwen2VLDecoderLayer, models.qwen2_vl.configuration_qwen2_vl.Qwen2VLTextConfig, {},
    ),
    "qwen2_5_vl": (
        models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLDecoderLayer,
        models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig,
        {},
    ),
    "qwen3": (models.qwen3.modeling_qwen3.Qwen3DecoderLayer, models.qwen3.Qwen3Config, {}),
    "qwen3_vl": (
        models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer,
        models.qwen3_vl.configuration_qwen3_vl.Qwen3VLTextConfig,
        {},
    ),
    "mllama": (
        models.mllama.modeling_mllama.MllamaSelfAttentionDecoderLayer,
        models.mllama.configuration_mllama.MllamaTextConfig,
        {"num_hidden_layers": 4, "cross_attention_layers": [3]},
    ),
    "gemma": (
        models.gemma.modeling_gemma.GemmaDecoderLayer, models.gemma.GemmaConfig, {"hidden_act": "gelu_pytorch_tanh"},
    ),
}  # fmt: skip


class Step:
    """Stands for a step: causal attention, or none between rows, and what each layer brought."""

    def __init__(self, mix: bool = True) -> None:
        self.seen: list[Any] = []
        self._mix = mix

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scores: Any) -> torch.Tensor:
        self.seen.append((module.layer_idx, query.clone(), key.clone(), value.clone(), scores))
        if not self._mix:
            return (query + (key + value).repeat_interleave(len(query) // len(key), 0)).transpose(0, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores[0], enable_gqa=True)
        return out.transpose(0, 1).contiguous()


def call(layer: nn.Module, x: torch.Tensor, head_dim: int, step: Step) -> torch.Tensor:
    """With rotary factors that are cut from longer rows."""
    angles = torch.arange(x.shape[1])[None, :, None] * torch.logspace(0, -3, head_dim // 2)
    cos, sin = (F.pad(torch.cat([f, f], dim=-1), (0, 5)).to(x.dtype)[..., :head_dim] for f in (angles.cos(), angles.sin()))
    token = hook.current.set(step)
    try:
        return layer(  # type: ignore[no-any-return]
            x, attention_mask=None, position_ids=torch.arange(x.shape[1])[None], position_embeddings=(cos, sin), use_cache=False
        )
    finally:
        hook.current.reset(token)


def make(kind: str, dtype: torch.dtype, head_dim: int = 16, width: int = 64, **changes: Any) -> nn.Module:
    """A decoder of one layer with weights that count."""
    torch.manual_seed(7)
    layer_class, config_class, options = KINDS[kind]
    heads = width // head_dim
    config = config_class(**{
        "hidden_size": width, "intermediate_size": 96, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": head_dim, "num_hidden_layers": 2, "vocab_size": 32, "pad_token_id": 0, **options, **changes,
    })  # fmt: skip
    config._attn_implementation = hook.NAME
    layer = layer_class(config, 1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, width**-0.5)
    return nn.ModuleDict({"layers": nn.ModuleList([layer.eval().to(dtype)])})


def inner(decoder: nn.Module) -> Any:
    return decoder["layers"][0]  # type: ignore[index]


def replaced(decoder: nn.Module) -> NativeLayer:
    try:
        build.load_library(layers._SOURCE)
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    assert replace_decoder_layers(decoder) == 1
    assert type(inner(decoder)) is NativeLayer
    return inner(decoder)  # type: ignore[no-any-return]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 3e-6 if want.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "width"), [(16, 64), (80, 320)])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_equals_the_familys_own(kind: str, head_dim: int, width: int, dtype: torch.dtype) -> None:
    decoder = make(kind, dtype, head_dim, width)
    inputs = [torch.randn(1, rows, width).to(dtype) for rows in (1, 7, 300)]
    own, ours = Step(), Step()
    want = [call(inner(decoder), x, head_dim, own) for x in inputs]
    native = replaced(decoder)
    kept = [x.clone() for x in inputs]
    got = [call(native, x, head_dim, ours) for x in inputs]
    assert all(map(torch.equal, inputs, kept))
    for w, g in zip(want, got, strict=True):
        close(g, w)
    for (index, *tensors, scores), (index_too, *tensors_too, scores_too) in zip(own.seen, ours.seen, strict=True):
        assert index == index_too == 1 and scores == scores_too
        for w, g in zip(tensors, tensors_too, strict=True):
            close(g, w)


@torch.inference_mode()
def test_what_is_not_a_number_stays_within_its_row() -> None:
    native = replaced(make("qwen3", torch.float32))
    x = torch.randn(1, 5, 64)
    x[0, 2, 9] = torch.nan
    assert torch.isnan(call(native, x, 16, Step(mix=False))[0]).all(1).tolist() == [False, False, True, False, False]


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others_nor_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make("qwen3", torch.float32, 32, 256)
    native = replaced(decoder)
    model = nn.Module()
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    monkeypatch.setattr(linear, "_is_worth_it", lambda sample: True)
    assert speed_up(model, decoder) == {"NativeLinear": 4, "Linear": 0}
    x, threads = torch.randn(1, 128, 256), torch.get_num_threads()
    assert x.numel() >= 1 << 15  # the kernel's own bound for using threads
    try:
        torch.set_num_threads(1)
        together = call(native, x, 32, Step(mix=False))
        torch.set_num_threads(2)
        assert torch.equal(call(native, x, 32, Step(mix=False)), together)
    finally:
        torch.set_num_threads(threads)
    for rows in (1, 2, 5, 33):
        assert torch.equal(call(native, x[:, :rows], 32, Step(mix=False)), together[:, :rows])


@pytest.mark.parametrize("kind", ["llama with biases", "qwen3"])
def test_weights_are_held_once(kind: str) -> None:
    decoder = make(kind, torch.float32)
    before, weight = parameter_bytes(decoder), weakref.ref(inner(decoder).self_attn.q_proj.weight)
    replaced(decoder)
    assert parameter_bytes(decoder) == before and weight() is None


@torch.inference_mode()
def test_rows_leave_before_it_where_a_hook_takes_them() -> None:
    decoder = make("llama", torch.float32)
    native = replaced(decoder)
    x = torch.randn(1, 9, 64)
    want = call(native, x[:, :4], 16, Step())

    def shorten(_module: Any, args: Any, arguments: dict[str, Any]) -> Any:
        factors = tuple(f[..., :4, :] for f in arguments["position_embeddings"])
        return (args[0][:, :4], *args[1:]), arguments | {"position_embeddings": factors}

    native.register_forward_pre_hook(shorten, with_kwargs=True)
    assert torch.equal(call(native, x, 16, Step()), want)


class OtherLinear(nn.Linear):
    """Stands for a quantised or adapted layer."""


class Halved(nn.Module):
    """Built of Llama's parts, computes something else: adds half."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        own = KINDS["llama"][0].forward(self, hidden_states, **arguments)
        return hidden_states + (own - hidden_states) / 2  # type: ignore[no-any-return]


def _odd_product(layer: Any) -> None:
    layer.self_attn.k_proj = OtherLinear(64, 32, bias=False)


def _one_bias(layer: Any) -> None:
    layer.self_attn.k_proj = nn.Linear(64, 32)


def _watch(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda *_: None)


def _more_parts(layer: Any) -> None:
    layer.gain = nn.Parameter(torch.ones(1))


def _other_results(layer: Any) -> None:
    layer.__class__ = Halved
    layer.gradient_checkpointing = False


def _other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.ReLU()


def _not_through_a_step(layer: Any) -> None:
    layer.self_attn.config._attn_implementation = "sdpa"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_odd_product, ""),
        (_watch, ""),
        (_more_parts, ""),
        (_one_bias, "some products have a bias"),
        (_other_results, "computes something else"),
        (_other_activation, "another activation"),
        (_not_through_a_step, "does not attend through a step"),
    ],
)
def test_leaves_others_alone(change: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    decoder = make("llama", torch.float32)
    layer = inner(decoder)
    change(layer)
    before = [(name, id(p)) for name, p in decoder.named_parameters()]
    with caplog.at_level("DEBUG", logger=layers.__name__):
        assert replace_decoder_layers(decoder) == 0 and inner(decoder) is layer
    assert (reason or "0 decoder layers") in caplog.text
    assert [(name, id(p)) for name, p in decoder.named_parameters()] == before


@pytest.mark.parametrize(("dtype", "changes"), [(torch.float16, {}), (torch.float32, {"intermediate_size": 100})])
def test_leaves_types_and_widths_that_the_kernel_lacks(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    decoder = make("llama", dtype, **changes)
    layer = inner(decoder)
    assert replace_decoder_layers(decoder) == 0 and inner(decoder) is layer


def test_without_a_compiler_layers_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layers, "load_library", build.load_library.__wrapped__)
    assert replace_decoder_layers(make("llama", torch.float32)) == 0
