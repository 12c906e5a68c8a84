"""Which server gets what: rules on figures, without a server."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.addresses import Directory, lookup, parse_addresses
from services.gateway.prefix_affinity import BLOCK, PrefixAffinity, chain
from services.gateway.routing import FACTOR, SPARE_PATCHES, SPARE_REQUESTS, Load, by_rendezvous, order_encoders, order_llms
from tests.patience import PATIENCE

ENCODERS = [f"10.0.0.{i}:50051" for i in range(8)]
KEYS = [bytes([i, j]) * 16 for i in range(64) for j in range(16)]


def idle(addresses: Sequence[str]) -> dict[str, Load]:
    return {address: Load(0) for address in addresses}


def test_rendezvous_spreads_keys_and_moves_only_those_of_the_one_that_goes() -> None:
    first = {key: by_rendezvous(key, ENCODERS) for key in KEYS}
    counts = Counter(order[0] for order in first.values())
    assert len(counts) == 8 and max(counts.values()) < 2 * min(counts.values())
    gone, left = ENCODERS[3], [a for a in ENCODERS if a != ENCODERS[3]]
    for key, order in first.items():
        assert by_rendezvous(key, left) == [a for a in order if a != gone]
        assert by_rendezvous(key, reversed(ENCODERS)) == order


def test_an_item_stays_at_its_encoder_until_that_has_too_much_to_do() -> None:
    home, second, *_ = by_rendezvous(KEYS[0], ENCODERS)
    assert order_encoders(KEYS[0], idle(ENCODERS))[0] == home
    assert order_encoders(KEYS[0], idle(ENCODERS) | {home: Load(SPARE_PATCHES)})[0] == home  # idle others are no reason
    assert order_encoders(KEYS[0], idle(ENCODERS) | {home: Load(SPARE_PATCHES + 1)})[0] == second
    even = {address: Load(10 * SPARE_PATCHES) for address in ENCODERS}
    assert order_encoders(KEYS[0], even)[0] == home
    assert order_encoders(KEYS[0], even | {home: Load(14 * SPARE_PATCHES)})[0] == second
    assert order_encoders(KEYS[0], even | {home: Load(14 * SPARE_PATCHES)}, holding=[home])[0] == home  # it costs nothing there


@given(st.lists(st.integers(0, 10 * SPARE_PATCHES), min_size=1, max_size=8), st.binary(min_size=1, max_size=64))
def test_no_encoder_over_the_bound_comes_before_one_below_it(loads: list[int], key: bytes) -> None:
    by_address = dict(zip(ENCODERS, map(Load, loads), strict=False))
    bound = max(SPARE_PATCHES, FACTOR * sum(loads) / len(loads))
    over = [by_address[address].now > bound for address in order_encoders(key, by_address)]
    assert over == sorted(over) and not over[0]


def test_a_prompt_goes_where_most_of_it_was_read_within_a_bound() -> None:
    loads = {"a": Load(3), "b": Load(0, served=1), "c": Load(0, served=2)}
    assert order_llms(loads, {}) == ["b", "c", "a"]  # the least loaded; among equals they take turns
    assert order_llms(loads, {"a": 64, "c": 32}) == ["a", "c", "b"]
    busy = loads | {"a": Load(SPARE_REQUESTS + 1)}
    assert order_llms(busy, {"a": 6400})[-1] == "a"
    assert order_llms({"a": Load(12), "b": Load(10), "c": Load(10)}, {"a": 64})[0] == "a"  # not much more than the others
    assert order_llms({"a": Load(14), "b": Load(10), "c": Load(9)}, {"a": 64}) == ["c", "b", "a"]


def test_a_record_of_prompts_finds_the_longest_common_beginning() -> None:
    record = PrefixAffinity()
    prompt = list(range(5 * BLOCK + 7))
    record.note(chain(prompt), "a")
    record.note(chain(prompt[: 2 * BLOCK] + [9] * 3 * BLOCK), "b")
    assert record.matched(chain(prompt)) == {"a": 5 * BLOCK, "b": 2 * BLOCK}
    assert record.matched(chain([*prompt[: 3 * BLOCK], 1, 2])) == {"a": 3 * BLOCK, "b": 2 * BLOCK}
    assert record.matched(chain([7, *prompt])) == {} == record.matched(chain(prompt[: BLOCK - 1]))
    assert record.matched(chain(prompt, salt="tenant")) == {}
    record.forget("a")
    assert record.matched(chain(prompt)) == {"b": 2 * BLOCK}


def test_other_media_behind_the_same_placeholders_are_another_prompt() -> None:
    record, prompt = PrefixAffinity(), [1] * BLOCK + [2] * 2 * BLOCK
    record.note(chain(prompt, [(BLOCK + 3, b"cat")]), "a")
    assert record.matched(chain(prompt, [(BLOCK + 3, b"cat")])) == {"a": 3 * BLOCK}
    assert record.matched(chain(prompt, [(BLOCK + 3, b"dog")])) == {"a": BLOCK}
    assert record.matched(chain(prompt)) == {"a": BLOCK}


def test_a_record_is_bounded_and_forgets_what_was_sent_longest_ago() -> None:
    record = PrefixAffinity(capacity=10)
    prompts = [chain([n] * 4 * BLOCK) for n in range(5)]
    for prompt in prompts:
        record.note(prompt, "a", room=1000 * BLOCK)
        record.note(prompt, "b", room=5 * BLOCK)  # it can hold no more
    matched = [record.matched(prompt) for prompt in prompts]
    assert [found.get("a", 0) // BLOCK for found in matched] == [0, 0, 2, 4, 4]
    assert [found.get("b", 0) // BLOCK for found in matched] == [0, 0, 0, 1, 4]


def test_lists_of_addresses() -> None:
    entries = ("gpu1:50051", "dns:encoders.svc:50051", "[::1]:5")
    assert parse_addresses("--encoder", " gpu1:50051, dns:encoders.svc:50051,[::1]:5") == entries
    for bad in ("nowhere", "dns:50051", "h:0", "h:65536", "h:x", "dns::5"):
        with pytest.raises(ValueError, match="--llm must be host:port, dns:name:port"):
            parse_addresses("--llm", bad)
    with pytest.raises(ValueError, match="twice"):
        parse_addresses("--llm", "h:1,h:1")


@pytest.mark.asyncio
async def test_names_are_looked_up_again_and_keep_what_they_had_when_nobody_knows_them() -> None:
    answers: dict[str, list[str] | OSError] = {"pods": ["10.0.0.2:1", "10.0.0.1:1"]}

    async def look(name: str, port: int) -> Sequence[str]:
        answer = answers[name]
        if isinstance(answer, OSError):
            raise answer
        return answer

    directory = Directory(["h:1", "dns:pods:1"], look)
    assert directory.changes and not Directory(["h:1"], look).changes
    assert await directory.addresses() == ["h:1", "10.0.0.1:1", "10.0.0.2:1"]
    answers["pods"] = ["10.0.0.2:1", "10.0.0.3:1", "h:1"]
    assert await directory.addresses() == ["h:1", "10.0.0.2:1", "10.0.0.3:1"]
    answers["pods"] = OSError("the name server is away")
    assert await directory.addresses() == ["h:1", "10.0.0.2:1", "10.0.0.3:1"]
    assert await Directory(["dns:pods:1"], look).addresses() == []


@pytest.mark.asyncio
async def test_a_name_server_that_does_not_answer_holds_nobody_up() -> None:
    async def never(name: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    async with asyncio.timeout(PATIENCE):
        assert await Directory(["dns:pods:1"], never).addresses() == []


@pytest.mark.asyncio
async def test_looking_up_a_name_for_real() -> None:
    assert set(await lookup("localhost", 5)) <= {"127.0.0.1:5", "[::1]:5"}
    with pytest.raises(socket.gaierror):
        await lookup("no-such-host.invalid", 5)
