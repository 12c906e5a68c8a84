"""What differs between families in the encoder: one scheme for each kind of media that one of them takes."""

from __future__ import annotations

from services.encoder.families.audio import AUDIO
from services.encoder.families.images import IMAGES
from services.encoder.families.videos import VIDEOS
from services.encoder.features import Scheme
from services.models.media import Modality

_BY_MODALITY = {Modality.IMAGE: IMAGES, Modality.AUDIO: AUDIO, Modality.VIDEO: VIDEOS}


def schemes_of(model_type: str) -> dict[Modality, Scheme]:
    """How a family's media are encoded; nothing for a family that takes text only."""
    return {modality: schemes[model_type] for modality, schemes in _BY_MODALITY.items() if model_type in schemes}
