"""Options of the language model service."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.common.config import ServiceConfig, option


@dataclass(frozen=True)
class Pruning:
    """Layers from ``layer`` on keep only a share of the visual tokens; ``keep`` is the share when a request asks for none."""

    layer: int
    keep: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Pruning | None:
        """``fastv:K=2`` or ``fastv:K=2,keep=0.5``; "" is None.

        Raises:
            ValueError: anything else, with a text that says what is expected.
        """
        if not text:
            return None
        method, _, rest = text.partition(":")
        pairs = [part.partition("=")[::2] for part in rest.split(",")]
        values = dict(pairs)
        if method != "fastv" or "K" not in values or len(values) < len(pairs) or not values.keys() <= {"K", "keep"}:
            raise ValueError(f"--visual-token-pruning must read fastv:K=2 or fastv:K=2,keep=0.5, got {text!r}")
        layer, keep = values["K"], values.get("keep", "1")
        if not re.fullmatch("[0-9]{1,6}", layer) or int(layer) < 1:
            raise ValueError(f"--visual-token-pruning: K must be a layer from 1 on, got {layer!r}")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", keep) or not 0 < float(keep) <= 1:
            raise ValueError(f"--visual-token-pruning: keep must be above 0 and at most 1, got {keep!r}")
        return cls(int(layer), float(keep))

    def share(self, asked: float | None) -> float:
        """The share that a request gets."""
        return self.keep if asked is None else asked


@dataclass(frozen=True)
class LlmConfig(ServiceConfig):
    """Serves the language-model half of a checkpoint over gRPC (triptych.llm.v1.LlmService)."""

    model: str = option("", "checkpoint folder or hub id; without it, the embedded model")
    dtype: str = option("auto", "type of weights and KV cache", ["auto", "float32", "bfloat16", "float16"])
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int = option(0, "CPU threads for tensor work; 0 leaves it to torch", least=0)
    nice: int = option(
        -1,
        "how far the process stands back behind others on its cores: beside an encoder, pictures come first and steps have more "
        "sequences; 0 where the time between tokens matters more, -1 takes 5 on a CPU and 0 elsewhere",
        least=-1,
        most=19,
    )
    max_model_len: int = option(0, "most tokens of prompt and answer together; 0 takes the checkpoint's", least=0)
    block_size: int = option(
        0,
        "tokens in a KV block; 0 takes 16, or on CUDA in 16 bits 256: torch's paged kernel takes multiples of that alone",
        least=0,
    )
    kv_cache_memory_bytes: int = option(1 << 30, "size of the KV pool on a CPU, an upper bound on CUDA", least=1)
    gpu_memory_utilization: float = option(0.9, "share of the device's memory that weights and KV pool may take", above=0, most=1)
    max_num_batched_tokens: int = option(2048, "most tokens computed in a step", least=1)
    max_num_seqs: int = option(64, "most sequences in a step", least=1)
    attention_backend: str = option(
        "auto",
        "who computes attention: cuda is torch's paged kernel with the gathered path for what it does not take (soft caps, "
        "masks of a prompt's own, cross-attention, float32), native is our kernel for CPUs, gathered runs anywhere, naive is "
        "slow and easy to read",
        ["auto", "naive", "gathered", "native", "cuda"],
    )
    native_layers: bool = option(True, "on a CPU, run decoder layers by our own kernels where they are faster")
    enforce_eager: bool = option(
        False, "never replay decoding steps as CUDA graphs; without it, models whose every layer runs in torch's paged kernel do"
    )
    long_prefill_token_threshold: int = option(0, "most tokens a step takes of one prompt; 0 sets no bound", least=0)
    decode_stretch: float = option(
        0.0,
        "a step beside decoding sequences takes only as many prompt tokens as make it so many times longer, such as 1.25, which "
        "keeps answers flowing while long prompts and pictures come; 0 sets no bound, which answers most in all",
    )
    enable_prefix_caching: bool = option(True, "reuse the keys and values of prompts that start alike")
    visual_token_pruning: str = option(
        "", "drop the visual tokens that get least attention from layer K on: fastv:K=2 where asked, fastv:K=2,keep=0.5 always"
    )
    watchdog_seconds: float = option(300.0, "a step that takes longer makes liveness fail; 0 turns that off", least=0)
    max_requests: int = option(1024, "most requests held at once, running or waiting; more are refused until one ends", least=1)
    seed: int = option(0, "seed for requests that bring none; 0 draws one for each")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode_stretch and not self.decode_stretch > 1:
            raise ValueError(f"--decode-stretch must be above 1, or 0 for no bound, got {self.decode_stretch}")
        Pruning.parse(self.visual_token_pruning)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "--max-num-batched-tokens must be at least --max-num-seqs, so that every sequence can decode in a step"
            )

    @property
    def pruning(self) -> Pruning | None:
        """``visual_token_pruning``, read."""
        return Pruning.parse(self.visual_token_pruning)
