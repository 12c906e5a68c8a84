"""Servers are lost while requests are at them: others go on, and nothing is kept of either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from fleet_fakes import Fleet, LosableEncoder, TellingLlm, fleet, tokens_of
from gateway_fakes import ask, picture, refused, until
from prometheus_client import REGISTRY

from services.common.errors import ServiceError
from services.gateway import peers
from services.gateway.backends import Fleet as Members
from services.gateway.peers import LanguageModel
from services.gateway.suspects import Suspects
from triptych.gateway.v1 import gateway_pb2
from triptych.llm.v1 import llm_pb2

CODE = grpc.StatusCode
Loss = Callable[[llm_pb2.GenerateRequest], ServiceError]


@pytest.fixture
def qwen(checkpoint_dir: Callable[[str], Path]) -> Path:
    return checkpoint_dir("qwen2_vl")


def the_one_that_ran(f: Fleet) -> tuple[str, TellingLlm]:
    [(address, llm)] = [(address, llm) for address, llm in f.llms.items() if llm.requests]
    return address, llm


def other(f: Fleet, address: str) -> TellingLlm:
    return next(llm for name, llm in f.llms.items() if name != address)


def failovers() -> list[float]:
    """Counted so far: of encoders, and of language models."""
    names = ({"service": service} for service in ("encoder", "llm"))
    return [REGISTRY.get_sample_value("triptych_gateway_failovers_total", name) or 0 for name in names]


def encoder_with(f: Fleet, items: int) -> tuple[str, LosableEncoder]:
    [found] = [(address, encoder) for address, encoder in f.encoders.items() if len(encoder.items) == items]
    return found


def lost_rows(request: llm_pb2.GenerateRequest) -> ServiceError:
    """The encoder of the first item could not be reached."""
    address = request.spans[0].ref.encoder_address
    return ServiceError(CODE.UNAVAILABLE, "the encoder cannot be reached", reason="ENCODER_LOST", metadata={"encoder": address})


def lost_ref(request: llm_pb2.GenerateRequest) -> ServiceError:
    """The encoder of the first item has restarted."""
    metadata = {"encoder": request.spans[0].ref.encoder_address, "ref_id": request.spans[0].ref.id}
    return ServiceError(CODE.NOT_FOUND, "this ref is not held here", reason="REF_NOT_FOUND", metadata=metadata)


@pytest.mark.asyncio
async def test_a_picture_goes_to_one_encoder_and_pictures_to_all(qwen: Path) -> None:
    async with fleet(qwen) as f:
        for _ in range(6):
            await f.answer(ask("what?", picture(56, 84), max_tokens=2))
        assert sorted(len(encoder.items) for encoder in f.encoders.values()) == [0, 6]
        await asyncio.gather(*(f.answer(ask("what?", picture(56, 84), max_tokens=2)) for _ in range(6)))
        assert sorted(len(encoder.items) for encoder in f.encoders.values()) == [0, 12]
        for first in (1, 9):
            await f.answer(ask(*(picture(56, 28 * n) for n in range(first, first + 8)), max_tokens=2))
        assert all(len(encoder.items) not in (0, 12) for encoder in f.encoders.values())
        await f.idle()


@pytest.mark.asyncio
async def test_a_conversation_stays_and_others_take_turns(qwen: Path) -> None:
    async with fleet(qwen) as f:
        for number in range(4):
            await f.answer(ask(f"{number} something else each time", max_tokens=2))
        assert [len(llm.requests) for llm in f.llms.values()] == [2, 2]
        for _ in range(4):
            await f.answer(ask("the same long beginning " * 20, max_tokens=2))
        assert sorted(len(llm.requests) for llm in f.llms.values()) == [2, 6]
        await f.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.2, "logprobs": 2}], ids=str)
async def test_a_language_model_lost_in_the_middle_is_not_noticed(qwen: Path, sampling: dict[str, float]) -> None:
    async with fleet(qwen) as f:
        for llm in f.llms.values():
            llm.gate.clear()
        call = asyncio.create_task(f.answer(ask("tell", picture(), max_tokens=9, include_first_logits=True, **sampling)))
        await until(lambda: any(llm.requests for llm in f.llms.values()))
        address, lost = the_one_that_ran(f)
        lost.lost_after = 4
        for llm in f.llms.values():
            llm.gate.set()
        events = await call
        assert tokens_of(events) == f.expected(address, 9)
        rest = other(f, address)
        assert rest.began == [f.expected(address, 4)] and not rest.requests[0].sampling.include_first_logits
        assert rest.requests[0].spans == lost.requests[0].spans  # the encoder still holds the rows
        assert (
            rest.requests[0].token_ids == lost.requests[0].token_ids
            and rest.requests[0].request_id != lost.requests[0].request_id
        )
        assert [len(e.items) for e in f.encoders.values() if e.items] == [1]
        done = events[-1].done
        assert done.last and done.usage.completion_tokens == 9
        if "logprobs" in sampling:
            told = [token for event in events for token in event.delta.logprobs]
            assert [token.token_id for token in told] == f.expected(address, 9) and all(len(t.top) == 2 for t in told)
        lost.gone, lost.lost_after = False, None
        await f.idle()
        await until(lambda: all(llm.ready for llm in f.service.backends.llms.values()))  # it is back
        for number in range(2):
            await f.answer(ask(f"{number} again", max_tokens=1))
        assert len(lost.requests) == 2


@pytest.mark.asyncio
async def test_a_language_model_and_then_the_media_are_lost(qwen: Path) -> None:
    """As when the answer is long: nobody reads the rows any more, and the encoder drops them."""
    async with fleet(qwen) as f:
        for llm in f.llms.values():
            llm.gate.clear()
        call = asyncio.create_task(f.answer(ask("tell", picture(), max_tokens=9)))
        await until(lambda: any(llm.requests for llm in f.llms.values()))
        (address, lost), (encoders, llms) = the_one_that_ran(f), failovers()
        lost.lost_after, other(f, address).failures = 4, [lost_ref]
        for llm in f.llms.values():
            llm.gate.set()
        assert tokens_of(await call) == f.expected(address, 9)
        assert [len(encoder.items) for encoder in f.encoders.values()] == [1, 1]
        assert failovers() == [encoders + 1, llms + 1]
        assert other(f, address).began == [f.expected(address, 4)]
        lost.gone = False
        await f.idle()


@pytest.mark.asyncio
async def test_an_answer_whose_last_token_has_come_is_over(qwen: Path) -> None:
    async with fleet(qwen) as f:
        for llm in f.llms.values():
            llm.lost_after = 3
        events = await f.answer(ask("x", max_tokens=3))
        assert len(tokens_of(events)) == 3 and events[-1].done.usage.completion_tokens == 3
        assert sum(len(llm.requests) for llm in f.llms.values()) == 1
        await f.idle()


@pytest.mark.asyncio
async def test_what_cannot_go_on_ends_at_once(qwen: Path) -> None:
    async with fleet(qwen) as f:
        for llm in f.llms.values():
            llm.lost_after = 2
        with refused(CODE.UNAVAILABLE, "went away") as errors:
            await f.answer(ask("several answers cannot", max_tokens=5, n=2))
        assert errors[0].retry_delay
        for llm in f.llms.values():
            llm.gone = True
        with refused(CODE.UNAVAILABLE, "went away"):  # there is no other
            await f.answer(ask("y", max_tokens=9))
        with refused(CODE.UNAVAILABLE, "no language model"):
            await f.answer(ask("z", max_tokens=9))
        assert not f.readiness.ready
        await f.idle()


@pytest.mark.asyncio
async def test_a_request_that_kills_language_models_kills_two_and_no_more(qwen: Path) -> None:
    async with fleet(qwen, llms=3) as f:
        for llm in f.llms.values():
            llm.lost_after = 2
        with refused(CODE.INTERNAL, "died while they ran this request") as errors:
            await f.answer(ask("killer", picture(), max_tokens=9))
        assert errors[0].reason == "REQUEST_SUSPECT" and errors[0].retry_delay is None
        assert sorted(llm.gone for llm in f.llms.values()) == [False, True, True]
        for llm in f.llms.values():
            llm.gone, llm.lost_after = False, None
        with refused(CODE.INTERNAL):  # clients that try again are told so, and nobody runs it
            await f.answer(ask("killer", picture(), max_tokens=9))
        assert sum(len(llm.requests) for llm in f.llms.values()) == 2
        assert len(tokens_of(await f.answer(ask("killer", picture(84, 84), max_tokens=9)))) == 9  # another picture
        await f.idle()


def test_who_is_suspect() -> None:
    suspects = Suspects(seconds=60, capacity=2)
    for _ in range(5):
        suspects.note(b"a", ("llm", 1), 0)  # five of them, and one death
    assert not suspects.suspect(b"a", 0)
    suspects.note(b"a", ("llm", 2), 10)
    assert suspects.suspect(b"a", 69) and not suspects.suspect(b"a", 70) and not suspects.suspect(b"b", 10)
    suspects.clear(b"a")
    assert not suspects.suspect(b"a", 10)
    for name in (b"b", b"c", b"d"):
        suspects.note(name, 1, 0)
        suspects.note(name, 2, 0)
    assert [suspects.suspect(name, 1) for name in (b"b", b"c", b"d")] == [False, True, True]


@pytest.mark.asyncio
async def test_a_language_model_that_shuts_down_gets_nothing_more(qwen: Path) -> None:
    async with fleet(qwen) as f:
        closing = ServiceError(CODE.UNAVAILABLE, "the service is shutting down; send the request to another replica or try again")
        once: list[Loss] = [lambda _: closing]
        for llm in f.llms.values():
            llm.failures = once
        events = await f.answer(ask("x", max_tokens=2, n=3), metadata=(("x-request-id", "i" * 128),))
        assert events[-1].done.last and [len(llm.requests) for llm in f.llms.values()] == [1, 1]
        assert all(len(request.request_id) <= 128 for llm in f.llms.values() for request in llm.requests)
        await f.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("loss", [lost_rows, lost_ref])
async def test_only_what_an_encoder_lost_is_encoded_again(
    qwen: Path, loss: Callable[[llm_pb2.GenerateRequest], ServiceError]
) -> None:
    async with fleet(qwen, llms=1) as f:
        [llm] = f.llms.values()
        llm.failures = [loss]
        pictures = [picture(56, 28 * n) for n in range(1, 7)]
        events = await f.answer(ask(*pictures, max_tokens=2))
        assert len(tokens_of(events)) == 2
        first, second = llm.requests
        lost = first.spans[0].ref.encoder_address
        moved = [span.ref.encoder_address == lost for span in first.spans]
        for before, after, again in zip(first.spans, second.spans, moved, strict=True):
            assert after.ref.encoder_address != lost and (again or after.ref == before.ref)
        assert len(f.encoders[lost].items) == sum(moved)
        assert sum(len(e.items) for e in f.encoders.values()) == 6 + sum(moved)
        await f.idle()


@pytest.mark.asyncio
async def test_an_encoder_that_restarted_encodes_again_where_there_is_no_other(qwen: Path) -> None:
    async with fleet(qwen, encoders=1, llms=1) as f:
        [llm] = f.llms.values()
        llm.failures = [lost_ref, lost_ref]
        assert len(tokens_of(await f.answer(ask(picture(), max_tokens=2)))) == 2
        llm.failures = [lost_ref, lost_ref, lost_ref]  # once too often
        with refused(CODE.UNAVAILABLE, "lost the request's media") as errors:
            await f.answer(ask(picture(), max_tokens=2))
        assert not errors[0].metadata, "addresses are not for clients"
        await f.idle()


@pytest.mark.asyncio
async def test_pictures_go_to_the_encoder_that_is_left_and_text_notices_nothing(qwen: Path) -> None:
    async with fleet(qwen) as f:
        await f.answer(ask(picture(), max_tokens=1))
        address, home = encoder_with(f, 1)
        home.gone, (encoders, llms) = True, failovers()
        answers = await asyncio.gather(*(f.answer(ask(f"{n}", picture(), max_tokens=2)) for n in range(8)))
        assert all(event[-1].done.last for event in answers)
        left = next(encoder for name, encoder in f.encoders.items() if name != address)
        assert len(left.items) == 8
        asked = len(home.items)
        assert failovers() == [encoders + asked - 1, llms] and asked > 1
        await f.answer(ask(picture(), max_tokens=1))  # it is known to be gone
        assert len(home.items) == asked
        left.gone = True
        with refused(CODE.UNAVAILABLE, "so only text is answered"):
            await f.answer(ask(picture(), max_tokens=1))
        assert failovers() == [encoders + asked - 1, llms]  # there was nowhere to go on
        await f.service.backends.refresh()
        assert f.service.backends.ready and f.readiness.ready
        assert len(tokens_of(await f.answer(ask("text", max_tokens=2)))) == 2
        home.gone = left.gone = False
        await until(lambda: all(encoder.ready for encoder in f.service.backends.encoders))
        await f.answer(ask(picture(), max_tokens=1))
        assert len(home.items) == asked + 1
        await f.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", ["encode", "generate"])
async def test_a_client_that_leaves_during_a_failover_leaves_nothing(qwen: Path, moment: str) -> None:
    async with fleet(qwen) as f:
        if moment == "encode":
            await f.answer(ask("a", picture(), max_tokens=1))
            address, _ = encoder_with(f, 1)
            for llm in f.llms.values():
                llm.failures = [lost_rows]
            second = next(encoder for name, encoder in f.encoders.items() if name != address)
            second.gate.clear()
            call = f.stub.Chat(ask("b", picture(), max_tokens=5))
            await until(lambda: len(second.items) == 1)
        else:
            for llm in f.llms.values():
                llm.gate.clear()
            call = f.stub.Chat(ask("a", picture(), max_tokens=5))
            await call.read(), await call.read()
            _, lost = the_one_that_ran(f)
            lost.lost_after = 1
            lost.gate.set()
            await until(lambda: all(llm.requests for llm in f.llms.values()))
        call.cancel()
        for encoder in f.encoders.values():
            encoder.gate.set()
        for llm in f.llms.values():
            llm.gate.set()
        await f.idle()


@pytest.mark.asyncio
async def test_a_server_that_is_late_keeps_its_requests_while_there_is_no_other(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine stands still for a while, or the poll finds no processor: that is not a server that is gone."""
    monkeypatch.setattr(peers, "POLL_TIMEOUT", 0.2)
    async with fleet(qwen) as f:
        (name, slow), (_, other) = f.llms.items()
        slow.silent, late = True, f.service.backends.llms[name]
        await until(lambda: late.late)
        assert late.ready and f.service.backends.llm_fleet.ready == [f.service.backends.llms[n] for n in f.llms if n != name]
        await asyncio.gather(*(f.answer(ask(f"{n}", max_tokens=1)) for n in range(4)))
        assert (len(slow.requests), len(other.requests)) == (0, 4)
        other.gone = True
        await until(lambda: f.service.backends.llm_fleet.ready == [late])
        assert len(tokens_of(await f.answer(ask("text", max_tokens=2)))) == 2 and len(slow.requests) == 1
        monkeypatch.setattr(peers, "SILENT_SECONDS", 0.0)
        await until(lambda: not late.ready)
        assert "DEADLINE_EXCEEDED" in next(r for r in caplog.records if r.msg == "language model late").fields["why"]  # type: ignore[attr-defined]
        slow.silent = False
        await until(lambda: late.ready and not late.late)
        await f.idle()


@pytest.mark.asyncio
async def test_servers_join_and_leave_with_a_name() -> None:
    known = ["10.0.0.1:1", "10.0.0.2:1"]

    class Names:
        changes = True

        async def addresses(self) -> list[str]:
            return known

    members = Members(LanguageModel, [], "", Names())  # type: ignore[arg-type]

    async def look() -> None:
        members._looked_up = None  # as if three seconds had passed
        await members.refresh()

    await look()
    assert set(members.members) == set(known)
    leaver = members.members["10.0.0.1:1"]
    leaver.ready = True
    known = ["10.0.0.2:1", "10.0.0.3:1"]
    with leaver.in_use():
        await look()
        assert set(members.members) == {"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"} and not leaver.ready
        await look()
        assert members.members["10.0.0.1:1"] is leaver, "a request still uses its channel"
    await look()
    assert set(members.members) == {"10.0.0.2:1", "10.0.0.3:1"}
    await members.close()


@pytest.mark.asyncio
async def test_several_answers_side_by_side(qwen: Path) -> None:
    async with fleet(qwen, llms=1) as f:
        [address] = f.llms
        events = await f.answer(ask("x", max_tokens=4, n=3, logprobs=1))
        for index in range(3):
            assert tokens_of(events, index) == f.expected(address, 4, index)
        ends = [event.done for event in events if event.HasField("done")]
        assert [end.index for end in ends] == [0, 1, 2] and [end.last for end in ends] == [False, False, True]
        prompt = ends[0].usage.prompt_tokens
        assert [end.usage.completion_tokens for end in ends] == [4, 4, 12]
        assert [end.usage.total_tokens for end in ends] == [prompt + 4, prompt + 4, prompt + 12]
        assert events[-1].HasField("done") and (await f.stub.GetLoad(gateway_pb2.GetLoadRequest())).finished_requests == 1
        requests = [ask("x", max_tokens=160, n=n) for n in (1, 3)]
        asked = [gateway_pb2.EstimateTokensRequest(messages=r.messages, sampling=r.sampling) for r in requests]
        one, three = [(await f.stub.EstimateTokens(request)).cost.kv_blocks for request in asked]
        assert three >= one + 20  # ten blocks at least for each answer
        await f.idle()


@pytest.mark.asyncio
async def test_a_stop_string_ends_its_own_answer_only(qwen: Path) -> None:
    async with fleet(qwen, llms=1) as f:
        texts = await f.answer(ask("x", max_tokens=6, n=2))
        first = "".join(event.delta.text for event in texts if event.delta.index == 0)
        second = "".join(event.delta.text for event in texts if event.delta.index == 1)
        stop = next(first[at : at + 3] for at in range(2, len(first)) if first[at : at + 3] not in second)
        events = await f.answer(ask("x", max_tokens=6, n=2, stop=[stop]))
        cut = "".join(event.delta.text for event in events if event.delta.index == 0)
        assert cut == first[: first.index(stop)]
        assert "".join(event.delta.text for event in events if event.delta.index == 1) == second
        ends = [event.done for event in events if event.HasField("done")]
        assert [(end.index, end.last) for end in ends] == [(0, False), (1, True)]
        counts = [len(tokens_of(events, index)) for index in range(2)]
        assert counts[0] < counts[1] == 6 and [end.usage.completion_tokens for end in ends] == [counts[0], sum(counts)]
        both = next(letter for letter in first if letter in second)
        events = await f.answer(ask("x", max_tokens=6, n=2, stop=[both]))
        assert [event.done.last for event in events if event.HasField("done")] == [False, True]
        await f.idle()  # the call to the language model is over, too
