"""How far a process stands back behind others on the cores that it shares with them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")


def stand_back(niceness: int) -> None:
    """Take so much niceness, 0 to 19: 5 is a third of the time that a neighbour gets who wants all of it, 10 a tenth.

    Call it before threads start, which inherit it. Where Linux shares time among sessions first (``autogroup``), niceness says
    nothing between them; there the session's own is set, if this process leads one, as under ``triptych up``.
    """
    if not niceness:
        return
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # not this kernel, or not allowed
            _AUTOGROUP.write_text(str(niceness))
