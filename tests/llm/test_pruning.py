"""FastV against a dense reference that keeps no cache: tokens and every step's logits, alone, mixed, preempted, forked."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from services.common.errors import ServiceError
from services.llm.attention.layers import probe_layers
from services.llm.config import LlmConfig, Pruning
from services.llm.layer_groups import Kind
from services.llm.merge import Merger
from services.llm.model_runner import ModelRunner
from services.llm.pruning import dropping, obstacle
from services.llm.request import GenerateArguments, Limits, read_generate
from services.llm.service import LlmService
from services.llm.structured import Grammars
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.half import load_half
from services.models.media import Modality
from services.models.registry import UnsupportedModel
from tests.llm.families import Ask, Case, load_case
from tests.llm.test_matrix import Stepped
from tests.reference import NEW_TOKENS, Answer
from triptych.common.v1 import media_pb2, sampling_pb2
from triptych.llm.v1 import llm_pb2

Dirs = Callable[[str], Path]
KEEPS = (0.25, 0.5, 1.0)
FIRST_LAYERS = {
    "llava": (1, 2, 3), "llava_next": (1, 2), "qwen2_vl": (1, 2), "qwen2_5_vl": (1, 2), "qwen3_vl": (3,), "smolvlm": (1, 2),
    "internvl": (1, 2), "qwen2_5_omni_thinker": (2,),
}  # fmt: skip


class Dense:
    """Answers by running every layer over the whole text again and again, with transformers' eager attention."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = load_half(checkpoint, "llm", torch.float32, "cpu")
        self.merger = Merger(self.model, checkpoint)
        self.decoder = self.merger.decoder
        self.decoder.config._attn_implementation = "eager"

    @torch.inference_mode()
    def answer(self, ask: Ask, first: int, keep: float) -> Answer:
        """What layers from ``first`` on say that see the share ``keep`` of the visual tokens."""
        prompt = ask.answer.prompt
        merged = self.merger.merge(prompt, ask.media)
        for item, (run, features) in enumerate(zip(ask.media, ask.features, strict=True)):
            for feature, rows in enumerate(features):
                merged.write(item, run, 0, feature, rows)
        visual = [t for run in ask.media if run.modality is not Modality.AUDIO for t in range(run.offset, run.stop)]
        attention = self._attention(merged.embeds, merged.positions, merged, first)[:, len(prompt) - 1].mean(0)
        best = sorted(visual, key=lambda t: (-float(attention[t]), t))
        gone = set(best[max(1, round(keep * len(visual))) :])
        numbers = torch.arange(NEW_TOKENS - 1) + merged.next_position
        positions = torch.cat([merged.positions, numbers.expand(len(merged.positions), -1)], dim=1)
        kept = torch.tensor([t for t in range(len(prompt) + NEW_TOKENS - 1) if t not in gone])
        tokens = ask.answer.tokens  # a guess: each time at least one more token is what the ones before it call for
        while True:
            embeds = torch.cat([merged.embeds, self.merger.embed(torch.tensor(tokens[:-1]))])
            hidden = self._layers(embeds, positions, merged, first, kept)[-NEW_TOKENS:]
            logits = self.model.get_output_embeddings()(self.decoder.norm(hidden))
            guess, tokens = tokens, logits.argmax(-1).tolist()
            if guess == tokens:
                return dataclasses.replace(ask.answer, tokens=tokens, logits=logits)

    def _attention(self, embeds: torch.Tensor, positions: torch.Tensor, merged: Any, first: int) -> torch.Tensor:
        """Weights ``[heads, tokens, tokens]`` of the layer before ``first``."""
        seen = []
        attention = self.decoder.layers[first - 1].self_attn
        handle = attention.register_forward_hook(lambda module, args, output: seen.append(output[1][0]))
        self._layers(embeds, positions, merged, first, torch.arange(len(embeds)))
        handle.remove()
        return seen[0]

    def _layers(self, embeds: torch.Tensor, positions: torch.Tensor, merged: Any, first: int, kept: torch.Tensor) -> torch.Tensor:
        hidden = embeds[None]
        rotary = self.decoder.rotary_emb(hidden, positions[:, None] if len(positions) > 1 else positions)
        for index, layer in enumerate(self.decoder.layers):
            if index == first:
                hidden, rotary = hidden[:, kept], tuple(r[..., kept, :] for r in rotary)
            mask = torch.full((hidden.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
            if merged.deepstack is not None and index < len(merged.deepstack):
                hidden[0, : len(merged.media)][merged.media] += merged.deepstack[index]
        return hidden[0]


@dataclass(frozen=True)
class PrunedAsk(Ask):
    """An ask with the share that it wants to keep."""

    keep: float | None = None

    def arguments(self, name: str, **changes: object) -> GenerateArguments:
        return super().arguments(name, visual_token_keep=self.keep, **changes)


class Bench:
    """A family's asks with the answers that the reference gives to them, and engines pruned from any layer on."""

    def __init__(self, path: Path) -> None:
        self.case = load_case(path)
        self.dense = Dense(self.case.checkpoint)
        self.answer = cache(self._answer)
        self.pruned = cache(self._pruned)

    def _answer(self, index: int, first: int, keep: float) -> Answer:
        ask = self.case.asks[index]
        if keep == 1.0 or not dropping(ask.media, keep)[0]:
            return ask.answer  # what generate() says
        return self.dense.answer(ask, first, keep)

    def _pruned(self, first: int) -> Case:
        """An engine's parts where half of the visual tokens stay if a request says nothing."""
        config = LlmConfig(
            dtype="float32", block_size=4, kv_cache_memory_bytes=64 << 20, max_num_seqs=8, max_num_batched_tokens=8192,
            max_model_len=4096, visual_token_pruning=f"fastv:K={first},keep=0.5",
        )  # fmt: skip
        return dataclasses.replace(self.case, runner=ModelRunner(self.case.checkpoint, config))

    def asks(self, first: int, keeps: tuple[float | None, ...]) -> list[Ask]:
        """All asks; their shares are ``keeps`` in turn."""
        made: list[Ask] = []
        for index, ask in enumerate(self.case.asks):
            keep = keeps[index % len(keeps)]
            answer = self.answer(index, first, 0.5 if keep is None else keep)
            made.append(PrunedAsk(answer, ask.media, ask.features, keep))
        return made


@pytest.fixture(scope="module", params=sorted(FIRST_LAYERS))
def family(request: pytest.FixtureRequest, checkpoint_dir: Dirs) -> tuple[Bench, tuple[int, ...]]:
    return Bench(checkpoint_dir(request.param)), FIRST_LAYERS[request.param]


@pytest.fixture(scope="module")
def llava(checkpoint_dir: Dirs) -> Bench:
    return Bench(checkpoint_dir("llava"))


def watch_blocks(run: Stepped, saved: list[int]) -> Callable[[int], None]:
    """Before each step: the pruned group holds the kept tokens of every sequence and no more."""

    def look(step: int) -> None:
        kv = run.scheduler.kv
        pruned = [group.kind for group in kv.groups].index(Kind.PRUNED)
        for sequence in run.scheduler.running:
            if sequence.computed >= len(sequence.prompt):
                full, less = len(sequence.tables[0].blocks), len(sequence.tables[pruned].blocks)
                assert less == kv.pools[pruned].blocks_for(sequence.computed - sequence.dropped)
                saved.append(full - less)

    return look


def test_every_share_equals_the_reference(family: tuple[Bench, tuple[int, ...]]) -> None:
    bench, layers = family
    for first in layers:
        for keep in KEEPS:
            run, saved = Stepped(bench.pruned(first)), []  # type: ignore[var-annotated]
            asks = bench.asks(first, (keep,))
            run.check(asks, before_step=watch_blocks(run, saved))
            assert run.largest >= 4 and any(not ask.media for ask in asks)
            lost = [dropping(ask.media, keep)[0] for ask in asks]
            assert max(saved) >= max(lost) // 4 and (keep == 1.0) == (max(saved) == 0)


def test_the_reference_itself_tells_shares_apart(llava: Bench) -> None:
    """Dropping changes what is said, and dropping nothing is what generate() does."""
    for first in (1, 2, 3):
        ask = llava.case.asks[0]
        whole = llava.dense.answer(ask, first, 1.0)
        assert whole.tokens == ask.answer.tokens and float((whole.logits - ask.answer.logits).abs().max()) < 1e-4
        assert float((llava.answer(0, first, 0.25).logits[0] - ask.answer.logits[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_shares_mixed_in_a_step_and_preempted(family: tuple[Bench, tuple[int, ...]], seed: int) -> None:
    bench, layers = family
    rng = random.Random(seed)
    run = Stepped(bench.pruned(layers[-1]), threshold=[0, 7][seed], backend=["auto", "naive"][seed])
    steps = rng.sample(range(1, 11), 4)

    def preempt(step: int) -> None:
        if step in steps and run.scheduler.running:
            run.scheduler.preempt(rng.choice(run.scheduler.running))

    run.check(bench.asks(layers[-1], [(0.25, 1.0, None), (None, 0.5, 1.0, 0.25)][seed]), rows=11, before_step=preempt)
    assert run.scheduler.preemptions > 0


def test_two_answers_share_what_was_kept(family: tuple[Bench, tuple[int, ...]]) -> None:
    bench, layers = family
    run = Stepped(bench.pruned(layers[0]))

    def preempt(step: int) -> None:
        if step == 4:
            run.scheduler.preempt(run.scheduler.running[0])

    run.check(bench.asks(layers[0], (0.5, 0.25, 0.25, 1.0))[:4], n=2, before_step=preempt)
    assert run.largest > 4 and run.scheduler.preemptions == 1


def test_a_sequence_that_starts_over_keeps_the_same_tokens(llava: Bench) -> None:
    run = Stepped(llava.pruned(2))
    kept = []

    def preempt(step: int) -> None:
        if step == 5:
            (merged,) = run.runner._prompts.values()
            assert merged.visual is not None
            kept.append(merged.visual.kept)
            run.scheduler.preempt(run.scheduler.running[0])
        if step == 8:
            kept.append(next(iter(run.runner._prompts.values())).visual.kept)  # type: ignore[union-attr]

    run.check(llava.asks(2, (0.25,))[:1], before_step=preempt)
    assert kept[0] is not None and kept[0] is kept[1]


def test_blocks_of_a_pruned_picture_are_not_shared(llava: Bench) -> None:
    """What layers behind the cut keep depends on the question: only what stands before the picture is shared."""
    first, ask = 2, llava.case.asks[0]
    offset, stop = ask.media[0].offset, ask.media[-1].stop
    words = ask.answer.prompt[:3]
    prompts = [words + ask.answer.prompt[:stop] + [t] * 5 + ask.answer.prompt[stop:] for t in (21, 34)]
    media = [dataclasses.replace(run, offset=run.offset + 3) for run in ask.media]
    asks = {}
    for keep in (0.25, 1.0):
        for prompt in prompts:
            plain = Ask(dataclasses.replace(ask.answer, prompt=prompt), media, ask.features)
            asks[keep, prompts.index(prompt)] = PrunedAsk(llava.dense.answer(plain, first, keep), media, ask.features, keep)
    run = Stepped(llava.pruned(first))
    found = []
    for keep, question in ((0.25, 0), (0.25, 1), (0.25, 0), (1.0, 0), (1.0, 1), (0.25, 1)):
        run.cached = 0
        run.check([asks[keep, question]])
        found.append(run.cached)
    before = (offset + 3) // 4 * 4
    assert before > 0 and found == [0, before, before, before, (stop + 3) // 4 * 4, before]


CAN, CANNOT = Limits(1024, 100, 80, Pruning(2, 0.5)), Limits(1024, 100, 80)


@pytest.fixture(scope="module")
def read(checkpoint_dir: Dirs) -> Iterator[Callable[..., GenerateArguments]]:
    checkpoint = open_checkpoint(str(checkpoint_dir("llava")))
    grammars = Grammars(checkpoint.path, 1024, checkpoint.end_token_ids)
    image = checkpoint.placeholder_id(Modality.IMAGE)
    ref = media_pb2.EmbeddingRef(id="x", encoder_address="127.0.0.1:1")

    def read(limits: Limits, rows: int = 4, end: tuple[int, ...] = (8,), **sampling: Any) -> GenerateArguments:
        """An image of ``rows`` rows between words."""
        spans = [media_pb2.Span(modality=Modality.IMAGE.value, offset=1, rows=rows, ref=ref)] if rows else []
        tokens = [5, *[image] * rows, *end]
        params = sampling_pb2.SamplingParams(max_tokens=4, **sampling)
        request = llm_pb2.GenerateRequest(request_id="r", token_ids=tokens, spans=spans, sampling=params)
        return asyncio.run(read_generate(request, limits, checkpoint, grammars, 0))

    yield read
    grammars.close()


@pytest.mark.parametrize(
    ("limits", "asked", "text"),
    [
        (CANNOT, {"visual_token_keep": 0.5}, "start the llm service with --visual-token-pruning fastv:K=2"),
        (CANNOT, {"visual_token_keep": 0.5, "rows": 0}, "start the llm service with --visual-token-pruning fastv:K=2"),
        (dataclasses.replace(CANNOT, pruning_obstacle="a red model cannot"), {"visual_token_keep": 0.5}, "a red model cannot"),
        (CAN, {"visual_token_keep": 0.25, "end": ()}, "a prompt whose last token is visual, got 0.25"),
        (CAN, {"end": ()}, "a prompt whose last token is visual, got 0.5"),
        (CAN, {"visual_token_keep": 0.5, "prompt_logprobs": 1}, "beside prompt_logprobs"),
    ],
)
def test_requests_that_cannot_be_pruned_are_refused(
    read: Callable[..., GenerateArguments], limits: Limits, asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(ServiceError, match=text) as caught:
        read(limits, **asked)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT and caught.value.field == "sampling.visual_token_keep"


def test_requests_that_lose_nothing_are_taken(read: Callable[..., GenerateArguments]) -> None:
    assert read(CANNOT).visual_token_keep is None and read(CAN).visual_token_keep is None
    assert read(CANNOT, visual_token_keep=1, end=()).visual_token_keep == 1
    assert read(CAN, visual_token_keep=1, end=(), prompt_logprobs=1).visual_token_keep == 1
    assert read(CAN, visual_token_keep=0.25).visual_token_keep == 0.25
    assert read(CAN, rows=0, prompt_logprobs=1).media == []
    assert read(CAN, rows=1, end=()).visual_token_keep is None  # the only one always stays


def test_the_option() -> None:
    assert LlmConfig().pruning is None
    assert LlmConfig(visual_token_pruning="fastv:K=2").pruning == Pruning(2, 1.0)
    assert LlmConfig(visual_token_pruning="fastv:keep=0.5,K=13").pruning == Pruning(13, 0.5)
    assert (Pruning(2, 0.5).share(None), Pruning(2, 0.5).share(1.0)) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "must read fastv:K=2") for text in ("fastv", "fastv:", "on", "fastv:keep=0.5", "fastv:K=2,K=3", "fastv:k=2")),
        *((text, "must read fastv:K=2") for text in ("fastv:K=2,", "fastv:K=2,keep=1,x=3", "K=2", "vtw:K=2", "fastv:K=2;keep=1")),
        *((f"fastv:K={k}", "K must be a layer from 1 on") for k in ("0", "-1", "1.5", "x", "", " 2", "²")),
        *((f"fastv:K=2,keep={k}", "keep must be above 0 and at most 1") for k in ("0", "1.1", "-1", "nan", "half", "", "1e-1")),
    ],
)
def test_the_option_is_read_strictly(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LlmConfig(visual_token_pruning=text)


@pytest.mark.parametrize(
    ("name", "first", "words"),
    [
        ("llava", 4, "K must be below the model's 4 layers, got 4"),
        ("qwen3_vl", 2, "K must be at least 3, got 2: a qwen3_vl model adds features"),
        ("gemma3", 2, "a gemma3 model cannot drop visual tokens: tokens of its prompts see later ones"),
        ("paligemma", 2, "tokens of its prompts see later ones"),
        ("mllama", 2, "read by cross-attention"),
        ("qwen2_audio", 2, "a qwen2_audio model cannot drop visual tokens: it has none; leave out --visual-token-pruning"),
        ("llama", 2, "it has none"),
    ],
)
def test_models_that_cannot_be_pruned_are_refused_at_load(checkpoint_dir: Dirs, name: str, first: int, words: str) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(name)))
    config = LlmConfig(dtype="float32", max_model_len=64, kv_cache_memory_bytes=4 << 20, visual_token_pruning=f"fastv:K={first}")
    with pytest.raises(UnsupportedModel, match=words):
        ModelRunner(checkpoint, config)


def test_layers_that_cannot_be_pruned(llava: Bench) -> None:
    runner = llava.case.runner
    merger = runner.merger
    early, *late = probe_layers(runner.decoder, runner._probe_arguments(), 64)
    assert obstacle(merger, [early, *late]) == ""
    assert "read the keys of early ones" in obstacle(merger, [early, dataclasses.replace(late[0], source=early.index)])
    assert "sliding windows" in obstacle(merger, [early, dataclasses.replace(late[0], kind=Kind.SLIDING, window=8)])
    merger.per_layer = True
    try:
        assert "inputs of its own" in obstacle(merger, [early, *late])
    finally:
        merger.per_layer = False


def test_the_service_knows_its_pruning(checkpoint_dir: Dirs) -> None:
    """Prefixes computed under another K are other prefixes; a text model says why it drops nothing."""
    path = str(checkpoint_dir("llava"))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 4 << 20}
    texts = ("", "fastv:K=1", "fastv:K=2,keep=0.5")
    services = [LlmService(LlmConfig(model=path, visual_token_pruning=text, **options)) for text in texts]
    assert [s.servicer.limits.pruning for s in services] == [None, Pruning(1), Pruning(2, 0.5)]
    assert [len(s.engine.scheduler.kv.groups) for s in services] == [1, 2, 2]
    assert len({s.engine.scheduler.kv.prefix._fingerprint for s in services}) == 3
    text = LlmService(LlmConfig(model=str(checkpoint_dir("llama")), **options))
    assert "it has none" in text.servicer.limits.pruning_obstacle
    for service in (*services, text):
        service.grammars.close()
