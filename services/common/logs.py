"""Structured logs: one JSON object a line on stderr, with the request id. Never prompt text, media or answers."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Any

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """A record's message is its event; ``extra={"fields": {...}}`` adds figures."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "event": record.getMessage(),
        }
        if request := request_id.get():
            line["request_id"] = request
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(service: str, level: str) -> None:
    """Send every log line of this process to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def event(logger: logging.Logger, name: str, level: int = logging.INFO, **fields: object) -> None:
    """Log one event with its figures."""
    logger.log(level, name, extra={"fields": fields})
