"""The filter of system calls, in a process that dresses itself in it and tries."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from services.decoding import sandbox

TRIES = """
import json, os, socket, sys
from services.decoding import sandbox
outcomes = {"filtered": sandbox.forbid()}
folder = sys.argv[1]
for name, attempt in {
    "socket": lambda: socket.socket(),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getppid(), 0),
    "create": lambda: open(folder + "/new", "w"),
    "append": lambda: open(folder + "/old", "a"),
    "truncate": lambda: os.truncate(folder + "/old", 0),
    "remove": lambda: os.unlink(folder + "/old"),
    "rename": lambda: os.rename(folder + "/old", folder + "/other"),
    "read": lambda: open(folder + "/old").read(),
    "memory": lambda: bytes(2**24),
}.items():
    try:
        attempt()
        outcomes[name] = "done"
    except OSError as error:
        outcomes[name] = error.errno
print(json.dumps(outcomes))
"""


@pytest.mark.skipif(platform.machine() not in sandbox._CALLS, reason="no list of system calls for this processor")
def test_what_a_decoder_never_needs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    outcomes = json.loads(done.stdout)
    refused = ("socket", "exec", "kill", "create", "append", "truncate", "remove", "rename")
    assert outcomes == {"filtered": True, **dict.fromkeys(refused, 1), "read": "done", "memory": "done"}
    assert (tmp_path / "old").read_text() == "kept" and not (tmp_path / "new").exists()
