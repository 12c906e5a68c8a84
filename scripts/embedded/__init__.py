"""How the embedded default model was made: pictures, questions, training and its held-out score."""

from services.models.torchvision_shim import ensure_torchvision

ensure_torchvision()
