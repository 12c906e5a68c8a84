"""A process that stands back does so with all its threads, and with its session where Linux shares time among sessions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from services.llm.config import LlmConfig

TELL = """
import json, os, threading
from pathlib import Path
from services.common.niceness import stand_back
group = Path("/proc/self/autogroup")
def session(): return (group.read_text().split() if group.exists() else [])[-1:]  # empty in the kernel's first session
before = session()
stand_back(7)
seen = []
thread = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.start(), thread.join()
print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), *seen, before, session()]))
"""


@pytest.mark.parametrize("leads", [True, False])
def test_threads_inherit_it_and_a_session_of_its_own_takes_it(leads: bool) -> None:
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, start_new_session=leads, check=True)
    own, thread, before, after = json.loads(done.stdout)
    assert (own, thread) == (7, 7)
    assert after == (["7"] if leads and before else before), "a session that others are in as well is theirs, too"


@pytest.mark.parametrize("value", [-2, 20])
def test_what_no_process_can_have_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"--nice must be at least -1 and at most 19, got {value}"):
        LlmConfig(nice=value)
