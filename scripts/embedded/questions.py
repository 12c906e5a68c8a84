"""Questions in English about a picture, each with its one right answer.

``ask`` returns ``(kind, question, answer)`` triples; a kind is a row of the score table. Knows nothing of tokens.
"""

from __future__ import annotations

import itertools
import random

from scripts.embedded.pictures import COLOR_NAMES, EASY_COLORS, EASY_SHAPES, SHAPES, Picture, Thing

Triple = tuple[str, str, str]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five"]
HELLO = "Hello! Send me a picture of shapes or digits and ask me about it."
CHAT: list[tuple[list[str], str]] = [
    (["hello", "hi", "hello!", "hey", "good morning", "hi there"], HELLO),
    (
        ["who are you?", "what are you?", "what is your name?", "what can you do?", "help", "what do you know?"],
        "I am a small model that comes with Triptych. I can tell shapes, colors, places and digits in a picture.",
    ),
    (["thank you", "thanks", "thanks!", "thank you very much"], "You are welcome."),
    (["bye", "goodbye", "see you"], "Goodbye!"),
    (["how are you?", "are you well?"], "I am well, thank you. Show me a picture."),
]
NO_PICTURE = "I see no picture. Please send one."


def ask(rng: random.Random, picture: Picture, negation: float = 0.5) -> list[Triple]:
    """Every kind of question that this picture has one clear answer to, in random order and spelling.

    ``negation`` is the share of yes-or-no questions that are asked the other way round ("is there not a ...?").
    """
    if picture.handwritten:
        triples = handwritten_questions(rng, picture)
    elif picture.number is not None:
        triples = number_questions(rng, picture)
    else:
        triples = scene_questions(rng, picture, negation)
    rng.shuffle(triples)
    return [(kind, spell(rng, question), answer) for kind, question, answer in triples]


def chat(rng: random.Random) -> tuple[str, str]:
    """A question without a picture."""
    if rng.random() < 0.5:
        questions, answer = rng.choice(CHAT)
        return spell(rng, rng.choice(questions)), answer
    color, shape = rng.choice(COLOR_NAMES), rng.choice(SHAPES)
    about = [
        f"what color is the {shape}?",
        f"what shape is {color}?",
        "what is in the picture?",
        "what digit is this?",
        "what number is this?",
        f"how many {shape}s are there?",
        "how many shapes are there?",
        f"where is the {color} {shape}?",
        "describe the picture.",
        "what shape is in the image?",
        "what is the color of the shape?",
        f"is there a {color} shape?",
    ]
    return spell(rng, rng.choice(about)), NO_PICTURE


def spell(rng: random.Random, question: str) -> str:
    """The same question as different people write it."""
    if rng.random() < 0.3:
        question = question.replace("image", "picture") if rng.random() < 0.5 else question.replace("picture", "image")
    if rng.random() < 0.1:
        question = question.replace("color", "colour")
    if rng.random() < 0.55:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.08:
        question = question.rstrip("?.")
    return question


def a(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def handwritten_questions(rng: random.Random, picture: Picture) -> list[Triple]:
    digit = picture.number or ""
    question = rng.choice(
        [
            "what digit is this?",
            "what digit is this?",
            "which digit is this?",
            "what digit is in the image?",
            "read the digit.",
            "what number is this?",
            "what digit do you see?",
            "what is this?",
            "which digit is shown?",
            "what digit is shown?",
        ]
    )
    return [("handwritten", question, digit)]


def number_questions(rng: random.Random, picture: Picture) -> list[Triple]:
    text = picture.number or ""
    reading = [
        "what number is this?",
        "what number is shown?",
        "read the number.",
        "what number is in the image?",
        "what is the number?",
        "which number is this?",
        "what does the picture say?",
        "what is written here?",
        "what number do you see?",
        "what is this?",
    ]
    if len(text) == 1:
        reading += ["what digit is this?", "what digit is this?", "which digit is shown?", "what digit do you see?"]
    triples = [
        (f"printed_{len(text)}", rng.choice(reading), text),
        (f"printed_{len(text)}", rng.choice(reading), text),
        (
            "digit_count",
            rng.choice(["how many digits are there?", "how many digits do you see?", "how many digits does the number have?"]),
            NUMBER_WORDS[len(text)],
        ),
        (
            "number_color",
            rng.choice(["what color is the number?", "what color is the text?", "what is the color of the number?"]),
            picture.number_color or "",
        ),
    ]
    if picture.background:
        triples.append(
            ("background", rng.choice(["what color is the background?", "what is the background color?"]), picture.background)
        )
    if rng.random() < 0.3:
        triples.append(
            (
                "describe",
                rng.choice(["describe the picture.", "what is in the picture?", "what do you see?"]),
                f"the number {text} in {picture.number_color}.",
            )
        )
    return triples


def place(thing: Thing, width: int, height: int) -> str | None:
    """One of nine places, or None where two people could disagree."""

    def third(value: float) -> int | None:
        return 0 if value < 0.36 else 2 if value > 0.64 else 1 if 0.42 < value < 0.58 else None

    column, row = third(thing.x / width), third(thing.y / height)
    if column is None or row is None:
        return None
    if row == 1 and column == 1:
        return "in the center"
    if row == 1:
        return f"on the {['left', '', 'right'][column]}"
    if column == 1:
        return f"at the {['top', '', 'bottom'][row]}"
    return f"in the {['top', '', 'bottom'][row]} {['left', '', 'right'][column]}"


def scene_questions(rng: random.Random, picture: Picture, negation: float) -> list[Triple]:
    things = picture.things
    easy = picture.background is None
    width, height = picture.image.size
    colors, shapes = (EASY_COLORS, EASY_SHAPES) if easy else (COLOR_NAMES, SHAPES)
    triples = [t for _ in range(3 if easy else 2) for t in presence_questions(rng, things, colors, shapes, negation)]
    if len(things) == 1:
        triples += single_questions(rng, things[0])
    for thing in rng.sample(things, min(2, len(things))):
        shape, color = thing.shape, thing.color
        if sum(t.shape == shape for t in things) == 1:
            triples.append(
                (
                    "color",
                    rng.choice(
                        [f"what color is the {shape}?", f"what is the color of the {shape}?", f"which color is the {shape}?"]
                    ),
                    color,
                )
            )
        if sum(t.color == color for t in things) == 1:
            triples.append(
                (
                    "shape",
                    rng.choice(
                        [
                            f"what is the {color} shape?",
                            f"what shape is {color}?",
                            f"which shape is {color}?",
                            f"what is the {color} thing?",
                            f"what shape is the {color} object?",
                        ]
                    ),
                    shape,
                )
            )
        where = place(thing, width, height)
        if where and sum((t.shape, t.color) == (shape, color) for t in things) == 1:
            triples.append(
                (
                    "where",
                    rng.choice(
                        [f"where is the {color} {shape}?"]
                        + [f"where is the {shape}?"] * (sum(t.shape == shape for t in things) == 1)
                    ),
                    where,
                )
            )
    if not easy:
        triples += counting_questions(rng, things)
        triples.append(
            (
                "background",
                rng.choice(["what color is the background?", "what is the background color?"]),
                picture.background or "",
            )
        )
    if not easy or rng.random() < 0.2:
        triples += layout_questions(rng, things)
    return triples


def single_questions(rng: random.Random, thing: Thing) -> list[Triple]:
    return [
        (
            "shape",
            rng.choice(
                [
                    "what shape is in the image?",
                    "what shape does the image contain?",
                    "what shape is present?",
                    "what shape is this?",
                    "which shape is in the picture?",
                ]
            ),
            thing.shape,
        ),
        ("color", rng.choice(["what color is the shape?", "what is the color of the shape?", "what color is it?"]), thing.color),
    ]


def presence_questions(
    rng: random.Random, things: list[Thing], colors: list[str], shapes: list[str], negation: float
) -> list[Triple]:
    """Yes-or-no questions, half of them true, in easy-VQA's wording (negations too) and plainer ones."""
    triples = []
    for by_color in (True, False):
        present = rng.random() < 0.5
        have = {t.color for t in things} if by_color else {t.shape for t in things}
        pool = sorted(have) if present else [w for w in (colors if by_color else shapes) if w not in have]
        if not pool:
            continue
        word = rng.choice(pool)
        what = f"{word} shape" if by_color else word
        plain = rng.random() >= negation
        question = rng.choice(
            [
                f"is there {a(what)}?",
                f"is there {a(what)} in the image?",
                f"does the image contain {a(what)}?",
                f"is {a(what)} present?",
            ]
            if plain
            else [
                f"is there not {a(what)}?",
                f"is there not {a(what)} in the image?",
                f"does the image not contain {a(what)}?",
                f"is no {what} present?",
            ]
        )
        triples.append(("yes_no" if plain else "yes_no_not", question, "yes" if plain == present else "no"))
    if len(things) > 1 or rng.random() < 0.15:
        thing = rng.choice(things)
        color, shape = thing.color, thing.shape
        if rng.random() < 0.5:
            color, shape = (rng.choice(colors), shape) if rng.random() < 0.5 else (color, rng.choice(shapes))
        answer = "yes" if any((t.color, t.shape) == (color, shape) for t in things) else "no"
        triples.append(
            (
                "yes_no_both",
                rng.choice(
                    [
                        f"is there {a(color)} {shape}?",
                        f"do you see {a(color)} {shape}?",
                        f"does the image contain {a(color)} {shape}?",
                    ]
                ),
                answer,
            )
        )
    return triples


def counting_questions(rng: random.Random, things: list[Thing]) -> list[Triple]:
    shape = rng.choice([rng.choice(things).shape, rng.choice(SHAPES)])
    color = rng.choice([rng.choice(things).color, rng.choice(COLOR_NAMES)])
    triples = [
        (
            "count",
            rng.choice(
                [
                    "how many shapes are there?",
                    "how many shapes are in the picture?",
                    "how many objects are there?",
                    "how many shapes do you see?",
                ]
            ),
            NUMBER_WORDS[len(things)],
        )
    ]
    if rng.random() < 0.5:
        triples.append(
            (
                "count_shape",
                rng.choice([f"how many {shape}s are there?", f"how many {shape}s do you see?"]),
                NUMBER_WORDS[sum(t.shape == shape for t in things)],
            )
        )
    else:
        triples.append(
            (
                "count_color",
                rng.choice([f"how many {color} shapes are there?", f"how many shapes are {color}?"]),
                NUMBER_WORDS[sum(t.color == color for t in things)],
            )
        )
    return triples


def layout_questions(rng: random.Random, things: list[Thing]) -> list[Triple]:
    """What stands left and right, and the whole picture from left to right, where the order is plain to see."""
    ordered = sorted(things, key=lambda t: t.x)
    if any(right.x - left.x < 6 for left, right in itertools.pairwise(ordered)):
        return []
    phrases = [a(f"{t.color} {t.shape}") for t in ordered]
    described = phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]
    triples = [
        (
            "describe",
            rng.choice(["describe the picture.", "what is in the picture?", "what do you see?", "describe the image."]),
            described + ".",
        )
    ]
    if len(things) > 1:
        triples.append(
            (
                "left_right",
                *rng.choice([("what is on the left?", phrases[0] + "."), ("what is on the right?", phrases[-1] + ".")]),
            )
        )
    return triples
