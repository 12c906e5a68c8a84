"""Makes torchvision importable beside a CPU build of torch, in the virtual environment whose python runs this.

    python -m bench.incumbents.patch_torchvision

Its wheel on PyPI is linked to CUDA; without it the operators have no names and importing fails. The names are enough.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_MARK = "# names for operators that the CUDA build would bring"
_NAMES = f"""
if not torchvision.extension._has_ops():  {_MARK}
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(f"{{_name}}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@functools.lru_cache(None)
"""


def main() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        sys.exit("patch_torchvision: torchvision is not installed here")
    file = Path(spec.origin).with_name("_meta_registrations.py")
    text = file.read_text()
    if _MARK not in text:
        file.write_text(text.replace("@functools.lru_cache(None)\n", _NAMES.lstrip(), 1))


if __name__ == "__main__":
    main()
