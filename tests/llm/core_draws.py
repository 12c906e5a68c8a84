"""Random engines and requests for the core's fake model: families, pools, pictures, further turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from services.llm.kv_cache import KvCache
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.scheduler import Scheduler
from services.llm.sequence import RowSpan, Sequence
from tests.llm.core_fakes import END, NAN_TOKEN, PLACEHOLDER, FakeEngine, Request

BOOK = [2 + (i * i) % 11 for i in range(29)]
LOOKS = (4, 4, 6, 4)  # rows of the pictures that come back


@dataclass(frozen=True)
class Family:
    """What a model family looks like to the core."""

    kinds: tuple[tuple[Kind, int | None], ...]
    atoms: str = "none"  # none, items, prompt

    def has(self, kind: Kind) -> bool:
        return any(k is kind for k, _ in self.kinds)


FULL, CROSS, PRUNED = (Kind.FULL, None), (Kind.CROSS, None), (Kind.PRUNED, None)


def sliding(window: int) -> tuple[Kind, int]:
    return Kind.SLIDING, window


FAMILIES = (
    Family((FULL,)),
    Family((FULL,), "items"),
    Family((FULL,), "prompt"),
    Family((sliding(5), FULL)),
    Family((sliding(9), FULL), "items"),
    Family((sliding(6),)),
    Family((FULL, CROSS)),
    Family((sliding(4), CROSS)),
    Family((FULL, PRUNED)),
    Family((FULL, PRUNED), "items"),
    Family((sliding(7), FULL, PRUNED)),
)


def random_engine(random: Random, family: Family) -> FakeEngine:
    """Pools between ample and barely enough, any budget, any number of slots, cache on or off."""
    size = random.choice((1, 2, 3, 4, 4, 8))
    low, high = random.choice(((24, 40), (40, 60), (60, 150), (200, 400)))
    groups = [LayerGroup(kind, max(2, -(-random.randint(low, high) // size)), window) for kind, window in family.kinds]
    kv = KvCache(groups, size, b"model", random.random() < 0.8)
    slots = random.randint(1, 5)
    budget = max(slots, random.choice((3, 7, 16, 64)))
    if family.atoms != "none":
        budget = max(budget, random.choice((6, 16, 48)))
    scheduler = Scheduler(kv, budget, slots, random.choice((1, 2, 16)), random.choice((0.0, 0.01, 0.2)))
    return FakeEngine(scheduler, random.choice((None, None, None, 1, 3)))


def random_request(random: Random, family: Family, number: int, history: Iterable[Request]) -> Request:
    """A prompt of pieces out of a small book, or a further turn of an earlier request, with media and everything else."""
    cross = family.has(Kind.CROSS)
    prompt: list[int] = []
    spans: list[RowSpan] = []
    contents: list[int] = []
    kept_atom: list[tuple[int, int]] = []
    earlier = [r for r in history if len(r.sequence.prompt) < 40]
    if earlier and random.random() < 0.5:
        turn = random.choice(earlier)
        prompt = turn.sequence.prompt + random.choice(turn.answers).output[: random.choice((0, 99))]
        spans = [RowSpan(s.offset, s.rows, 0, s.digest, s.tokens) for s in turn.sequence.spans]
        contents = turn.contents.copy()
        kept_atom = turn.sequence.atoms[:1]
        if kept_atom and not spans and random.random() < 0.4:  # the same beginning of an atom that ends otherwise
            prompt[kept_atom[0][1] - 1] = random.choice(BOOK)
        if spans and random.random() < 0.4:  # the same words about another picture
            at = random.randrange(len(spans))
            look = next(k for k in (random.randrange(len(LOOKS)), *range(len(LOOKS))) if LOOKS[k] == LOOKS[0])
            if not spans[at].digest:
                contents[at] = 100 + 4 * number
            elif spans[at].rows == LOOKS[look]:
                spans[at].digest, contents[at] = b"digest %d" % look, look
    else:
        prompt = BOOK[: random.choice((0, 3, 8, 13))]
    for _ in range(random.randint(0 if prompt else 1, 4)):
        piece = random.randrange(6)
        if piece < 2 and len(spans) < 3:
            look = random.randrange(len(LOOKS) + 1)  # pictures that come back, and one without a digest
            shared = look < len(LOOKS)
            rows = LOOKS[look] if shared else random.choice((2, 5))
            tokens = 1 if cross else rows
            spans.append(RowSpan(len(prompt), rows, 0, b"digest %d" % look if shared else b"", tokens))
            contents.append(look if shared else 100 + 4 * number + len(spans))
            prompt += [PLACEHOLDER] * tokens
        else:
            prompt += [BOOK[(piece * 5 + i) % len(BOOK)] for i in range(random.choice((1, 4, 8)))]
    if random.random() < 0.03:
        prompt.append(NAN_TOKEN)
    atoms = [(s.offset, s.offset + s.tokens) for s in spans if s.tokens > 1] if family.atoms == "items" else []
    if family.atoms == "prompt":
        atoms = kept_atom or [(0, len(prompt))]
    dropped = drop_from = 0
    if family.has(Kind.PRUNED) and spans and random.random() < 0.7:
        drop_from = spans[-1].offset
        dropped = random.randint(0, min(spans[-1].tokens, len(prompt) - 1 - drop_from))
    s = Sequence(
        str(number), prompt, random.choice((1, 4, 12, 24)), frozenset({END}),
        min_tokens=random.choice((0, 0, 3)), priority=random.choice((0, 0, 0, 1, 2)), n=random.choice((1, 1, 1, 2, 3)),
        spans=spans, atoms=atoms, salt=b"tenant" if random.random() < 0.1 else b"",
        cross_rows=sum(x.rows for x in spans) if cross else 0, dropped=dropped, drop_from=drop_from if dropped else 0,
        cacheable=random.random() < 0.95,
    )  # fmt: skip
    return Request(s, contents)
