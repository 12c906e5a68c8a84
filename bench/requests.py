"""What a comparison asks: the same requests as jobs for Triptych and as files for other engines."""

from __future__ import annotations

import base64
import random
from pathlib import Path

from bench.load import Ask, write_load
from bench.workloads import Job, Sizes, one_image, text_only
from services.models.checkpoint import open_checkpoint
from services.models.layout import PromptLayout, Turn

SIZES = {"text": Sizes(words=90, max_tokens=64), "image": Sizes(max_tokens=32)}


class Requests:
    """Of one section.

    Args:
        section: "text" or "image".
        checkpoint: whose tokenizer and template count.
        folder: where files go.
    """

    def __init__(self, section: str, checkpoint: Path, folder: Path) -> None:
        self.section, self._folder, self._sizes = section, folder, SIZES[section]
        self._layout = PromptLayout(open_checkpoint(str(checkpoint)))

    def make(self, count: int, seed: int) -> tuple[list[Job], list[Ask], Path]:
        """Jobs, the same as prompts, and the file that those are in; different ones for every seed, so that no cache has them."""
        rng = random.Random(f"{self.section} {seed}")
        jobs = [(text_only if self.section == "text" else one_image)(rng, self._sizes) for _ in range(count)]
        file, asks = self._folder / f"{self.section}-{seed}.json", [self._ask(job, seed, i) for i, job in enumerate(jobs)]
        write_load(file, asks)
        return jobs, asks, file

    def _ask(self, job: Job, seed: int, index: int) -> Ask:
        """The job's prompt as the gateway would lay it out, but with one placeholder for a picture."""
        words = job.turns[0][-1]["text"]
        if self.section == "text":
            return Ask(self._layout.lay_out([Turn("user", (words,))]).token_ids, job.max_tokens, text=words)
        picture = self._folder / f"{seed}-{index}.jpg"
        picture.write_bytes(base64.b64decode(job.turns[0][0]["image_url"]["url"].partition(",")[2]))
        text = f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{words}<|im_end|>\n<|im_start|>assistant\n"
        return Ask(self._layout.tokenizer.fast.encode(text, add_special_tokens=False).ids, job.max_tokens, str(picture), text)
