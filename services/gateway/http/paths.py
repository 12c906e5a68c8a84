"""From fields of ``ChatRequest`` back to where in the client's JSON they came from."""

from __future__ import annotations

import re

from services.common.errors import ServiceError

_LAST_STEP = re.compile(r"(\.[^.\[]*|\[[^\]]*\])$")
_SAMPLING = "sampling."


class Paths:
    """Filled while a body is read; what is not in it has the same path in both, but for ``sampling``, which JSON has not."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def put(self, field: str, path: str) -> None:
        """``field`` of the message came from ``path`` in the body; so did everything below it that has no entry of its own."""
        self._known[field] = path

    def of(self, field: str) -> str:
        """The JSON path of a field."""
        prefix = field
        while prefix and prefix not in self._known:
            prefix = _LAST_STEP.sub("", prefix) if _LAST_STEP.search(prefix) else ""
        if prefix:
            return self._known[prefix] + field[len(prefix) :]
        return field.removeprefix(_SAMPLING)

    def translate(self, error: ServiceError) -> ServiceError:
        """The same error, about the client's JSON."""
        if error.field is None:
            return error
        path, text = self.of(error.field), error.message
        if text.startswith(f"{error.field}: "):
            text = path + text[len(error.field) :]
        return ServiceError(
            error.code, text, field=path, reason=error.reason, metadata=error.metadata, retry_delay=error.retry_delay
        )
