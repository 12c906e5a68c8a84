"""Turns pictures and their questions into batches: patches with a label each, tokens with targets and positions.

One picture carries several question blocks that cannot see each other, so the picture is paid for once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from scripts.embedded import build, questions
from scripts.embedded.pictures import CELL, COLOR_NAMES, PATCH, SHAPES, Picture

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
CLASSES = (len(COLOR_NAMES) + 1, len(SHAPES) + 1, 11, 10, 5, 6)  # colour, shape, digit, place, rank, count; 0 is background
IGNORE = -100


@dataclass
class Batch:
    """Pictures of one size with their question blocks.

    patches ``[pictures * cells * 4, patch_dim]`` float32, labels ``[pictures * cells * 4, len(CLASSES)]``, ids,
    targets, weights, block and shown ``[pictures, length]``, positions ``[3, pictures, length]``; kinds[i] lists (kind, block)
    of picture i.
    """

    grid: tuple[int, int]
    patches: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    block: torch.Tensor
    shown: torch.Tensor
    positions: torch.Tensor
    kinds: list[list[tuple[str, int]]]


class Encoder:
    """Turns pictures and questions into batches."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {token: tokenizer.convert_tokens_to_ids(token) for token in build.SPECIAL}
        self.cache: dict[str, list[int]] = {}
        words = [*COLOR_NAMES, *SHAPES]
        self.attributes = {ids[0]: w for w in words for ids in (self.text(w), self.text(" " + w)) if len(ids) == 1}

    def text(self, words: str) -> list[int]:
        if words not in self.cache:
            self.cache[words] = self.tokenizer(words, add_special_tokens=False)["input_ids"]
        return self.cache[words]

    def turn(self, role: str) -> list[int]:
        return [self.special["<|im_start|>"], *self.text(f"{role}\n")]

    @property
    def end(self) -> list[int]:
        return [self.special["<|im_end|>"], *self.text("\n")]

    def batch(
        self, rng: random.Random, samples: list[tuple[Picture | None, list[questions.Triple]]], question_first: bool
    ) -> Batch:
        picture = samples[0][0]
        rows, columns = (picture.labels.shape[0] // CELL, picture.labels.shape[1] // CELL) if picture else (0, 0)
        lead = self.turn("system") + self.text("You are a helpful assistant.") + self.end if rng.random() < 0.12 else []
        lead += self.turn("user")
        vision = [
            self.special["<|vision_start|>"],
            *[self.special["<|image_pad|>"]] * (rows * columns),
            self.special["<|vision_end|>"],
        ]
        records = []
        for picture, triples in samples:
            things = picture.things if picture else []
            present = {t.color for t in things} | {t.shape for t in things}
            record = _Record()
            record.append(lead, None)
            if picture and not question_first:
                record.append_picture(vision, rows, columns)
            for number, (kind, question, answer) in enumerate(triples, 1):
                record.fork(number)
                ids = self.text(question)
                record.append(ids, None)
                if things:
                    record.shown[-len(ids) :] = [
                        int(self.attributes[i] in present) if i in self.attributes else IGNORE for i in ids
                    ]
                if picture and question_first:
                    record.append_picture(vision, rows, columns)
                record.append(self.end + self.turn("assistant"), None)
                record.append([*self.text(answer), self.special["<|im_end|>"]], "target")
                record.kinds.append((kind, number))
            records.append(record)
        return self.collate(records, [p for p, _ in samples if p], (rows, columns))

    def collate(self, records: list[_Record], seen: list[Picture], grid: tuple[int, int]) -> Batch:
        length = max(len(r.ids) for r in records)
        ids = np.zeros((len(records), length), np.int64)
        targets = np.full_like(ids, IGNORE)
        weights = np.zeros(ids.shape, np.float32)
        block = np.full_like(ids, -1)
        shown = np.full_like(ids, IGNORE)
        positions = np.zeros((3, *ids.shape), np.int64)
        for i, r in enumerate(records):
            n = len(r.ids)
            ids[i, :n], targets[i, :n], block[i, :n], shown[i, :n] = r.ids, r.targets, r.block, r.shown
            weights[i, :n] = r.weights
            positions[:, i, :n] = np.array(r.positions).T
        patches = np.concatenate([patchify(p) for p in seen]) if seen else np.zeros((0, 6 * PATCH * PATCH), np.float32)
        labels = np.concatenate([patch_labels(p) for p in seen]) if seen else np.zeros((0, len(CLASSES)), np.int64)
        tensors = (torch.from_numpy(x) for x in (patches, labels, ids, targets, weights, block, shown, positions))
        return Batch(grid, *tensors, [r.kinds for r in records])


class _Record:
    """One row under construction: a shared prefix (block 0), then blocks that restart behind it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.targets: list[int] = []
        self.weights: list[float] = []  # every answer counts the same, however long
        self.block: list[int] = []
        self.shown: list[int] = []
        self.positions: list[tuple[int, int, int]] = []
        self.kinds: list[tuple[str, int]] = []
        self.next = self.prefix_next = self.current = 0

    def fork(self, number: int) -> None:
        if number == 1:
            self.prefix_next = self.next
        self.next, self.current = self.prefix_next, number

    def append(self, ids: list[int], role: str | None) -> None:
        self.ids += ids
        self.targets += ids if role == "target" else [IGNORE] * len(ids)
        self.weights += [1 / len(ids)] * len(ids)
        self.block += [self.current] * len(ids)
        self.shown += [IGNORE] * len(ids)
        self.positions += [(p, p, p) for p in range(self.next, self.next + len(ids))]
        self.next += len(ids)

    def append_picture(self, vision: list[int], rows: int, columns: int) -> None:
        self.append(vision[:1], None)
        start = self.next
        self.ids += vision[1:-1]
        self.targets += [IGNORE] * (rows * columns)
        self.weights += [0.0] * (rows * columns)
        self.block += [self.current] * (rows * columns)
        self.shown += [IGNORE] * (rows * columns)
        self.positions += [(start, start + r, start + c) for r in range(rows) for c in range(columns)]
        self.next = start + max(rows, columns)
        self.append(vision[-1:], None)


def merged_order(a: np.ndarray) -> np.ndarray:
    """``[height, width, ...]`` in patches to Qwen2-VL's order: 2 x 2 patches of one cell stand together."""
    rows, columns = a.shape[0] // 2, a.shape[1] // 2
    return a.reshape(rows, 2, columns, 2, *a.shape[2:]).swapaxes(1, 2).reshape(4 * rows * columns, *a.shape[2:])


def patchify(picture: Picture) -> np.ndarray:
    """``[patches, 3 * 2 * 8 * 8]``: what the processor makes of a picture that already has a serving size."""
    pixels = (np.asarray(picture.image, np.float32) / 255 - MEAN) / STD  # [height, width, 3]
    h, w = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    cells = merged_order(pixels.reshape(h, PATCH, w, PATCH, 3).transpose(0, 2, 4, 1, 3))  # [patches, 3, 8, 8]
    return np.repeat(cells[:, :, None], 2, axis=2).reshape(len(cells), -1)


def patch_labels(picture: Picture) -> np.ndarray:
    """``[patches, len(CLASSES)]``: the classes of what covers most of each patch; ignored where unknown."""
    things = picture.things
    width, height = picture.image.size
    table = [(0, 0, 0, 0, 0, 0)]
    if picture.number is None:
        ranks = sorted(range(len(things)), key=lambda i: things[i].x)
        for i, t in enumerate(things):
            place = 1 + 3 * third(t.y / height) + third(t.x / width)
            known = (COLOR_NAMES.index(t.color) + 1, SHAPES.index(t.shape) + 1, 0)
            table.append((*known, place, ranks.index(i) + 1, len(things)))
    else:
        color = IGNORE if picture.number_color is None else COLOR_NAMES.index(picture.number_color) + 1
        for i, digit in enumerate(picture.number):
            table.append((color, 0, int(digit) + 1, IGNORE, i + 1, len(picture.number)))
    h, w = picture.labels.shape[0] // PATCH, picture.labels.shape[1] // PATCH
    cells = merged_order(picture.labels.reshape(h, PATCH, w, PATCH).swapaxes(1, 2)).reshape(h * w, -1)
    counts = np.stack([(cells == i).sum(1) for i in range(len(table))], 1)
    counts[:, 0] = np.minimum(counts[:, 0], PATCH * PATCH * 3 // 4)  # a quarter of a patch is enough to count as ink
    return np.array(table, np.int64)[counts.argmax(1)]


def third(share: float) -> int:
    """0, 1 or 2: the near, middle or far third, the middle a little narrower."""
    return 0 if share < 0.39 else 2 if share > 0.61 else 1
