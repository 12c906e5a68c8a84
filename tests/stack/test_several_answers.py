"""Several answers and log probabilities through the real stack, by the SDK."""

from __future__ import annotations

import math
from collections.abc import Callable

import triptych
from tests.media_files import file_bytes, picture
from tests.stack.conftest import RunningStack


def test_answers_side_by_side_and_how_likely_their_tokens_were(start_stack: Callable[[str], RunningStack]) -> None:
    stack = start_stack("qwen2_vl")
    question = [triptych.image(file_bytes(picture(60, 60))), "what is this?"]
    with triptych.Client(stack.address) as client:
        alone = client.chat(question, max_tokens=6, min_tokens=6, logprobs=2, temperature=0)
        [choice] = alone.choices
        assert [told.token_id for told in choice.logprobs] == list(alone.token_ids) and len(alone.token_ids) == 6
        for told in choice.logprobs:
            assert len(told.top) == 2 and told.top[0].token_id == told.token_id and told.top[0].logprob == told.logprob
            assert 0 > told.logprob >= told.top[1].logprob and math.exp(told.logprob) + math.exp(told.top[1].logprob) <= 1
        both = client.chat(question, max_tokens=6, min_tokens=6, n=2, temperature=0)
        assert [c.token_ids for c in both.choices] == [alone.token_ids] * 2 and both.usage.completion_tokens == 12
        assert both.usage.prompt_tokens == alone.usage.prompt_tokens
        drawn = client.chat(question, max_tokens=16, min_tokens=16, n=8, temperature=1.5, seed=4, ignore_eos=True)
        assert len({c.token_ids for c in drawn.choices}) == 8 and [c.index for c in drawn.choices] == list(range(8))
        told = client.chat("say", max_tokens=32, n=1, temperature=1.5, seed=2, logprobs=0)
        spoken = [t for t in told.choices[0].logprobs if not t.token.startswith("<|")]  # special tokens are spelled, and no text
        assert b"".join(t.bytes for t in spoken).decode(errors="replace") == told.text and not any(t.top for t in spoken)
    stack.wait_until(lambda loads: not loads.busy())
