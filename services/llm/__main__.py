"""``python -m services.llm``: the language model service as a process."""

from __future__ import annotations

import sys

from services.common.config import parse_config
from services.common.niceness import stand_back
from services.common.server import serve
from services.llm.config import LlmConfig

NICE_ON_A_CPU = 5  # elsewhere whoever starts the accelerator's work must not wait
EXAMPLES = """examples:
  python -m services.llm --port 50052                                   the embedded model
  python -m services.llm --model ./Qwen2-VL-2B-Instruct --device cuda --port 50052
  TRIPTYCH_MAX_NUM_SEQS=16 python -m services.llm --model ./checkpoint  options are variables too"""


def main() -> None:
    config = parse_config(LlmConfig, examples=EXAMPLES)
    from services.llm.service import LlmService  # torch, which --help must not wait for
    from services.models.half import choose_device
    from services.models.registry import UnsupportedModel

    try:
        stand_back(config.nice if config.nice >= 0 else NICE_ON_A_CPU if choose_device(config.device) == "cpu" else 0)
        serve("llm", config, lambda: LlmService(config))
    except UnsupportedModel as error:
        sys.exit(f"services.llm: {error}")


if __name__ == "__main__":
    main()
