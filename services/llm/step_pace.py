"""How many prompt tokens a step may take beside decoding sequences without making it much longer than a step without any."""

from __future__ import annotations

_SHARE = 0.1  # of a new measurement in an average
_LEAST = 16  # tokens that a step takes in any case: prompts go on


class StepPace:
    """Learns from steps what a decode step takes and what a prompt token adds, in seconds.

    Args:
        stretch: a step beside decoding sequences may take so many times what one without prompts takes; 0 sets no bound.
    """

    def __init__(self, stretch: float) -> None:
        assert stretch == 0 or stretch > 1
        self._stretch = stretch
        self._decode_step = self._prompt_token = 0.0  # 0: not known

    @property
    def prompt_tokens(self) -> int | None:
        """Most for the next step if it decodes; None: as many as fit."""
        if not self._stretch or not self._decode_step or not self._prompt_token:
            return None
        return max(_LEAST, int((self._stretch - 1) * self._decode_step / self._prompt_token))

    def note(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step took so long. Steps that only compute prompts say little: a product of many rows has another price."""
        if decodes and not prompt_tokens:
            self._decode_step = _average(self._decode_step, seconds)
        elif decodes and self._decode_step:
            self._prompt_token = _average(self._prompt_token, max(seconds - self._decode_step, 1e-6) / prompt_tokens)


def _average(known: float, new: float) -> float:
    return known + _SHARE * (new - known) if known else new
