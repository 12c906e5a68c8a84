"""``python -m services.encoder``: serve the encoder half of a checkpoint."""

from __future__ import annotations

import sys

from services.common.config import parse_config
from services.common.server import Service, serve
from services.encoder.config import EncoderConfig
from services.models.registry import UnsupportedModel

EXAMPLES = """examples:
  python -m services.encoder --port 7001
  python -m services.encoder --model /models/Qwen2-VL-2B-Instruct --device cuda --port 7001 --metrics-port 9101
"""


def main() -> None:
    config = parse_config(EncoderConfig, examples=EXAMPLES)
    try:
        serve("encoder", config, lambda: build(config))
    except UnsupportedModel as error:
        sys.exit(f"encoder: {error}")


def build(config: EncoderConfig) -> Service:
    from services.encoder.service import EncoderService  # imports torch, which --help and a mistyped flag need not wait for

    return EncoderService(config)


if __name__ == "__main__":
    main()
