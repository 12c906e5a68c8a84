"""Compiles C++ files for the machine at hand, at first use, and keeps the results in a cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SHARED = Path(__file__).parent  # headers for every source
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-w")
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_SECONDS = 120.0


class Unavailable(Exception):
    """There is no compiler, it failed, or its result cannot be loaded; the text says which."""


@functools.cache
def load_library(source: Path) -> ctypes.CDLL:
    """The library made from one source file. Safe among threads and processes: whoever comes late builds once more at worst.

    Raises:
        Unavailable: in every case of failure.
    """
    try:
        return ctypes.CDLL(str(_build(source)))
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(str(error)) from error


def _build(source: Path) -> Path:
    runtime = _openmp_runtime()
    headers = [*sorted(source.parent.glob("*.h")), *sorted(_SHARED.glob("*.h"))]
    ingredients = [
        *(file.read_bytes() for file in (source, *headers)),
        *(part.encode() for part in (*_FLAGS, str(runtime), _cpu())),
    ]
    key = hashlib.sha256(b"\0".join(ingredients)).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"
    library = folder / f"{source.stem}-{key}.so"
    if library.is_file():
        return library
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C++ compiler ({', '.join(_COMPILERS)}) is on the PATH")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        _call([compiler, *_FLAGS, *(["-fopenmp"] if runtime else []), f"-I{_SHARED}", "-c", str(source), "-o", str(compiled)])
        _call([compiler, "-shared", str(compiled), "-o", str(linked), *([str(runtime)] if runtime else [])])
        linked.replace(library)  # other processes see all of it or nothing
    return library


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def _openmp_runtime() -> Path | None:
    """The OpenMP library that torch itself loaded: linked by path, so that the process never holds two thread pools."""
    return next(iter(sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))), None)


def _cpu() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
