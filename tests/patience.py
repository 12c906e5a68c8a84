"""How long a test waits for what takes a moment."""

from __future__ import annotations

PATIENCE = 60.0  # seconds; only a test that fails waits for so long, however slow the machine is
