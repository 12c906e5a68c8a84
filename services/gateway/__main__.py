"""Runs the gateway: ``python -m services.gateway``."""

from __future__ import annotations

from services.common.config import parse_config
from services.common.server import serve
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService
from services.models.registry import UnsupportedModel

EXAMPLES = """examples:
  python -m services.gateway --encoder 127.0.0.1:50051 --llm 127.0.0.1:50052
  python -m services.gateway --model ./llava-1.5-7b --encoder gpu1:50051,gpu2:50051 --llm gpu3:50052 --host 0.0.0.0
"""


def main() -> None:
    config = parse_config(GatewayConfig, examples=EXAMPLES)
    try:
        serve("gateway", config, lambda: GatewayService(config))
    except UnsupportedModel as error:
        raise SystemExit(f"--model: {error}") from error


if __name__ == "__main__":
    main()
