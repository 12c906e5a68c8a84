"""vLLM's OpenAI server for a block of code, run by the python of its own virtual environment."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.incumbents.client import Ended, ending

NAME = "m"
_READY_SECONDS = 600.0
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.contextmanager
def vllm_server(python: str, model: Path, dtype: str, threads: int, log: Path) -> Iterator[tuple[str, int]]:
    """Its address, which ends in ``/v1``, and its process id. The model is called :data:`NAME`.

    Eager, as compiling takes minutes; everything else is as vLLM has it by default, caches included.

    Args:
        python: of the virtual environment.
        model: what it loads.
        dtype: in which type.
        threads: of tensor work.
        log: where it writes to.

    Raises:
        Ended: it ended before it was ready; the text has the end of its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--served-model-name", NAME, "--enforce-eager"]
    words += ["--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 1, "video": 0}']
    environment = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as out:
        process = subprocess.Popen(
            [os.path.abspath(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve()), *words],
            stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=log.parent,
        )  # fmt: skip
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1", process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
            raise Ended("\n  ".join([ending(code), *log.read_text(errors="replace").splitlines()[-3:]]))
        if time.monotonic() > deadline:
            raise Ended(f"not ready after {_READY_SECONDS:.0f} s")
