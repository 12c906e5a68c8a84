"""What the gateway allows by default, by what it is used for; docs/profiles.md has the reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Defaults of the options of these names."""

    limit_mm_per_prompt: str
    max_num_running: int
    max_queued_requests: int
    max_passed: int
    kept_for_text: float


PROFILES = {
    "chat": Profile("image=8,audio=2,video=1", 256, 256, 64, 0.125),
    "document": Profile("image=64,audio=1,video=1", 64, 128, 16, 0.0),
    "video": Profile("image=16,audio=4,video=4", 32, 64, 16, 0.125),
    "mixed": Profile("image=8,audio=4,video=4", 256, 256, 32, 0.125),
}
