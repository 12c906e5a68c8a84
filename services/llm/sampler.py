"""Chooses the next token of every sequence of a batch. What a sequence gets never depends on what else is in the batch.

Between the logits and a sampled token no floating-point number is added up along the vocabulary: probabilities become whole
numbers first, whose sums are exact in whatever order a device takes them. So a row chooses the same alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch

from services.llm.events import EngineFailure, Refused
from services.llm.logprobs import Choice, logprobs
from services.llm.occurrences import Occurrences
from services.llm.structured import GrammarFailure, GrammarState

NOT_NUMBERS = "the model computed values that are not numbers for this request; try another dtype"

_COLDEST = 1e-30  # dividing by less would turn 0, the largest logit's distance to itself, into NaN
_WEIGHT_OF_LIKELIEST = 2**44  # times the largest vocabulary, 2 ** 18, it stays below 2 ** 63
_NUCLEUS_GUESS = 1024  # tokens sorted before all are
_WORD = 2**64 - 1
_CACHED_LOGITS = 2**19  # computed at once on a CPU, to stay in its cache: three times as fast


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; ``temperature`` 0 is greedy. Ranges and meanings are those of ``SamplingParams``.

    Attributes:
        logprobs: how many of the likeliest tokens to report beside the chosen one; None reports nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens matter."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class TokenChooser:
    """What one answer's choices depend on besides its logits. :func:`choose` reads it, :meth:`accept` moves it on.

    Args:
        sampling: how to choose.
        prompt: the prompt's tokens, as far as they have a logit.
        end_token_ids: never chosen among the first ``min_tokens``.
        min_tokens: see there.
        grammar: what the answer must match; owned by the chooser.

    Attributes:
        plain: the next token is the likeliest one, and nothing else is asked about it.
        failure: why :func:`choose` had no token; None while it had.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        end_token_ids: Collection[int],
        min_tokens: int = 0,
        grammar: GrammarState | None = None,
    ) -> None:
        self.sampling, self.grammar = sampling, grammar
        self.failure: EngineFailure | Refused | None = None
        self._banned_at_first, self._min_tokens = sorted(end_token_ids), min_tokens
        self._seed = _mixed(sampling.seed)
        self._accepted = 0
        self.occurrences: Occurrences | None = None
        if sampling.penalized:
            self.occurrences = Occurrences(prompt if sampling.repetition_penalty != 1 else ())
        self._find_plain()

    @property
    def banned(self) -> Sequence[int]:
        """Tokens that may not be next, whatever their logits."""
        return self._banned_at_first if self._accepted < self._min_tokens else ()

    @property
    def uniform(self) -> float:
        """The random number in [0, 1) that the next token is chosen with: a function of the seed and the place only."""
        return float(_mixed(self._seed + self._accepted * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53

    def accept(self, token: int) -> None:
        """The answer goes on with ``token``; a grammar starts on the mask for the one after it."""
        self._accepted += 1
        if self.plain:
            return
        if self.occurrences is not None:
            self.occurrences.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        if self._accepted == self._min_tokens:
            self._find_plain()

    def fork(self, index: int) -> TokenChooser:
        """The chooser of answer ``index`` (from 1) to the same prompt, with a random stream of its own."""
        other = copy(self)
        other._seed = _mixed(self.sampling.seed + index)
        if self.occurrences is not None:
            other.occurrences = self.occurrences.copy()
        if self.grammar is not None:
            other.grammar = self.grammar.fork()
        return other

    def _find_plain(self) -> None:
        s = self.sampling
        special = s.temperature > 0 or s.penalized or s.logit_bias or s.logprobs is not None or self.grammar or self.banned
        self.plain = not special


def choose(choosers: Sequence[TokenChooser], logits: torch.Tensor) -> list[Choice | None]:
    """The next token of every chooser, from ``logits`` ``[len(choosers), vocab]`` in float32, which are left as they are.

    Nothing is accepted: asked again, it answers the same. None where there is no token to choose; ``failure`` then says why.
    """
    best = _argmax(logits)[:, None]  # a NaN where there is one
    fine = logits.gather(-1, best).isfinite()
    tokens: list[list[int]] = torch.cat([best, fine], dim=1).tolist()
    choices = [Choice(token) if ok else None for token, ok in tokens]
    if not all([chooser.plain for chooser in choosers]):
        special = [i for i, (chooser, choice) in enumerate(zip(choosers, choices, strict=True)) if choice and not chooser.plain]
        step = _rows_at_once(logits)
        for at in range(0, len(special), step):
            _choose_special(choosers, logits, special[at : at + step], choices)
    if None in choices:
        for chooser, choice in zip(choosers, choices, strict=True):
            if choice is None:
                chooser.failure = chooser.failure or EngineFailure(NOT_NUMBERS)
    return choices


def _choose_special(
    choosers: Sequence[TokenChooser], logits: torch.Tensor, special: list[int], choices: list[Choice | None]
) -> None:
    """Replace the choices of rows ``special``, whose logits are numbers."""
    masks: dict[int, torch.Tensor] = {}
    for i in special:
        if (grammar := choosers[i].grammar) is not None:
            try:
                masks[i] = grammar.mask()
            except GrammarFailure as failure:
                choosers[i].failure, choices[i] = Refused(f"sampling.{grammar.kind}", str(failure)), None
    rows = [i for i in special if choices[i] is not None]
    if not rows:
        return
    active = [choosers[i] for i in rows]
    work = logits[rows]
    _edit(work, active, [masks.get(i) for i in rows])
    picked = _argmax(work)
    random = [at for at, chooser in enumerate(active) if chooser.sampling.temperature > 0]
    if random:
        picked[random] = _sample(work[random] if len(random) < len(active) else work, [active[at] for at in random])
    fine = work.gather(1, picked[:, None]).isfinite()  # not so where no token was left
    tokens: list[list[int]] = torch.cat([picked[:, None], fine], dim=1).tolist()
    told: list[tuple[int, int, int]] = []
    for i, chooser, (token, ok) in zip(rows, active, tokens, strict=True):
        choices[i] = Choice(token) if ok else None
        if ok and (top := chooser.sampling.logprobs) is not None:
            told.append((i, token, top))
    if told:
        places, chosen, tops = zip(*told, strict=True)
        for i, choice in zip(places, logprobs(logits[list(places)], chosen, tops), strict=True):
            choices[i] = choice


def _edit(work: torch.Tensor, choosers: list[TokenChooser], masks: list[torch.Tensor | None]) -> None:
    """Apply bias, bans, grammars and penalties to logits ``[rows, vocab]`` in place."""
    device = work.device
    biased = [(at, token, bias) for at, c in enumerate(choosers) for token, bias in c.sampling.logit_bias.items()]
    if biased:
        row, column, bias = zip(*biased, strict=True)
        index = torch.tensor([row, column], device=device)
        work[index[0], index[1]] += torch.tensor(bias, dtype=work.dtype, device=device)
    banned = [(at, token) for at, c in enumerate(choosers) for token in c.banned]
    if banned:
        index = torch.tensor(banned, device=device).T
        work[index[0], index[1]] = -torch.inf
    if masked := [at for at, mask in enumerate(masks) if mask is not None]:
        packed = torch.stack([mask for mask in masks if mask is not None]).to(device)
        bits = packed[:, :, None] & torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        work[masked] = work[masked].masked_fill(bits.flatten(1)[:, : work.shape[1]] == 0, -torch.inf)
    _penalize(work, choosers)


def _penalize(work: torch.Tensor, choosers: list[TokenChooser]) -> None:
    """Touches only the tokens that have occurred."""
    penalized = [(at, c.sampling, c.occurrences) for at, c in enumerate(choosers) if c.occurrences is not None]
    if not any(len(occurrences) for _, _, occurrences in penalized):
        return
    device = work.device
    lengths = torch.tensor([len(o) for _, _, o in penalized])
    row = torch.tensor([at for at, _, _ in penalized]).repeat_interleave(lengths).to(device)
    column = torch.cat([o.tokens for _, _, o in penalized]).to(device)
    counts = torch.cat([o.counts for _, _, o in penalized]).to(device)
    strengths = torch.tensor([[s.repetition_penalty, s.presence_penalty, s.frequency_penalty] for _, s, _ in penalized])
    repetition, presence, frequency = strengths.repeat_interleave(lengths, dim=0).to(device).unbind(1)
    values = work[row, column]
    values = torch.where(values > 0, values / repetition, values * repetition)
    work[row, column] = values - frequency * counts - presence * (counts > 0)


def _sample(work: torch.Tensor, choosers: list[TokenChooser]) -> torch.Tensor:
    """A token ``[rows]`` for logits ``[rows, vocab]``, each with the probability it has after the filters."""
    weights = _weights(work, [chooser.sampling for chooser in choosers])
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    uniform = torch.tensor([[chooser.uniform] for chooser in choosers], dtype=torch.float64, device=work.device)
    target = (uniform * total).long().minimum(total - 1)
    # The first whose sum is above the target, so that its weight is not 0; where no weight is a number, any.
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=work.shape[1] - 1)


def _weights(work: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Whole numbers ``[rows, vocab]`` in proportion to the probabilities, 0 where a filter took a token out."""
    device, vocab = work.device, work.shape[1]
    temperature = torch.tensor([[max(s.temperature, _COLDEST)] for s in samplings], device=device)
    likelihoods = (work - work.amax(-1, keepdim=True)).div_(temperature).exp_()  # the likeliest token's is 1
    least = torch.tensor([[s.min_p] for s in samplings], device=device)
    if limited := [at for at, s in enumerate(samplings) if 0 < s.top_k < vocab]:
        k = torch.tensor([[samplings[at].top_k] for at in limited], device=device)
        kth = _largest(likelihoods[limited], int(k.max())).gather(1, k - 1)
        least[limited] = least[limited].maximum(kth)  # min_p takes out the least likely: it cannot change who is the kth
    if bool((least > 0).any()):
        likelihoods.masked_fill_(likelihoods < least, 0)
    likelihoods.mul_(_WEIGHT_OF_LIKELIEST)
    weights = likelihoods.long()
    if nucleus := [at for at, s in enumerate(samplings) if s.top_p < 1]:
        share = torch.tensor([[samplings[at].top_p] for at in nucleus], dtype=torch.float64, device=device)
        weights[nucleus] = _nucleus(likelihoods[nucleus], weights[nucleus], share)
    return weights


def _nucleus(floats: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Keep the fewest largest weights ``[rows, vocab]`` that add up to ``share`` ``[rows, 1]``; of equal ones the first.

    ``floats`` are the same weights not yet cut to whole numbers, which sort faster.
    """
    need = (share * weights.sum(-1, keepdim=True)).ceil().long()
    for size in sorted({min(_NUCLEUS_GUESS, weights.shape[1]), weights.shape[1]}):
        ordered = _largest(floats, size).long()
        sums = ordered.cumsum(-1)
        if bool((sums[:, -1:] >= need).all()):
            break
    count = torch.searchsorted(sums, need) + 1  # tokens that stay
    least = ordered.gather(1, count.clamp(max=size) - 1)
    equal, smaller = weights == least, weights < least
    spare = count - (ordered > least).sum(-1, keepdim=True)  # how many of those equal to the least one stay
    if bool((spare < equal.sum(-1, keepdim=True)).any()):
        smaller |= equal & (equal.cumsum(-1) > spare)
    return weights.masked_fill_(smaller, 0)


def _argmax(values: torch.Tensor) -> torch.Tensor:
    """The column of the largest value of each row, the first of equal ones; of a NaN where a row has one."""
    if values.device.type != "cpu":
        return values.argmax(-1)
    return torch.from_numpy(values.numpy().argmax(-1))  # tens of times as fast as torch's


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest values of each row, largest first."""
    if values.device.type != "cpu":
        return values.topk(count).values
    kept = values.shape[1] - count
    array = np.partition(values.numpy(), kept, axis=-1)[:, kept:] if kept else values.numpy()
    return torch.from_numpy(np.sort(array, axis=-1)).flip(-1)


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(1, _CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)


def _mixed(number: int) -> int:
    """64 bits that look random (the finalizer of splitmix64): numbers that differ by one have nothing in common."""
    number &= _WORD
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _WORD
    return number ^ (number >> 31)
