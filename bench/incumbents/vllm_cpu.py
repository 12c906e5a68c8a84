"""vLLM's CPU build on a load file. Started by ``bench.engine`` with the python of its own virtual environment.

    python -m bench.incumbents.vllm_cpu MODEL DTYPE LOAD.json

Runs the load, eight requests at a time, for each line on standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process, so that its CPU time is all of it
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def main() -> None:
    model, dtype, path = sys.argv[1:]
    from vllm import LLM, SamplingParams

    from bench.load import read_load

    asks = read_load(Path(path))
    engine = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    choices = [SamplingParams(temperature=0, max_tokens=a.new_tokens, ignore_eos=True, detokenize=False) for a in asks]
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        answers = engine.generate(prompts, choices, use_tqdm=False)
        cost = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        made = [len(answer.outputs[0].token_ids) for answer in answers]
        assert made == [ask.new_tokens for ask in asks], "it generated another number of tokens than it was asked for"
        print(json.dumps(cost), flush=True)


if __name__ == "__main__":
    main()
