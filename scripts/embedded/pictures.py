"""Pictures to learn from: drawn shapes, printed numbers, handwritten digits and the easy-VQA training split.

Every picture comes with a label map, one class per pixel, so that the vision tower can be trained densely before the
language model exists. Sizes are given in cells: one cell is 16 x 16 pixels and becomes one visual token.

Knows nothing of questions, tokens or models.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PATCH = 8
CELL = 16
MIN_PIXELS = 32 * 32
MAX_PIXELS = 96 * 96

# The first eight are easy-VQA's, with its exact values.
COLORS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
    "brown": (165, 42, 42),
    "teal": (0, 128, 128),
    "orange": (255, 140, 0),
    "purple": (140, 40, 180),
    "white": (250, 250, 250),
}
COLOR_NAMES = list(COLORS)
EASY_COLORS = COLOR_NAMES[:8]
# Other shades that people call by the same name.
SHADES = {
    "red": [(220, 30, 30), (200, 20, 40)],
    "green": [(30, 160, 50), (0, 128, 0), (60, 200, 80)],
    "blue": [(40, 70, 220), (30, 60, 160), (50, 110, 240)],
    "yellow": [(240, 215, 40), (250, 230, 80)],
    "black": [(20, 20, 20)],
    "gray": [(110, 110, 110), (150, 150, 150)],
    "brown": [(139, 69, 19), (120, 70, 30)],
    "teal": [(0, 150, 150)],
    "orange": [(245, 140, 25), (255, 165, 0)],
    "purple": [(128, 0, 128), (150, 60, 200)],
    "white": [(255, 255, 255)],
}
SHAPES = ["circle", "rectangle", "triangle", "star", "heart"]
EASY_SHAPES = SHAPES[:3]

# Canvas sizes in cells (rows, columns). Serving resizes any larger picture to at most 36 cells.
SCENE_GRIDS = [(4, 4), (4, 4), (4, 5), (5, 4), (5, 5), (4, 6), (6, 4), (5, 6), (6, 5), (4, 7), (6, 6), (4, 8)]
NUMBER_GRIDS = {
    1: [(2, 2), (2, 2), (3, 3), (3, 4), (4, 4), (4, 6), (5, 6)],
    2: [(2, 3), (3, 3), (3, 4), (2, 4), (4, 5), (4, 6), (5, 6), (6, 6)],
    3: [(2, 4), (3, 5), (3, 6), (3, 6), (4, 6), (4, 7), (4, 8), (5, 6)],
}
HELD_OUT_FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSerif.ttf")
HANDWRITTEN_TRAINING = 1198  # of scikit-learn's 1797; the last third, other writers, is held out


@dataclass(frozen=True)
class Thing:
    """One shape in a scene, in pixels of the final canvas."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


@dataclass
class Picture:
    """An RGB picture and what is in it.

    labels: ``[height, width]`` uint8, 0 = background, i + 1 = thing or digit number i, at canvas resolution.
    """

    image: Image.Image
    labels: np.ndarray
    background: str | None = None
    things: list[Thing] = field(default_factory=list)
    number: str | None = None
    number_color: str | None = None
    handwritten: bool = False


@functools.cache
def training_fonts() -> list[str]:
    return [p for p in all_fonts() if not p.endswith(HELD_OUT_FONTS)]


@functools.cache
def all_fonts() -> list[str]:
    """Upright text fonts that matplotlib ships: DejaVu Sans, Serif and Mono, STIX, Computer Modern."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = [p for p in folder.glob("*.ttf") if p.name.startswith(("DejaVu", "STIXGeneral", "cmr", "cmtt", "cmss", "cmb"))]
    return sorted(str(p) for p in names if "Display" not in p.name)


@functools.lru_cache(maxsize=4096)
def font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def ink(rng: random.Random, name: str) -> tuple[int, int, int]:
    """A colour that goes by this name: the plain one, a shade, or either with a little noise."""
    base = COLORS[name] if rng.random() < 0.5 else rng.choice(SHADES[name])
    if rng.random() < 0.5:
        return base
    return tuple(max(0, min(255, c + rng.randint(-14, 14))) for c in base)  # type: ignore[return-value]


def outline(shape: str, x: float, y: float, r: float, turn: float, aspect: float) -> list[tuple[float, float]]:
    """The corners of a shape around (x, y)."""
    if shape == "rectangle":
        w, h = r * min(1.0, aspect), r * min(1.0, 1 / aspect)
        points = [(-w, -h), (w, -h), (w, h), (-w, h)]
    elif shape == "triangle":
        points = [(0, -r), (r, r), (-r, r)]
    elif shape == "star":
        radii = [r if i % 2 == 0 else r * 0.42 for i in range(10)]
        points = [(q * math.sin(i * math.pi / 5), -q * math.cos(i * math.pi / 5)) for i, q in enumerate(radii)]
    elif shape == "heart":
        ts = [i * math.pi / 16 for i in range(32)]
        points = [
            (r * math.sin(t) ** 3, -r / 16 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)))
            for t in ts
        ]
    else:
        points = [(r * math.cos(i * math.pi / 24), r * math.sin(i * math.pi / 24)) for i in range(48)]
    c, s = math.cos(turn), math.sin(turn)
    return [(x + px * c - py * s, y + px * s + py * c) for px, py in points]


def scene(rng: random.Random, rows: int, columns: int, count: int | None = None, easy: bool = False) -> Picture:
    """One to four shapes on a plain background; ``easy`` draws in the manner of easy-VQA: one shape, pale ground."""
    width, height = columns * CELL, rows * CELL
    if easy:
        background, ground = None, tuple(rng.randint(230, 255) for _ in range(3))
        names, shapes, count = EASY_COLORS, EASY_SHAPES, 1
    else:
        background = rng.choice(COLOR_NAMES) if rng.random() < 0.25 else "white"
        ground = ink(rng, background)
        names, shapes = [c for c in COLOR_NAMES if c != background and not alike(c, background)], SHAPES
        count = count or rng.choice([1, 2, 2, 3, 3, 4])
    things: list[Thing] = []
    same_shape, same_color = rng.choice(shapes), rng.choice(names)
    alike_shape, alike_color = rng.random() < 0.2, rng.random() < 0.15
    for _ in range(count):
        for _attempt in range(50):
            low, high = (4, 13) if easy else (7, 10) if count > 3 else (7, 18)
            r = min(rng.uniform(low, high), width / 2 - 2, height / 2 - 2)
            margin = r if easy else r + 1
            x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
            if all(math.hypot(x - t.x, y - t.y) > r + t.radius + 2 for t in things):
                shape = same_shape if alike_shape else rng.choice(shapes)
                color = same_color if alike_color else rng.choice(names)
                things.append(Thing(shape, color, x, y, r))
                break
    scale = rng.choice([1, 2, 4])
    image = Image.new("RGB", (width * scale, height * scale), ground)
    labels = Image.new("L", (width, height), 0)
    draw, draw_labels = ImageDraw.Draw(image), ImageDraw.Draw(labels)
    for i, t in enumerate(things):
        turn = 0.0 if easy or rng.random() < 0.6 else rng.uniform(-0.35, 0.35)
        aspect = math.exp(rng.uniform(-1.1, 1.1)) if rng.random() < 0.75 else 1.0
        color = COLORS[t.color] if easy else ink(rng, t.color)
        points = outline(t.shape, t.x, t.y, t.radius, turn, aspect)
        draw.polygon([(px * scale, py * scale) for px, py in points], fill=color)
        draw_labels.polygon(points, fill=i + 1)
    if scale > 1:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return Picture(image, np.asarray(labels), background, things)


def alike(a: str, b: str) -> bool:
    """Pairs too close to be told apart when one is drawn on the other."""
    return {a, b} in (
        {"white", "yellow"},
        {"red", "orange"},
        {"black", "purple"},
        {"black", "blue"},
        {"orange", "yellow"},
        {"red", "brown"},
        {"blue", "purple"},
        {"brown", "black"},
        {"gray", "teal"},
        {"brown", "purple"},
        {"orange", "brown"},
        {"black", "teal"},
    )


def number(rng: random.Random, rows: int, columns: int, digits: int, held_out: bool = False) -> Picture:
    """A printed number of 1-3 digits, dark on light more often than not."""
    width, height = columns * CELL, rows * CELL
    if rng.random() < 0.65:
        background, color = "white", rng.choice(["black", "black", "blue", "red", "green", "brown", "purple", "teal"])
    else:
        background = rng.choice(COLOR_NAMES)
        color = rng.choice([c for c in COLOR_NAMES if c != background and not alike(c, background)])
    text = str(rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1))
    path = rng.choice([p for p in all_fonts() if p.endswith(HELD_OUT_FONTS)] if held_out else training_fonts())
    # Serving scales with the picture, so the largest size that fits is the centre of what will be seen.
    size = int(min(height * 1.15, width / (0.62 * digits + 0.1), 60) * rng.uniform(0.72, 1.0))
    face = font(path, max(14, size))
    left, top, right, bottom = face.getbbox(text)
    x = rng.uniform(1, max(1.01, width - (right - left) - 1)) - left
    y = rng.uniform(1, max(1.01, height - (bottom - top) - 1)) - top
    scale = rng.choice([1, 2])
    image = Image.new("RGB", (width * scale, height * scale), ink(rng, background))
    labels = Image.new("L", (width, height), 0)
    big = font(path, max(14, size) * scale)
    ImageDraw.Draw(image).text((x * scale, y * scale), text, fill=ink(rng, color), font=big)
    draw_labels = ImageDraw.Draw(labels)
    at = x
    for i, character in enumerate(text):
        step = face.getlength(character)
        draw_labels.rectangle([at, y + top, at + step - 1, y + bottom], fill=i + 1)
        at += step
    if scale > 1:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return Picture(image, np.asarray(labels), background, [], text, color)


@functools.cache
def handwritten_digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits: ``[1797, 8, 8]`` uint8 as dark ink on white, and ``[1797]`` labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (255 - np.round(data.images * 255 / 16)).astype(np.uint8), data.target


def handwritten(rng: random.Random) -> Picture:
    """A training digit, bent a little, at 8 x 8 and enlarged as serving enlarges it, or larger and smoother."""
    images, targets = handwritten_digits()
    index = rng.randrange(HANDWRITTEN_TRAINING)
    image = Image.fromarray(images[index], "L")
    if rng.random() < 0.9:
        image = image.resize((64, 64), Image.Resampling.BICUBIC)
        turn, shear = rng.uniform(-0.22, 0.22), rng.uniform(-0.2, 0.2)
        zoom_x, zoom_y = rng.uniform(0.85, 1.2), rng.uniform(0.85, 1.2)
        c, s = math.cos(turn), math.sin(turn)
        a, b, d, e = c * zoom_x, (-s + shear) * zoom_x, s * zoom_y, c * zoom_y
        dx, dy = rng.uniform(-5, 5), rng.uniform(-5, 5)
        matrix = (a, b, 32 - 32 * (a + b) + dx, d, e, 32 - 32 * (d + e) + dy)
        image = image.transform((64, 64), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=255)
        if rng.random() < 0.75:
            image = image.resize((8, 8), Image.Resampling.BOX)
    pixels = np.asarray(image, np.float32)
    low = rng.uniform(0, 60) if rng.random() < 0.4 else 0
    pixels = low + pixels * (255 - low) / 255 + np.asarray(rng.gauss(0, 1) * 4)
    if rng.random() < 0.15:
        pixels = 255 - pixels
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8), "L").convert("RGB")
    image = image.resize((32, 32), Image.Resampling.BICUBIC)
    labels = np.ones((32, 32), np.uint8)
    return Picture(image, labels, None, [], str(targets[index]), None, handwritten=True)


@functools.cache
def easy_vqa_training() -> list[tuple[Image.Image, str, str]]:
    """easy-VQA's 4,000 training pictures with shape and colour, as its training questions tell them."""
    import easy_vqa

    facts: dict[int, dict[str, str]] = {}
    for question, answer, image_id in zip(*easy_vqa.get_train_questions(), strict=True):
        fact = facts.setdefault(image_id, {})
        if answer in EASY_SHAPES:
            fact["shape"] = answer
        elif answer in EASY_COLORS:
            fact["color"] = answer
        for word in question.rstrip("?").split():  # "what color is the circle?" tells the shape
            if question.startswith("what color is the") or question.startswith("what is the"):
                if word in EASY_SHAPES:
                    fact["shape"] = word
                elif word in EASY_COLORS:
                    fact["color"] = word
    paths = easy_vqa.get_train_image_paths()
    known = sorted(i for i, fact in facts.items() if len(fact) == 2)
    return [(Image.open(paths[i]).convert("RGB"), facts[i]["shape"], facts[i]["color"]) for i in known]


def easy_vqa(rng: random.Random) -> Picture:
    """One of easy-VQA's training pictures; labels are the pixels that differ from the ground."""
    image, shape, color = rng.choice(easy_vqa_training())
    pixels = np.asarray(image, np.int16)
    values, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    labels = (np.abs(pixels - values[counts.argmax()]).sum(-1) > 90).astype(np.uint8)
    rows, columns = np.nonzero(labels)
    x, y = (float(v.mean()) if len(v) else 32.0 for v in (columns, rows))
    if rng.random() < 0.5:
        image, labels, x = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), labels[:, ::-1], 63 - x
    return Picture(image, labels, None, [Thing(shape, color, x, y, math.sqrt(max(1, len(rows))) / 2)])
