"""Native parts of the towers: equal to what they replace, in one model alone, and only where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.encoder.native import activation, rotary
from services.encoder.native.activation import NativeActivation, replace_activations
from services.encoder.native.rotary import NativeRotary, replace_rotary
from services.encoder.towers import Towers
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.native import build
from services.native.build import Unavailable

MODELS = transformers.models
MODELING = {
    "qwen2_vl": MODELS.qwen2_vl.modeling_qwen2_vl,
    "qwen2_5_vl": MODELS.qwen2_5_vl.modeling_qwen2_5_vl,
    "qwen3_vl": MODELS.qwen3_vl.modeling_qwen3_vl,
    "qwen2_5_omni_thinker": MODELS.qwen2_5_omni.modeling_qwen2_5_omni,
}
QWEN = MODELING["qwen2_vl"]
TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        build.load_library(rotary._SOURCE)
    except Unavailable:
        pytest.skip("this machine has no C++ compiler")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (rotary, activation):
        monkeypatch.setattr(module, "load_library", build.load_library.__wrapped__)
    monkeypatch.setattr(rotary, "_forward", rotary._forward.__wrapped__)


def turned(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of which every number is different."""
    return torch.randn(rows, width), torch.randn(rows, width)


def seen(original: Callable[..., Any]) -> tuple[NativeRotary, list[tuple[int, ...]]]:
    """The native function over an original that notes the shapes it is called with."""
    calls: list[tuple[int, ...]] = []

    def noting(q: torch.Tensor, *rest: torch.Tensor) -> Any:
        calls.append(tuple(q.shape))
        return original(q, *rest)

    native = NativeRotary(noting)
    calls.clear()
    return native, calls


@pytest.mark.parametrize("family", MODELING)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, heads, width", [(0, 2, 16), (1, 1, 2), (7, 3, 8), (5, 4, 80), (300, 2, 72), (33, 16, 64)])
def test_rotation_is_that_of_the_family(family: str, dtype: torch.dtype, rows: int, heads: int, width: int) -> None:
    original = MODELING[family].apply_rotary_pos_emb_vision
    native, calls = seen(original)
    q, k, _ = torch.randn(rows, 3, heads, width).to(dtype).unbind(1)
    for cos, sin in (turned(rows, width), [factor.to(dtype) for factor in turned(rows, width)]):
        for got, want in zip(native(q, k, cos, sin), original(q, k, cos, sin), strict=True):
            torch.testing.assert_close(got, want, rtol=CLOSE[dtype], atol=1e-6)
    assert not calls


def test_rotation_of_several_threads_is_the_same() -> None:
    native, (cos, sin) = NativeRotary(QWEN.apply_rotary_pos_emb_vision), turned(900, 80)
    q, threads, made = torch.randn(900, 4, 80), torch.get_num_threads(), []
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            made.append(native(q, q, cos, sin)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q.half(), k.half(), cos, sin),
        lambda q, k, cos, sin: (q, k.double(), cos, sin),
        lambda q, k, cos, sin: (q.transpose(0, 2).contiguous().transpose(0, 2), k, cos, sin),
        lambda q, k, cos, sin: (q[None], k[None], cos, sin),
        lambda q, k, cos, sin: (q, k, cos[:1], sin[:1]),
        lambda q, k, cos, sin: (q.requires_grad_(), k, cos, sin),
    ],
    ids=["half", "double", "strided", "batched", "one angle", "gradient"],
)
def test_what_the_kernel_does_not_take_is_left_to_the_original(change: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    native, calls = seen(QWEN.apply_rotary_pos_emb_vision)
    inputs = change(torch.randn(6, 2, 16), torch.randn(6, 2, 16), *turned(6, 16))
    got, want = native(*inputs), QWEN.apply_rotary_pos_emb_vision(*inputs)
    assert len(calls) == 1 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_another_rotation_is_not_replaced() -> None:
    def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        def rotate(x: torch.Tensor) -> torch.Tensor:
            half = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
            return (x.float() * cos.unsqueeze(-2) + half.float() * sin.unsqueeze(-2)).to(x.dtype)

        return rotate(q), rotate(k)

    with pytest.raises(Unavailable, match="computes something else"):
        NativeRotary(interleaved)
    with pytest.raises(Unavailable, match="takes something else"):
        NativeRotary(lambda q, k, position: (q, k))


def towers() -> tuple[nn.ModuleList, nn.ModuleList]:
    """Two alike of one attention module."""
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        embed_dim=32, num_heads=2, attn_implementation="sdpa"
    )
    one, other = QWEN.VisionAttention(config).eval(), QWEN.VisionAttention(config).eval()
    other.load_state_dict(one.state_dict())
    return nn.ModuleList([one]), nn.ModuleList([other])


@torch.inference_mode()
def test_one_model_rotates_natively_and_the_next_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, stock = towers()
    original = QWEN.apply_rotary_pos_emb_vision
    assert replace_rotary(mine) == 1 and replace_rotary(mine) == 0
    assert QWEN.apply_rotary_pos_emb_vision is original
    x, (cos, sin), ends = torch.randn(12, 32), turned(12, 16), torch.tensor([0, 5, 12])
    want = stock[0](x, cu_seqlens=ends, position_embeddings=(cos, sin))
    torch.testing.assert_close(mine[0](x, cu_seqlens=ends, position_embeddings=(cos, sin)), want, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(QWEN, "apply_rotary_pos_emb_vision", lambda *_: pytest.fail("called"))
    mine[0](x, cu_seqlens=ends, position_embeddings=(cos, sin))
    with pytest.raises(pytest.fail.Exception):
        stock[0](x, cu_seqlens=ends, position_embeddings=(cos, sin))


ACT2FN = transformers.activations.ACT2FN
KNOWN = {"quick_gelu": ACT2FN["quick_gelu"], "gelu_tanh": ACT2FN["gelu_pytorch_tanh"], "torch_tanh": nn.GELU(approximate="tanh")}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", TYPES)
@torch.inference_mode()
def test_activations_are_the_same(name: str, dtype: torch.dtype) -> None:
    parent = nn.ModuleDict({"act": KNOWN[name]})
    assert replace_activations(parent, dtype) == 1 and replace_activations(parent, dtype) == 0
    native = parent["act"]
    assert isinstance(native, NativeActivation) and native.original is KNOWN[name]
    for shape in [(0,), (1,), (3, 5), (2, 17, 33), (40, 1025)]:
        x = (3 * torch.randn(shape)).to(dtype)
        torch.testing.assert_close(native(x), KNOWN[name](x), rtol=CLOSE[dtype], atol=1e-6)
    edges = torch.tensor([0.0, -0.0, 1e-30, -80, 80, 1e30, -1e4, torch.inf, torch.nan] * 3).to(dtype)
    torch.testing.assert_close(native(edges), KNOWN[name](edges), rtol=CLOSE[dtype], atol=1e-6, equal_nan=True)
    turned_around, wide = torch.randn(9, 20).to(dtype).T, torch.randn(9, 20).double()
    assert torch.equal(native(turned_around), KNOWN[name](turned_around)) and torch.equal(native(wide), KNOWN[name](wide))


class TwiceGELU(nn.Module):
    """Named like the others, computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * F.gelu(x, approximate="tanh")


def test_other_activations_stay() -> None:
    kept = nn.ModuleDict({"erf": nn.GELU(), "relu": nn.ReLU(), "twice": TwiceGELU(), "erf_too": ACT2FN["gelu"]})
    before = dict(kept.items())
    for dtype in (*TYPES, torch.float16):
        assert replace_activations(kept, dtype) == 0 and dict(kept.items()) == before
    watched = nn.ModuleDict({"act": nn.GELU(approximate="tanh")})
    watched["act"].register_forward_hook(lambda *_: None)
    assert replace_activations(watched, torch.float32) == 0


def test_without_a_compiler_nothing_is_replaced_and_the_log_says_why(no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    (mine, _), acts = towers(), nn.ModuleDict({"act": KNOWN["quick_gelu"]})
    with caplog.at_level(logging.WARNING):
        assert replace_rotary(mine) == 0 and "forward" not in vars(mine[0])
        assert replace_activations(acts, torch.float32) == 0 and acts["act"] is KNOWN["quick_gelu"]
    assert len(caplog.messages) == 2 and all("no C++ compiler" in message for message in caplog.messages)


REPLACED = {  # whether attention rotates natively, and the activations, in the checkpoints of the tests
    "qwen2_vl": (True, {"quick_gelu"}),
    "qwen2_5_vl": (True, set()),
    "qwen3_vl": (True, {"gelu_tanh"}),
    "llava": (False, {"quick_gelu"}),
    "gemma3": (False, {"gelu_tanh"}),
    "qwen2_audio": (False, set()),
}


@pytest.mark.parametrize("family", REPLACED)
def test_a_family_gets_what_it_has(family: str, checkpoint_dir: Callable[[str], Path]) -> None:
    model = Towers(open_checkpoint(str(checkpoint_dir(family))), "float32", "cpu").model
    rotates = any("forward" in vars(module) for module in model.modules())
    kinds = {module.kind for module in model.modules() if isinstance(module, NativeActivation)}
    assert (rotates, kinds) == REPLACED[family]
