"""Sound to log-mel frames as Whisper hears it, by Fourier transform of the sound alone: silence behind it costs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

_SILENT = -10.0  # the least height: powers are cut off there


def log_mel(extractor: Any, samples: np.ndarray, length: int) -> torch.Tensor:
    """What a ``WhisperFeatureExtractor`` makes of samples padded with silence, without its dither: equal sounds have equal rows.

    Args:
        extractor: whose settings count.
        samples: float32 ``[samples]``.
        length: samples with the silence, a multiple of the hop, more than half a window.

    Returns:
        float32 ``[bins, length // hop]``.
    """
    hop, window = extractor.hop_length, extractor.n_fft
    assert len(samples) <= length and length % hop == 0 and length > window // 2, f"{len(samples)} samples in {length}"
    total = length // hop
    heard = min(total, -(-(len(samples) + window // 2) // hop))  # frames that reach into the sound
    sound = F.pad(torch.from_numpy(samples), (0, min(length, heard * hop + window) - len(samples)))
    frames = F.pad(sound[None], (window // 2, window // 2), mode="reflect")[0].unfold(0, window, hop)[:heard]
    spectrum = torch.fft.rfft(frames * torch.hann_window(window))  # [heard, frequencies]; torch.stft takes four times as long
    power = torch.addcmul(spectrum.real.square(), spectrum.imag, spectrum.imag)
    filters = torch.from_numpy(extractor.mel_filters).float()  # [frequencies, bins]
    heights = (filters.T @ power.T).clamp_(min=10.0**_SILENT).log10_()
    floor = float(heights.max()) - 8.0
    return F.pad(heights.clamp_(min=floor).add_(4.0).div_(4.0), (0, total - heard), value=(max(floor, _SILENT) + 4.0) / 4.0)
