"""transformers, made importable: ``from services.models.hf import transformers`` is how every module gets it."""

from services.models.torchvision_shim import ensure_torchvision

ensure_torchvision()

import transformers  # noqa: E402
from transformers import masking_utils  # noqa: E402

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

__all__ = ["masking_utils", "transformers"]
