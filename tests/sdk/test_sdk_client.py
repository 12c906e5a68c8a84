"""Both clients against a real server: what they send, what they return, when they cancel."""

import subprocess
import sys

import grpc
import pytest

import triptych
from tests.patience import PATIENCE
from triptych import errors
from triptych.common.v1 import sampling_pb2, usage_pb2
from triptych.gateway.v1 import gateway_pb2
from triptych.gateway.v1.gateway_pb2 import ChatResponse as Chat


def texts_and_media(message):
    kinds = [part.WhichOneof("content") for part in message.parts]
    contents = [getattr(part, kind) for part, kind in zip(message.parts, kinds, strict=True)]
    return [(kind, getattr(content, "data", content)) for kind, content in zip(kinds, contents, strict=True)]


def test_parts_keep_their_order(gateway, picture):
    parts = [triptych.image(picture), "first", triptych.audio(b"wave"), "second", triptych.video(b"film"), "third"]
    with triptych.Client(gateway.address) as client:
        client.chat(parts)
    (message,) = gateway.requests[0].messages
    assert texts_and_media(message) == [
        ("image", b"\x89PNG cat"),
        ("text", "first"),
        ("audio", b"wave"),
        ("text", "second"),
        ("video", b"film"),
        ("text", "third"),
    ]


def test_a_conversation_with_roles_media_and_sampling(gateway):
    messages = [
        triptych.system("Be brief."),
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "what?"],
        },
    ]
    with triptych.Client(gateway.address) as client:
        media = [triptych.image(b"x")]
        client.chat(messages, media=media, model="tiny", max_tokens=5, temperature=0, stop="\n", seed=None)
    request = gateway.requests[0]
    assert [message.role for message in request.messages] == [1, 2, 3, 2]
    assert [part.WhichOneof("content") for part in request.messages[3].parts] == ["image", "image", "text"]
    assert request.messages[3].parts[1].image.url == "data:image/png;base64,AA=="
    assert (request.model, request.sampling.max_tokens, list(request.sampling.stop)) == ("tiny", 5, ["\n"])
    assert request.sampling.HasField("temperature") and not request.sampling.HasField("seed")


def test_chat_returns_the_whole_answer(gateway):
    with triptych.Client(gateway.address) as client:
        result = client.chat("what?")
    assert result.text == "It is ein Kätzchen."
    assert result.token_ids == (1, 2, 3, 4)
    assert (result.finish_reason, result.request_id, result.model) == ("stop", "r1", "tiny")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (57, 4, 61)
    assert result.usage.prompt_tokens_details == triptych.PromptTokens(text=21, image=36)
    assert result.prompt_tokens.total == 57
    assert result.stage_times == triptych.StageTimes(probe=0.001, wait_for_rows=0.0, decode=0.02)
    assert result.media[0].grid == (1, 12, 12)


def test_a_stream_yields_deltas_then_has_a_result(gateway):
    with triptych.Client(gateway.address) as client, client.stream("what?") as stream:
        with pytest.raises(RuntimeError, match="to its end first"):
            _ = stream.result
        deltas = list(stream)
    assert "".join(deltas) == stream.result.text == "It is ein Kätzchen."
    assert deltas[0].text == "It is " and deltas[1].token_ids == (3,)


def test_several_answers_with_log_probabilities(gateway):
    def script(_context):
        top = [gateway_pb2.TokenLogprob(token_id=8, token="\ufffd", bytes=b"\xc3", logprob=-1.5)]
        known = gateway_pb2.TokenLogprob(token_id=7, token="no", bytes=b"no", logprob=-0.25, top=top)
        yield Chat(delta=gateway_pb2.Delta(text="yes", token_ids=[5, 6]))
        yield Chat(delta=gateway_pb2.Delta(text="no", token_ids=[7], index=1, logprobs=[known]))
        yield Chat(done=gateway_pb2.Done(finish_reason=2, index=1))
        yield Chat(delta=gateway_pb2.Delta(text=", it is", token_ids=[9]))
        if complete:
            yield Chat(done=gateway_pb2.Done(finish_reason=1, last=True, usage=usage_pb2.Usage(completion_tokens=4)))

    gateway.script, complete = script, True
    with triptych.Client(gateway.address) as client:
        with client.stream("what?", n=2, logprobs=1) as stream:
            assert [(delta.text, delta.choice) for delta in stream] == [("yes", 0), ("no", 1), (", it is", 0)]
        result, sent = stream.result, gateway.requests[0].sampling
        assert (sent.n, sent.logprobs) == (2, 1) and result.usage.completion_tokens == 4
        first, second = result.choices
        assert (first.text, first.token_ids, first.finish_reason) == ("yes, it is", (5, 6, 9), "stop")
        assert (result.text, result.token_ids, result.finish_reason) == ("yes, it is", (5, 6, 9), "stop")
        assert (second.index, second.text, second.finish_reason) == (1, "no", "length")
        [told] = second.logprobs
        assert (told.token_id, told.token, told.bytes, told.logprob) == (7, "no", b"no", -0.25)
        assert told.top == (triptych.TokenLogprob(8, "\ufffd", b"\xc3", -1.5),)
        complete = False
        with pytest.raises(errors.StreamTruncated):
            client.chat("what?", n=2)


@pytest.mark.asyncio
async def test_the_async_client_does_the_same(gateway):
    async with triptych.AsyncClient(gateway.address) as client:
        result = await client.chat("what?")
        async with client.stream("what?") as stream:
            deltas = [delta async for delta in stream]
        assert stream.result == result
        assert "".join(deltas) == result.text
        assert gateway.requests[0] == gateway.requests[1]
        assert (await client.estimate("what?")).prompt_tokens == 57
        assert [model.name for model in await client.models()] == ["tiny"]
        assert (await client.load()).finished_requests == 7
        assert await client.ready()


def test_estimate_models_load_and_health(gateway):
    with triptych.Client(gateway.address) as client:
        estimate = client.estimate([triptych.image(b"x"), "what?"], max_tokens=9)
        assert estimate.cost == triptych.Cost(encoder_patches=144, prefill_tokens=57, kv_blocks=4, host_bytes=1000)
        assert (estimate.media[0].width, estimate.media[0].field) == (640, "messages[0].parts[0].image")
        assert client.models() == [triptych.Model("tiny", "qwen2_vl", 4096, ("image",))]
        assert client.load().running_requests == 1
        assert client.ready()
        gateway.serving = False
        assert not client.ready()
    assert gateway.requests[0].sampling.max_tokens == 9


def test_leaving_a_stream_cancels_it(gateway):
    gateway.script = gateway.wait_for_cancel
    with triptych.Client(gateway.address) as client:
        with client.stream("what?") as stream:
            assert next(stream) == "It is "
        assert gateway.cancelled.wait(PATIENCE)


@pytest.mark.asyncio
async def test_leaving_an_async_stream_cancels_it(gateway):
    gateway.script = gateway.wait_for_cancel
    async with triptych.AsyncClient(gateway.address) as client:
        async with client.stream("what?") as stream:
            async for delta in stream:
                assert delta == "It is "
                break
        assert gateway.cancelled.wait(PATIENCE)


def test_a_stream_must_be_entered(gateway):
    with triptych.Client(gateway.address) as client, pytest.raises(RuntimeError, match="open the stream first"):
        next(client.stream("what?"))
    assert gateway.requests == []


def test_every_call_has_a_deadline_and_a_request_id(gateway):
    with triptych.Client(gateway.address) as client:
        client.chat("what?")
        client.estimate("what?")
        client.chat("what?", timeout=7, request_id="mine", cache_salt="tenant")
    assert all(110 < seconds < 122 for seconds in gateway.remaining[:2])
    assert gateway.remaining[2] < 9
    assert len(set(gateway.request_ids)) == 3 and gateway.request_ids[2] == "mine"
    assert [getattr(request, "cache_salt", None) for request in gateway.requests] == ["", "", "tenant"]


def test_how_closely_to_look(gateway):
    parts = [
        triptych.image(b"a"),
        triptych.image(b"b", detail="low"),
        triptych.image(b"c", detail="high", min_pixels=100, max_pixels=900),
        triptych.video(b"d", max_pixels=50),
        {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low", "max_pixels": 7}},
        {"type": "image_url", "image_url": "data:,y"},
    ]
    with triptych.Client(gateway.address) as client:
        client.estimate(parts, cache_salt="tenant")
    (request,) = gateway.requests
    sent = [getattr(part, part.WhichOneof("content")) for part in request.messages[0].parts]
    low, high, unset = gateway_pb2.DETAIL_LOW, gateway_pb2.DETAIL_HIGH, gateway_pb2.DETAIL_UNSPECIFIED
    assert [media.detail for media in sent] == [unset, low, high, unset, low, unset]
    bounds = [tuple(getattr(media, n) if media.HasField(n) else None for n in ("min_pixels", "max_pixels")) for media in sent]
    assert bounds == [(None, None), (None, None), (100, 900), (None, 50), (None, 7), (None, None)]
    assert request.cache_salt == "tenant"


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1, "priority": -3}, None),
        ({"logit_bias": {5: 1.5, 7: -100}, "visual_token_keep": 0.5}, None),
        ({"json_schema": {"type": "integer"}}, {"json_schema": '{"type": "integer"}'}),
        ({"json_schema": "true"}, None),
        ({"regex": "a+"}, None),
        ({"grammar": 'start: "a"'}, None),
        ({"json_object": True}, None),
        ({"choice": ("a", "b"), "regex": None}, {"choice": {"texts": ["a", "b"]}}),
    ],
)
def test_how_to_choose_tokens(gateway, options, sent):
    with triptych.Client(gateway.address) as client:
        client.chat("x", **options)
    assert gateway.requests[0].sampling == sampling_pb2.SamplingParams(**(sent or options))


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([{"role": "tool", "content": "x"}], {}, "messages[0].role"),
        (["x", 3], {}, "messages[0].parts[1]"),
        ([{"type": "image_url"}], {}, "messages[0].parts[0]"),
        ([triptych.image(b"x", detail="medium")], {}, "messages[0].parts[0].image.detail"),
        ([{"type": "image_url", "image_url": {"url": "data:,x", "detail": []}}], {}, "messages[0].parts[0].image.detail"),
        ([triptych.video(b"x", max_pixels=-1)], {}, "messages[0].parts[0].video.max_pixels"),
        ([{"role": "user", "content": "x"}, "y"], {}, "messages[1]"),
        ("x", {"seed": -1}, "sampling.seed"),
        ("x", {"temperature": "hot"}, "sampling.temperature"),
        ("x", {"logit_bias": {"a": 1}}, "sampling.logit_bias"),
        ("x", {"json_schema": {"const": {1}}}, "sampling.json_schema"),
        ("x", {"choice": [3]}, "sampling.choice"),
        ("x", {"regex": "a", "json_object": True}, "sampling.json_object"),
    ],
)
def test_what_has_no_place_in_a_request_is_refused_before_it_is_sent(gateway, messages, options, field):
    with triptych.Client(gateway.address) as client, pytest.raises(errors.InvalidArgument) as caught:
        client.chat(messages, **options)
    assert caught.value.violations[0][0] == field
    assert gateway.requests == []


def test_an_unknown_option_and_a_huge_request_are_refused(gateway):
    with triptych.Client(gateway.address) as client:
        with pytest.raises(TypeError, match="unknown option 'temprature'"):
            client.chat("x", temprature=1)
        with pytest.raises(errors.InvalidArgument, match=r"65\.0 MiB"):
            client.chat([triptych.image(bytes(65 * 2**20))])


@pytest.mark.parametrize("helper", [triptych.image, triptych.audio, triptych.video])
def test_missing_and_empty_files_are_named(helper, tmp_path):
    with pytest.raises(errors.MediaFileError, match=r"gone\.bin.*No such file"):
        helper(tmp_path / "gone.bin")
    (tmp_path / "void.bin").touch()
    with pytest.raises(errors.MediaFileError, match=r"void\.bin.*empty") as caught:
        helper(str(tmp_path / "void.bin"))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(errors.MediaFileError, match="directory"):
        helper(tmp_path)
    with pytest.raises(errors.InvalidArgument, match="no bytes"):
        helper(b"")


def test_urls_are_not_read_here():
    assert triptych.image("https://example.org/cat.jpg").url == "https://example.org/cat.jpg"
    assert triptych.image("data:image/png;base64,AA==").data == b""


def test_the_sdk_is_light():
    heavy = ("torch", "services", "google.rpc", "numpy")
    code = f"import sys, triptych, triptych.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        (["fine", "half a pair: \ud800"], {}, r"messages\[0\]\.parts\[1\]"),
        ([triptych.image("data:image/png;base64,\udcff")], {}, r"messages\[0\]\.parts\[0\]"),
        ("hi", {"model": "\udcff"}, "model"),
        ("hi", {"stop": "\udcff"}, r"sampling\.stop"),
        ("hi", {"request_id": "a\nb"}, "request_id"),
        ("hi", {"request_id": "é"}, "request_id"),
        ("hi", {"media": "cat.jpg"}, "media"),
        ("hi", {"media": ["cat.jpg"]}, "media"),
        ("hi", {"timeout": 0}, "timeout: must be more than 0 seconds, got 0"),
        ("hi", {"timeout": float("nan")}, "timeout"),
        ([{"type": "input_audio", "input_audio": {"data": "é"}}], {}, r"messages\[0\]\.parts\[0\]"),
    ],
)
def test_what_cannot_be_sent_is_an_invalid_argument(gateway, messages, options, field):
    with triptych.Client(gateway.address) as client, pytest.raises(errors.InvalidArgument, match=field):
        client.chat(messages, **options)
    assert not gateway.requests


@pytest.mark.parametrize(
    "messages",
    [
        {"role": "user", "content": "hi"},
        [{"role": "user", "content": {"type": "text", "text": "hi"}}],
        {"type": "text", "text": "hi"},
        [{"type": "text", "text": "hi"}],
    ],
)
def test_one_message_or_part_needs_no_list(gateway, messages):
    with triptych.Client(gateway.address) as client:
        client.estimate(messages)
    [message] = gateway.requests[0].messages
    assert (message.role, [part.text for part in message.parts]) == (gateway_pb2.ROLE_USER, ["hi"])


@pytest.mark.parametrize(("token", "sent"), [(None, None), ("", None), ("key", "Bearer key"), (" key\n", "Bearer key")])
def test_a_token_is_sent_without_the_end_of_its_line(gateway, token, sent):
    with triptych.Client(gateway.address, token=token) as client:
        client.chat("what?")
    assert gateway.keys == [sent]


@pytest.mark.asyncio
@pytest.mark.parametrize("token", ["two\nlines", "é", "nul\0"])
async def test_a_token_that_cannot_be_sent_is_an_invalid_argument_and_not_repeated(gateway, token):
    with triptych.Client(gateway.address, token=token) as client, pytest.raises(errors.InvalidArgument, match="token") as refused:
        client.chat("what?")
    assert token not in str(refused.value)
    async with triptych.AsyncClient(gateway.address, token=token) as other:
        with pytest.raises(errors.InvalidArgument, match="token"):
            await other.models()
    assert not gateway.requests


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_an_endless_timeout_is_no_passed_deadline(gateway, timeout):
    with triptych.Client(gateway.address, timeout=timeout) as client:
        assert client.chat("what?").text
