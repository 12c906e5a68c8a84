"""OpenVINO GenAI's continuous batching. Started with the python of its own virtual environment.

    python -m bench.incumbents.openvino EXPORTED_MODEL {f32,bf16} REQUESTS_AT_A_TIME

``make bench-incumbents`` exports the models; the weights are stored as float16, the hint says what is computed in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def main() -> None:
    model, hint, most = sys.argv[1:]
    import numpy as np
    import openvino
    import openvino_genai

    from bench.incumbents.answering import serve_loads
    from bench.load import Ask

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, int(most), 4096
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def choice(ask: Ask) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = ask.new_tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return config

    def answer(asks: Sequence[Ask]) -> list[int]:
        choices = [choice(ask) for ask in asks]
        if asks[0].image:
            from PIL import Image

            pictures = [[openvino.Tensor(np.array(Image.open(ask.image).convert("RGB"))[None])] for ask in asks]
            texts = [ask.text.replace("<|vision_start|><|image_pad|><|vision_end|>", "<ov_genai_image_0>") for ask in asks]
            results = pipeline.generate(texts, images=pictures, generation_config=choices)
            total = results[0].perf_metrics.get_num_generated_tokens()  # of all of them
            return [total // len(asks)] * len(asks)
        prompts = [openvino.Tensor(np.array([ask.prompt], np.int64)) for ask in asks]
        return [len(one.m_generation_ids[0]) for one in pipeline.generate(prompts, choices)]

    serve_loads(answer)


if __name__ == "__main__":
    main()
