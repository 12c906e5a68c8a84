"""Random-weight checkpoints that stock ``transformers`` loads: tokenizers, templates, configs and weights by family."""

from services.models.torchvision_shim import ensure_torchvision

ensure_torchvision()
