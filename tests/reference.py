"""The oracle: what transformers' own processor and ``generate()`` say to a request, in float32, one request at a time."""

from __future__ import annotations

import io
import json
import random
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

from services.models.hf import transformers
from services.models.media import Look, Modality
from tests.looks import switched
from tests.oracle import Item, Takes, catalogue

WORDS = ["what", "is", "the", "colour", "of", "this", "picture", "and", "how", "many", "things", "do", "you", "see", "beside"]
NEW_TOKENS = 12


RATE = 16000  # of every recording, per second


@dataclass(frozen=True)
class Sound:
    """A recording: a WAV file of one channel, 16 bits, ``RATE`` samples a second."""

    wav: bytes

    @property
    def samples(self) -> np.ndarray:
        """``[samples]`` float32 within -1 and 1."""
        with wave.open(io.BytesIO(self.wav)) as file:
            return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


@dataclass(frozen=True, eq=False)
class Clip:
    """A video as its frames ``[frames, height, width, 3]`` of uint8, and how many of them there are a second."""

    frames: np.ndarray
    fps: float

    @property
    def facts(self) -> dict[str, Any]:
        """What a processor is told of them."""
        return dict(fps=self.fps, total_num_frames=len(self.frames), frames_indices=[*range(len(self.frames))])


Part = str | bytes | Sound | Clip


def as_seen(image: Image.Image) -> Image.Image:
    """In three colours, turned as its tag says, on white where it is transparent."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


@dataclass(frozen=True)
class Ask:
    """One request: turns of ``(role, parts)``, where a part is a text, an encoded picture, a recording or a clip; ``low`` says
    that its pictures are looked at with low detail."""

    turns: list[tuple[str, list[Part]]]
    low: bool = False

    @property
    def pictures(self) -> list[Image.Image]:
        return [as_seen(Image.open(io.BytesIO(p))) for _, parts in self.turns for p in parts if isinstance(p, bytes)]

    @property
    def clips(self) -> list[Clip]:
        return [p for _, parts in self.turns for p in parts if isinstance(p, Clip)]

    def messages(self) -> list[dict[str, Any]]:
        """For a processor: media by content."""
        pictures = iter(self.pictures)

        def content(part: Part) -> dict[str, Any]:
            match part:
                case str():
                    return {"type": "text", "text": part}
                case bytes():
                    return {"type": "image", "image": next(pictures)}
                case Sound():
                    return {"type": "audio", "audio": part.samples}
                case Clip():
                    return {"type": "video", "video": part.frames}

        return [{"role": role, "content": [content(p) for p in parts]} for role, parts in self.turns]


@dataclass(frozen=True)
class Answer:
    """What the oracle says: prompt ids, greedy tokens, every step's logits ``[new_tokens, vocab]``, processor output."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    inputs: Any

    @property
    def first_logits(self) -> torch.Tensor:
        """``[vocab]``."""
        return self.logits[0]


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


def sound(rng: random.Random, seconds: float) -> Sound:
    """Gliding tones in noise; never silent, never twice the same."""
    noise = np.random.default_rng(rng.randrange(2**32)).standard_normal(round(seconds * RATE)) * rng.uniform(0.002, 0.05)
    time = np.arange(len(noise)) / RATE
    for _ in range(3):
        pitch, glide, beat = rng.uniform(80, 4000), rng.uniform(-0.4, 0.4), rng.uniform(0.2, 6)
        noise += 0.2 * np.sin(2 * np.pi * pitch * (time + glide * time**2 / max(seconds, 1))) * np.sin(np.pi * beat * time) ** 2
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((noise.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return Sound(buffer.getvalue())


def clip(rng: random.Random, width: int, height: int, frames: int, fps: float) -> Clip:
    """A disc that moves over a drawn background."""
    background = Image.open(io.BytesIO(picture(rng, width, height, "PNG")))
    colour = tuple(rng.randrange(256) for _ in range(3))
    (x, y), (dx, dy), r = rng.choices(range(width), k=2), rng.choices(range(-9, 10), k=2), min(width, height) / 4
    drawn = []
    for i in range(frames):
        frame = background.copy()
        left, top = (x + i * dx) % width - r, (y + i * dy) % height - r
        ImageDraw.Draw(frame).ellipse([left, top, left + 2 * r, top + 2 * r], fill=colour)
        drawn.append(np.asarray(frame))
    return Clip(np.stack(drawn), fps)


def asks(seed: int, count: int, pictures: bool) -> list[Ask]:
    """Requests with 0 to 3 pictures of 28 to 1500 pixels a side in any order among the text, some of several turns."""
    rng = random.Random(seed)
    sides = [28, 1500, 29, 640, 57, 1111, 333, 200, 84, 480]
    made = []
    for i in range(count):
        parts: list[Part] = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(rng.randint(1, 3))]
        for _ in range(i % 4 if pictures else 0):
            low = max(1, min(sides) - 1)
            width, height = (rng.choice(sides) if rng.random() < 0.4 else rng.randint(low, 420) for _ in range(2))
            parts.insert(rng.randint(0, len(parts)), picture(rng, max(28, width), max(28, height), rng.choice(["JPEG", "PNG"])))
        turns: list[tuple[str, list[Part]]] = [("user", parts)]
        if i % 5 == 3:
            turns = [("user", ["hello there"]), ("assistant", ["yes ?"]), *turns]
        made.append(Ask(turns))
    return made


def media(rng: random.Random, modalities: tuple[Modality, ...]) -> Callable[[], Part]:
    """Makes one item after the other, of each kind in turn, all of different sizes; nothing is large but a long recording."""
    seconds = [0.3, 31.0, 2.7, 12.5, 1.0, 40.0, 6.1]
    sides = [28, 56, 75, 99, 130, 160, 200]
    made = rng.randrange(len(seconds))

    def make() -> Part:
        nonlocal made
        kind = modalities[made % len(modalities)]
        made += 1
        width, height = rng.choices(sides, k=2)
        if kind is Modality.IMAGE:
            return picture(rng, width + made, height, rng.choice(["JPEG", "PNG"]))
        if kind is Modality.AUDIO:
            return sound(rng, seconds[made // len(modalities) % len(seconds)])
        return clip(rng, max(width, 56), max(height, 56), rng.randint(2, 7), rng.choice([1.0, 2.0, 4.0]))

    return make


def asks_for(family: str, seed: int, count: int) -> list[Ask]:
    """Requests with the media that a family takes, from five on of every kind: text alone, one item, several, several turns.

    Text-only prompts grow from one to the next by nine words, so that some pass any length that matters to a family
    while they are read, and some while they are answered.
    """
    takes = catalogue("TAKES").get(family, Takes())
    rng = random.Random(f"{family}/{seed}")
    next_item = media(rng, takes.modalities)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    made = []
    for i in range(count):
        if not takes.modalities:
            length = 6 + 9 * i
            turns: list[tuple[str, list[Part]]] = [("user", [words(length, length)])]
            earlier: list[Part] = ["hello there"]
        else:
            items: list[Part] = [next_item() for _ in range(min(takes.items, max(takes.least, [1, 0, 3, 1, 2][i % 5])))]
            parts: list[Part] = [words(1, 8) for _ in range(rng.randint(1, 2))]
            for item in items:
                parts.insert(rng.randint(0, len(parts)), item)
            turns, earlier = [("user", parts)], [words(1, 4)] + ([next_item()] if takes.items > 1 else [])
        if i % 5 == 3 and takes.turns:
            turns = [("user", earlier), ("assistant", ["yes ?"]), *turns]
        made.append(Ask(turns))
    return made


class Oracle:
    """The whole model and its processor, as stock transformers loads them."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.model_type: str = config["model_type"]
        self.model = getattr(transformers, config["architectures"][0]).from_pretrained(path, dtype=torch.float32).eval()
        rope = self.model.config.get_text_config().rope_parameters or {}
        self.dynamic = rope.get("rope_type") == "dynamic"
        self.multimodal = any((path / f"{name}_config.json").exists() for name in ("processor", "preprocessor"))
        self.processor = (transformers.AutoProcessor if self.multimodal else transformers.AutoTokenizer).from_pretrained(path)

    def inputs(self, ask: Ask) -> Any:
        """Processor output for one request."""
        if not ask.low:
            return self._inputs(ask, {})
        with switched(self.processor, self.model_type, Look(low=True)) as images:
            return self._inputs(ask, {"images_kwargs": images})

    def _inputs(self, ask: Ask, settings: dict[str, Any]) -> Any:
        if not self.multimodal:
            turns = [{"role": role, "content": "".join(str(p) for p in parts)} for role, parts in ask.turns]
            return self.processor.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        if own := catalogue("INPUTS").get(self.model_type):
            return own(self.processor, ask.messages())
        if ask.clips:
            settings = dict(do_sample_frames=False, video_metadata=[[clip.facts for clip in ask.clips]], **settings)
        return self.processor.apply_chat_template(
            ask.messages(),
            self.processor.chat_template or self.processor.tokenizer.chat_template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=settings,
        )

    @torch.no_grad()
    def answer(self, ask: Ask, new_tokens: int = NEW_TOKENS) -> Answer:
        if ask.low:
            with switched(self.processor, self.model_type, Look(low=True), self.model):
                return self._answer(self.inputs(ask), new_tokens)
        return self._answer(self.inputs(ask), new_tokens)

    def _answer(self, inputs: Any, new_tokens: int) -> Answer:
        if self.dynamic:  # its frequencies stay as the longest sequence left them until a short one comes
            self.model(input_ids=inputs["input_ids"][:, :1])
        out = self.model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        prompt = inputs["input_ids"][0].tolist()
        return Answer(prompt, out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits), inputs)

    @torch.no_grad()
    def items(self, inputs: Any) -> list[Item]:
        """Every media item's rows, in prompt order."""
        found: list[Item] = catalogue("ITEMS")[self.model_type](self.model, inputs)
        return found

    @torch.no_grad()
    def features(self, inputs: Any) -> list[torch.Tensor]:
        """Each picture's rows ``[rows, hidden]``, straight from the towers."""
        if "pixel_values" not in inputs:
            return []
        wanted = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
        return list(self.model.base_model.get_image_features(**wanted, return_dict=True).pooler_output)

    @torch.no_grad()
    def tokens_without(self, inputs: Any, left: torch.Tensor, new_tokens: int = NEW_TOKENS) -> list[int]:
        """Greedy tokens where the decoder is given only some of the prompt, at the positions that it would have in the whole.

        Args:
            inputs: processor output of the whole prompt.
            left: which tokens of it are given, ascending.
        """
        decoder = self.model.base_model.language_model
        given: dict[str, Any] = {}

        def note(_module: Any, _args: Any, arguments: dict[str, Any]) -> None:
            given.update(arguments)

        handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
        self.model(**inputs)
        handle.remove()
        positions = given["position_ids"][-3:]  # [3, 1, prompt]
        embeds, following, tokens = given["inputs_embeds"][:, left], int(positions.max()) + 1, []
        positions = positions[..., left]
        for _ in range(new_tokens):
            hidden = decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
            tokens.append(int(self.model.lm_head(hidden[0, -1]).argmax()))
            embeds = torch.cat([embeds, self.model.get_input_embeddings()(torch.tensor([tokens[-1:]]))], dim=1)
            positions = torch.cat([positions, torch.full((3, 1, 1), following)], dim=-1)
            following += 1
        return tokens
