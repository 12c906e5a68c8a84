"""Makes torchvision importable beside a torch build that lacks its compiled operators.

``transformers`` needs torchvision for video processors and for the ``AutoProcessor`` of families with a video slot. The
PyPI wheel of torchvision 0.28.0 fails to import beside a CPU build of torch 2.13.0 only because it registers fake
kernels for operators that its C++ library did not bring. Declaring the operators' names first is enough; the pure-torch
transforms then work, and a compiled operator (``nms``, say) still raises when it is called. Where torchvision imports by
itself (CUDA builds of the same versions) this does nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal

_libraries: list[object] = []  # a torch.library.Library unregisters its operators when it is collected


@functools.cache
def ensure_torchvision() -> Literal["absent", "native", "shimmed"]:
    """Import torchvision, declaring its operators first where that is needed; says which way it went.

    Call before the first import of ``transformers`` in a process that preprocesses media.

    Raises:
        RuntimeError: torchvision fails to import for a reason other than its missing operators.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return "absent"
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return "native"
    for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[name]
    import torch

    source = (Path(next(iter(spec.submodule_search_locations))) / "_meta_registrations.py").read_text()
    operators = set(re.findall(r'register_meta\(\s*"(\w+)"', source))
    operators |= set(re.findall(r'register_fake\("torchvision::(\w+)"', source))
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in sorted(operators):
        library.define(f"{operator}(Tensor a) -> Tensor")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    import torchvision  # noqa: F401

    return "shimmed"
