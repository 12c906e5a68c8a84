"""Every family with requests, the oracle's answers to them and the rows that their media become."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from services.llm.config import LlmConfig
from services.llm.merge import MediaRun
from services.llm.model_runner import ModelRunner
from services.llm.request import GenerateArguments
from services.llm.sampler import Sampling
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Grid
from tests.oracle import Item
from tests.reference import NEW_TOKENS, Answer, Oracle, asks_for

Features = list[torch.Tensor]  # of one run: [rows, hidden] each


@dataclass(frozen=True)
class Ask:
    """One request as the language model gets it, and what the oracle answers."""

    answer: Answer
    media: list[MediaRun]
    features: list[Features]

    def arguments(self, name: str, **changes: object) -> GenerateArguments:
        """Greedy, of the oracle's length; every item's digest is that of its rows."""
        fields: dict[str, object] = {
            "id": name,
            "prompt": list(self.answer.prompt),
            "max_tokens": NEW_TOKENS,
            "end_token_ids": frozenset(),
            "min_tokens": 0,
            "priority": 0,
            "n": 1,
            "media": self.media,
            "digests": [features[0].numpy().tobytes()[:4096] for features in self.features],
            "salt": b"",
            "sampling": Sampling(),
            "grammar": None,
            "include_first_logits": False,
            "prompt_logprobs": None,
            "visual_token_keep": None,
        }
        return GenerateArguments(**(fields | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A loaded half with its asks."""

    checkpoint: Checkpoint
    runner: ModelRunner
    asks: list[Ask]


def load_case(path: Path, count: int = 5, tokens: range = range(1, 1 << 20), **options: object) -> Case:
    """The family's language-model half beside what the whole model answers to ``count`` requests.

    Those whose prompt and answer do not have ``tokens`` tokens all the time are left out.
    """
    checkpoint = open_checkpoint(str(path))
    oracle = Oracle(path)
    asks = []
    for ask in asks_for(checkpoint.family.model_type, 5, count):
        length = oracle.inputs(ask)["input_ids"].shape[1]
        if length not in tokens or length + NEW_TOKENS not in tokens:
            continue
        answer = oracle.answer(ask)
        media, features = [], []
        for item, run in _runs(checkpoint, answer.prompt, oracle.items(answer.inputs)):
            media.append(run)
            features.append(item)
        asks.append(Ask(answer, media, features))
    settings: dict[str, object] = {
        "dtype": "float32", "block_size": 4, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 8192,
        "max_model_len": min(8192, checkpoint.max_position_embeddings),
    }  # fmt: skip
    return Case(checkpoint, ModelRunner(checkpoint, LlmConfig(**(settings | options))), asks)  # type: ignore[arg-type]


def _runs(checkpoint: Checkpoint, prompt: list[int], items: list[Item]) -> list[tuple[Features, MediaRun]]:
    """Each item's features, run of placeholders by run."""
    family = checkpoint.family
    found = []
    tokens = {checkpoint.placeholder_id(modality): modality for modality in family.modalities}
    places = [(i, tokens[t]) for i, t in enumerate(prompt) if t in tokens]
    stretches = [list(run) for _, run in groupby(enumerate(places), key=lambda p: (p[1][0] - p[0], p[1][1]))]
    runs = [(stretch[0][1][0], len(stretch)) for stretch in stretches]
    if family.cross:
        for (offset, _), item in zip([(place, 1) for place, _ in places], items, strict=True):
            grid = Grid(item.details["tiles"], item.details["max_tiles"], item.details["patches"])
            found.append(([item.rows], MediaRun(item.modality, offset, len(item.rows), grid, tokens=1)))
        return found
    for item in items:
        taken = 0
        while taken < len(item.rows):
            offset, length = runs.pop(0)
            if length > len(item.rows) - taken:  # items side by side
                runs.insert(0, (offset + len(item.rows) - taken, length - len(item.rows) + taken))
                length = len(item.rows) - taken
            grid = item.grid if length == len(item.rows) else Grid(1, item.grid.h, item.grid.w)
            features = [feature[taken : taken + length] for feature in (item.rows, *item.deepstack)]
            seconds = float(item.details.get("second_per_grid", 1.0))
            found.append((features, MediaRun(item.modality, offset, length, grid, seconds)))
            taken += length
    assert not runs, "placeholders without an item"
    return found
