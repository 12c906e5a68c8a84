"""Loads one half of a checkpoint: the towers and projector, or the language model. The other half is never allocated.

transformers builds a model without memory for its weights, then fills in what the files hold. A subclass that drops the
other half's submodules right after construction therefore never holds them. The subclass must keep the original's name
and module, because key conversion for older checkpoints is looked up by both and skipped for "custom" classes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from services.models.checkpoint import Checkpoint
from services.models.hf import transformers
from services.models.registry import Family, UnsupportedModel

Half = Literal["encoder", "llm"]


def load_half(checkpoint: Checkpoint, half: Half, dtype: torch.dtype, device: str) -> Any:
    """The model with only one half in it, in eval mode.

    Raises:
        UnsupportedModel: a weight is missing, or the class cannot run with our attention.
    """
    original = getattr(transformers, checkpoint.family.architecture)
    model, info = half_class(original, checkpoint.family, half).from_pretrained(
        checkpoint.path, dtype=dtype, use_safetensors=True,
        local_files_only=True, output_loading_info=True,
    )  # fmt: skip
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedModel(f"{checkpoint.path} lacks {len(missing)} weights of the {half} half, the first is {missing[0]}")
    return model.eval().to(device)


def half_class(original: type, family: Family, half: Half) -> Any:
    """A subclass of ``original`` whose instances own one half."""

    class HalfModel(original):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = [".*"]  # noqa: RUF012

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if half == "encoder":
                _drop(self.base_model, (family.decoder, *family.language))
                _drop(self, ("lm_head",))
                self._tied_weights_keys = self.base_model._tied_weights_keys = None
                self.all_tied_weights_keys: dict[str, str] = {}
            else:
                _drop(self.base_model, family.towers)

        if half == "encoder":

            def get_input_embeddings(self) -> None:
                return None

            def get_output_embeddings(self) -> None:
                return None

            def tie_weights(self, *args: Any, **kwargs: Any) -> None:
                return None

    HalfModel.__name__, HalfModel.__qualname__, HalfModel.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )
    return HalfModel


def _drop(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if name in module._modules:
            module._modules[name] = None


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of parameters held, tied ones counted once."""
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())


def choose_dtype(name: str, checkpoint: Checkpoint, device: str) -> torch.dtype:
    """``auto``: the checkpoint's own type on an accelerator and, if it is bfloat16, on a CPU that multiplies tiles of it (AMX).

    On other CPUs float32, which is exact and seldom slower.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
    tiles = stored == "bfloat16" and torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.float32 if device == "cpu" and not tiles else getattr(torch, stored)


def choose_device(name: str) -> str:
    """``auto``: the first CUDA device if there is one.

    Raises:
        UnsupportedModel: CUDA was asked for and is not there.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedModel("--device cuda: this machine or this build of torch has no CUDA; use --device cpu")
    return "cuda:0" if name == "cuda" else name
