"""Scores the embedded model through the running stack: real processes, gRPC, PNG bytes, streamed answers.

Published data first (easy-VQA's test split, scikit-learn's handwritten digits of held-out writers), then fresh drawings
of our own generator with held-out fonts. An answer counts only if it is the expected string exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

import triptych
from scripts.embedded import pictures, questions
from scripts.local_stack import local_stack
from services.models.checkpoint import EMBEDDED

CONCURRENT = 16
TARGETS = {"easy-VQA": 0.95, "handwritten digits": 0.90}
RECORD = EMBEDDED / "accuracy.json"


@dataclass(frozen=True)
class Question:
    """One question about one encoded picture; it counts for ``group`` and, within it, ``kind``."""

    group: str
    kind: str
    image: bytes
    text: str
    answer: str


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def easy_vqa_test() -> Iterator[Question]:
    """All 9,673 published test questions."""
    import easy_vqa

    paths = easy_vqa.get_test_image_paths()
    encoded = {i: Path(path).read_bytes() for i, path in paths.items()}
    for text, answer, image_id in zip(*easy_vqa.get_test_questions(), strict=True):
        kind = "yes/no" if answer in ("yes", "no") else "shape" if answer in pictures.EASY_SHAPES else "color"
        yield Question("easy-VQA", kind, encoded[image_id], text, answer)


def handwritten_test() -> Iterator[Question]:
    """The last third of scikit-learn's digits, other writers than in training, as 8 x 8 pictures, dark on white."""
    images, targets = pictures.handwritten_digits()
    for pixels, target in list(zip(images, targets, strict=True))[pictures.HANDWRITTEN_TRAINING :]:
        yield Question("handwritten digits", "digit", png(Image.fromarray(pixels)), "what digit is this?", str(target))


def drawings(count: int, seed: int = 20_261_129) -> Iterator[Question]:
    """Fresh scenes and printed numbers; a seed that training never used, and fonts it never saw."""
    rng = random.Random(seed)
    for _ in range(count):
        scene = pictures.scene(rng, *rng.choice(pictures.SCENE_GRIDS))
        for kind, text, answer in questions.ask(rng, scene):
            yield Question("several shapes", kind, png(scene.image), text, answer)
        digits = rng.choice([1, 2, 3])
        number = pictures.number(rng, *rng.choice(pictures.NUMBER_GRIDS[digits]), digits, held_out=True)
        for kind, text, answer in questions.ask(rng, number):
            yield Question("printed numbers", kind, png(number.image), text, answer)


async def score(address: str, asked: list[Question]) -> dict[str, dict[str, list[int]]]:
    """``{group: {kind: [right, asked]}}``."""
    table: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    todo = iter(asked)
    done, started = 0, time.monotonic()
    async with triptych.AsyncClient(address) as client:

        async def worker() -> None:
            nonlocal done
            for question in todo:
                result = await client.chat([triptych.image(question.image), question.text], max_tokens=48)
                cell = table[question.group][question.kind]
                cell[0] += result.text == question.answer
                cell[1] += 1
                done += 1
                if done % 1000 == 0:
                    rate = done / (time.monotonic() - started)
                    print(f"{done}/{len(asked)} questions, {rate:.0f} a second", file=sys.stderr, flush=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT):
                group.create_task(worker())
    return table


def report(table: dict[str, dict[str, list[int]]]) -> dict[str, dict[str, float | int]]:
    """Print a line a kind; returns what is recorded."""
    record: dict[str, dict[str, float | int]] = {}
    for group, kinds in table.items():
        right, asked = (sum(cell[i] for cell in kinds.values()) for i in (0, 1))
        target = f"   target {TARGETS[group]:.0%}" if group in TARGETS else ""
        print(f"{group:20} {right / asked:7.1%}  of {asked:5} questions{target}")
        for kind, (good, all_) in sorted(kinds.items()):
            print(f"    {kind:16} {good / all_:7.1%}  of {all_:5}")
        record[group] = {"questions": asked, "accuracy": round(right / asked, 4)}
        record[group] |= {kind: round(good / all_, 4) for kind, (good, all_) in sorted(kinds.items())}
    return record


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m scripts.embedded.evaluate --drawings 300 --write",
    )
    parser.add_argument("--model", default="", help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--drawings", type=int, default=200, help="fresh scenes, and as many numbers")
    parser.add_argument("--write", action="store_true", help=f"record the figures in {RECORD.name} beside the weights")
    args = parser.parse_args(argv)
    asked = [*easy_vqa_test(), *handwritten_test(), *drawings(args.drawings)]
    with local_stack(*(["--model", args.model] if args.model else [])) as stack:
        table = asyncio.run(score(stack.address, asked))
    record = report(table)
    if args.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    missed = [group for group, target in TARGETS.items() if record[group]["accuracy"] < target]
    if missed:
        print(f"below target: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
