"""The oracle: what transformers' own processor and ``generate()`` say to a request, in float32, one request at a time."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers

WORDS = ["what", "is", "the", "colour", "of", "this", "picture", "and", "how", "many", "things", "do", "you", "see", "beside"]
NEW_TOKENS = 12


@dataclass(frozen=True)
class Ask:
    """One request: turns of ``(role, parts)``, where a part is a text or an encoded picture."""

    turns: list[tuple[str, list[str | bytes]]]

    @property
    def pictures(self) -> list[Image.Image]:
        return [Image.open(io.BytesIO(p)).convert("RGB") for _, parts in self.turns for p in parts if isinstance(p, bytes)]

    def messages(self) -> list[dict[str, Any]]:
        """For a processor: pictures by name."""
        pictures = iter(self.pictures)

        def content(part: str | bytes) -> dict[str, Any]:
            return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": next(pictures)}

        return [{"role": role, "content": [content(p) for p in parts]} for role, parts in self.turns]


@dataclass(frozen=True)
class Answer:
    """What the oracle says: prompt ids, greedy tokens, first step's logits ``[vocab]``."""

    prompt: list[int]
    tokens: list[int]
    first_logits: torch.Tensor
    inputs: Any


def picture(rng: random.Random, width: int, height: int, kind: str) -> bytes:
    """A drawn picture as JPEG or PNG bytes."""
    coarse = (max(1, height // 7), max(1, width // 7), 3)
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, coarse, dtype=np.uint8)
    image = Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y, r = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(4, 4 + min(width, height) / 3)
        draw.ellipse([x - r, y - r, x + r, y + r], fill=tuple(rng.randrange(256) for _ in range(3)))
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return buffer.getvalue()


def asks(seed: int, count: int, pictures: bool) -> list[Ask]:
    """Requests with 0 to 3 pictures of 28 to 1500 pixels a side in any order among the text, some of several turns."""
    rng = random.Random(seed)
    sides = [28, 1500, 29, 640, 57, 1111, 333, 200, 84, 480]
    made = []
    for i in range(count):
        parts: list[str | bytes] = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(rng.randint(1, 3))]
        for _ in range(i % 4 if pictures else 0):
            low = max(1, min(sides) - 1)
            width, height = (rng.choice(sides) if rng.random() < 0.4 else rng.randint(low, 420) for _ in range(2))
            parts.insert(rng.randint(0, len(parts)), picture(rng, max(28, width), max(28, height), rng.choice(["JPEG", "PNG"])))
        turns: list[tuple[str, list[str | bytes]]] = [("user", parts)]
        if i % 5 == 3:
            turns = [("user", ["hello there"]), ("assistant", ["yes ?"]), *turns]
        made.append(Ask(turns))
    return made


class Oracle:
    """The whole model and its processor, as stock transformers loads them."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(str(path))
        self.multimodal = bool(checkpoint.family.modalities)
        self.model = getattr(transformers, checkpoint.family.architecture).from_pretrained(path, dtype=torch.float32).eval()
        self.processor = (transformers.AutoProcessor if self.multimodal else transformers.AutoTokenizer).from_pretrained(path)

    def inputs(self, ask: Ask) -> Any:
        """Processor output for one request."""
        if self.multimodal:
            return self.processor.apply_chat_template(
                ask.messages(), tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        turns = [{"role": role, "content": "".join(str(p) for p in parts)} for role, parts in ask.turns]
        return self.processor.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    @torch.no_grad()
    def answer(self, ask: Ask, new_tokens: int = NEW_TOKENS) -> Answer:
        inputs = self.inputs(ask)
        out = self.model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        prompt = inputs["input_ids"][0].tolist()
        return Answer(prompt, out.sequences[0, len(prompt) :].tolist(), out.logits[0][0], inputs)

    @torch.no_grad()
    def features(self, inputs: Any) -> list[torch.Tensor]:
        """Each picture's rows ``[rows, hidden]``, straight from the towers."""
        if "pixel_values" not in inputs:
            return []
        wanted = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
        return list(self.model.base_model.get_image_features(**wanted, return_dict=True).pooler_output)
