"""llama.cpp's server inside a process (xllamacpp). Started with the python of its own virtual environment.

python -m bench.incumbents.llama_cpp MODEL.gguf REQUESTS_AT_A_TIME [PROJECTOR.gguf]
"""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    model, most = sys.argv[1:3]
    import xllamacpp

    from bench.incumbents.answering import serve_loads
    from bench.load import Ask

    params = xllamacpp.CommonParams()
    params.model.path = model
    if len(sys.argv) > 3:
        params.mmproj.path = sys.argv[3]
    params.n_parallel = int(most)
    params.image_max_tokens = 256  # the limit that the checkpoint sets, which a GGUF does not carry
    params.n_ctx, params.n_batch, params.n_ubatch = params.n_parallel * 512, 2048, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    common = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def one(ask: Ask) -> int:
        if not ask.image:
            body = {"prompt": ask.prompt, "n_predict": ask.new_tokens, **common}
            answer: dict[str, Any] = server.handle_completions(body)
        else:
            url = "data:image/jpeg;base64," + base64.b64encode(Path(ask.image).read_bytes()).decode()
            words = ask.text.partition("<|vision_end|>")[2].partition("<|im_end|>")[0]
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": ask.new_tokens, **common}
            answer = server.handle_chat_completions(body)
        return int(answer["usage"]["completion_tokens"])

    def answer(asks: Sequence[Ask]) -> list[int]:
        made = [0] * len(asks)

        def run(i: int) -> None:
            made[i] = one(asks[i])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    serve_loads(answer)


if __name__ == "__main__":
    main()
