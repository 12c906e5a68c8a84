"""Replaces a decoder's layers, at load, by ones with four matrix products instead of seven and native calls between them.

Knows no model family: a layer is replaced when it is built of the parts that Llama's layers have and the new one hands
attention the same queries, keys and values and returns the same numbers. Every other layer stays.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from services.llm.attention import hook
from services.llm.native.norm import NativeNorm, stand_in
from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("layer_kernel.cpp")
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LANES = 16  # numbers that the kernel handles at once: widths must be multiples
_MOST_HEAD_DIM = 512
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest number
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class _Norm(ctypes.Structure):
    _fields_ = (("weights", ctypes.c_void_p), ("epsilon", ctypes.c_float), ("add_one", ctypes.c_int32))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "heads", "kv_heads", "head_dim", "inner")),
        *((name, _Norm) for name in ("before", "after", "query", "key")),
        ("activation", ctypes.c_int32),
    )


class NativeLayer(nn.Module):
    """A decoder layer for packed rows, made from the parts of another, which it leaves as they are.

    Its linear layers are exact ``nn.Linear`` and may be replaced; its norms must stay where they are.

    Args:
        layer: the original.
        scaling: what it tells attention, as ``window`` and ``softcap``.

    Raises:
        Unavailable: the original is of other parts, or the kernel cannot be built or does not take them.
    """

    def __init__(self, layer: nn.Module, scaling: float, window: int | None, softcap: float | None) -> None:
        super().__init__()
        if not _has_shape(layer):
            raise Unavailable("the layer is built of other parts")
        attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
        query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.qkv_proj = _joined(query, key, value)
        self.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
        self.before, self.after = _native(_part(layer, "input_layernorm")), _native(_part(layer, "post_attention_layernorm"))
        self.query = _native(attention.q_norm) if "q_norm" in attention._modules else None
        self.key = _native(attention.k_norm) if "k_norm" in attention._modules else None
        dtype, width, inner, head_dim = query.weight.dtype, query.in_features, mlp.down_proj.in_features, attention.head_dim
        self._layer = _Layer(
            width, query.out_features // head_dim, key.out_features // head_dim, head_dim, inner,
            *(_norm(norm) for norm in (self.before, self.after, self.query, self.key)), _activation(mlp.act_fn, dtype),
        )  # fmt: skip
        widths = (width, inner, head_dim)
        fit = [(self.before, width), (self.after, width), (self.query, head_dim), (self.key, head_dim)]
        if any(n % _LANES for n in widths) or head_dim > _MOST_HEAD_DIM or any(n and len(n.weight) != w for n, w in fit):
            raise Unavailable(f"the kernel does not take widths {widths}")
        library, suffix = load_library(_SOURCE), _SUFFIXES[dtype]
        pointer, count, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

        def function(name: str, *arguments: Any) -> Any:
            found = getattr(library, f"triptych_layer_{name}_{suffix}")
            found.argtypes, found.restype = (pointer, *arguments, count, threads), None
            return found

        self._norm = function("norm", pointer, pointer)
        self._rotate = function("rotate", pointer, pointer, pointer, count)
        self._add_norm = function("add_norm", pointer, pointer, pointer)
        self._gate = function("gate", pointer, pointer)
        self._add = function("add", pointer, pointer)
        self._address = ctypes.addressof(self._layer)
        self._attention = (attention,)  # names the layer to the step; not a child: its products are no longer called
        self._sizes = (self._layer.heads, self._layer.kv_heads, self._layer.kv_heads)
        self._head_dim, self._inner = head_dim, inner
        self._scores = (scaling, window, softcap)

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """``hidden_states`` ``[1, rows, width]`` to the same; ``position_embeddings`` are cos and sin, ``[1, rows, head_dim]``.

        A mask or cache among the other arguments says nothing here: attention is that of :data:`hook.current`.
        """
        step = hook.current.get()
        assert step is not None and len(hidden_states) == 1, "the layer runs packed rows within a step"
        residual = hidden_states[0].contiguous()
        cos, sin = position_embeddings
        assert cos.dtype == sin.dtype == residual.dtype
        if cos.stride() != sin.stride() or cos.stride(-1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        rows, threads, modules, layer = len(residual), torch.get_num_threads(), self._modules, self._address
        source = residual.data_ptr()
        normed = torch.empty_like(residual)
        self._norm(layer, source, normed.data_ptr(), rows, threads)
        qkv = modules["qkv_proj"].forward(normed)  # type: ignore[union-attr]
        self._rotate(layer, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.stride(-2), rows, threads)
        query, key, value = qkv.view(rows, -1, self._head_dim).transpose(0, 1).split(self._sizes)
        attended = step.attend(self._attention[0], query, key, value, *self._scores)
        middle = modules["o_proj"].forward(attended.reshape(rows, -1))  # type: ignore[union-attr]
        self._add_norm(layer, source, middle.data_ptr(), normed.data_ptr(), rows, threads)
        gate_up = modules["gate_up_proj"].forward(normed)  # type: ignore[union-attr]
        gated = torch.empty(rows, self._inner, dtype=residual.dtype)
        self._gate(layer, gate_up.data_ptr(), gated.data_ptr(), rows, threads)
        out = modules["down_proj"].forward(gated)  # type: ignore[union-attr]
        self._add(layer, middle.data_ptr(), out.data_ptr(), rows, threads)
        return out[None]  # type: ignore[no-any-return]

    def detach_original(self) -> None:
        """Take the original attention apart, so that the weights that were joined are held once."""
        for name in list(self._attention[0]._modules):
            delattr(self._attention[0], name)


@torch.no_grad()
def replace_decoder_layers(decoder: nn.Module) -> int:
    """Replace, in place, the layers that a native one can stand in for; returns how many.

    Attention of the decoder must be ours already (``hook.NAME``).
    """
    replaced = 0
    for parent in [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]:
        for name, layer in list(parent.named_children()):
            native = _stand_in(layer)
            if native is not None:
                native.detach_original()
                setattr(parent, name, native)
                del layer  # one layer's weights are held twice at most
                replaced += 1
    logger.info("%d decoder layers run natively", replaced)
    return replaced


class _Seen:
    """Stands in for a step: plain causal attention, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.scores: tuple[float, int | None, float | None] = (0.0, None, None)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        assert not self.tensors, "a layer attends once"
        self.tensors, self.scores = (query.clone(), key.clone(), value.clone()), (scaling, window, softcap)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(0, 1).contiguous()


def _stand_in(layer: nn.Module) -> NativeLayer | None:
    """The native layer with a layer's results; None where there is none."""
    if not _has_shape(layer):
        return None
    attention = _part(layer, "self_attn")
    query, dtype = attention.q_proj, attention.q_proj.weight.dtype
    # positions far beyond a context, should their size matter elsewhere than in the angles
    positions = torch.tensor([[0, 1, 77, 4001, 300_000]])
    x = torch.randn(1, positions.shape[1], query.in_features).to(dtype)
    angles = (torch.rand(1, positions.shape[1], attention.head_dim // 2) * 6.2832).repeat(1, 1, 2)
    arguments = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": (angles.cos().to(dtype), angles.sin().to(dtype)),
        "use_cache": False,
    }
    try:
        want, seen = _call(layer, x, arguments)
        if len(seen.tensors) != 3:
            raise Unavailable("it does not attend through a step")
        native = NativeLayer(layer, *seen.scores)
        got, seen_too = _call(native, x, arguments)
    except Unavailable as reason:
        logger.debug("%s stays: %s", type(layer).__name__, reason)
        return None
    if _equal(want, got) and all(map(_equal, seen.tensors, seen_too.tensors)):
        return native
    logger.debug("%s stays: it computes something else", type(layer).__name__)
    return None


def _call(layer: nn.Module, x: torch.Tensor, arguments: dict[str, Any]) -> tuple[torch.Tensor, _Seen]:
    seen = _Seen()
    token = hook.current.set(seen)
    try:
        return layer(x, **arguments), seen
    finally:
        hook.current.reset(token)


def _equal(want: Any, got: torch.Tensor) -> bool:
    if not isinstance(want, torch.Tensor) or want.dtype != got.dtype or want.shape != got.shape:
        return False
    return torch.allclose(want, got, rtol=0, atol=_TOLERANCE[want.dtype] * float(want.abs().max()))


def _has_shape(layer: nn.Module) -> bool:
    """Whether a layer has the parts of Llama's, no others, and nobody watches them."""
    if layer._modules.keys() != _PARTS:
        return False
    attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
    names = attention._modules.keys()
    if names not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS) or mlp._modules.keys() != _MLP_PARTS:
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return False
    if any(module._parameters or module._buffers for module in (layer, attention, mlp)):
        return False
    linears = [_part(attention, name) for name in _ATTENTION_PARTS] + [_part(mlp, name) for name in _MLP_PARTS - {"act_fn"}]
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    weights = [linear.weight for linear in linears]
    head_dim = getattr(attention, "head_dim", 0)
    return (
        isinstance(head_dim, int)
        and head_dim > 0
        and not any(linear.out_features % head_dim for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
        and attention.k_proj.out_features == attention.v_proj.out_features
        and weights[0].dtype in _SUFFIXES
        and all(weight.dtype == weights[0].dtype and weight.device.type == "cpu" for weight in weights)
    )


def _part(module: nn.Module, name: str) -> Any:
    return module._modules[name]


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer whose results are those of several, side by side."""
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise Unavailable("some products have a bias, others have none")
    outs = sum(linear.out_features for linear in linears)
    joined = nn.Linear(linears[0].in_features, outs, bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined.eval()


def _native(norm: nn.Module) -> NativeNorm:
    found = stand_in(norm)
    if found is None:
        raise Unavailable("it has another kind of norm")
    return found


def _norm(norm: NativeNorm | None) -> _Norm:
    return _Norm(None, 0.0, 0) if norm is None else _Norm(norm.weight.data_ptr(), norm.epsilon, norm.add_one)


def _activation(function: Any, dtype: torch.dtype) -> int:
    """The kernel's number for a gate's function."""
    x = torch.linspace(-8, 8, 33).to(dtype)
    for number, known in enumerate((F.silu(x), F.gelu(x, approximate="tanh"))):
        if torch.equal(function(x), known):
            return number
    raise Unavailable("it has another activation")
