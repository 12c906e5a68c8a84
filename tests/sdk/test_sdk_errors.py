"""Typed errors and retries, sync and async."""

from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import duration_pb2

import triptych
from triptych import attempts, errors
from triptych.common.v1 import error_pb2

RetryInfo = error_pb2.RetryInfo
VIOLATION = error_pb2.BadRequest.FieldViolation(field="messages[0].parts[0].image", description="not a picture")
BAD_IMAGE = error_pb2.BadRequest(field_violations=[VIOLATION])


def caught(gateway, kind, **options):
    """What `chat` raises."""
    with triptych.Client(gateway.address) as client, pytest.raises(kind) as error:
        client.chat("what?", **options)
    return error.value


def test_a_bad_part_names_its_field(gateway):
    request = error_pb2.RequestInfo(request_id="server-side")
    gateway.fail(grpc.StatusCode.INVALID_ARGUMENT, "1 bad part", BAD_IMAGE, request)
    error = caught(gateway, errors.InvalidArgument)
    assert error.violations == [("messages[0].parts[0].image", "not a picture")]
    assert (error.code, error.message) == (grpc.StatusCode.INVALID_ARGUMENT, "1 bad part")
    assert error.request_id == "server-side"
    assert str(error) == "1 bad part; messages[0].parts[0].image: not a picture"


@pytest.mark.parametrize(
    ("message", "text", "line"),
    [
        ("not a picture", "not a picture", "parts[0].image: not a picture"),
        ("parts[0].image: not a picture", "not a picture", "parts[0].image: not a picture"),
        ("bad request", "not a picture", "bad request; parts[0].image: not a picture"),
    ],
)
def test_an_error_says_field_and_text_once(message, text, line):
    assert str(errors.InvalidArgument(message, violations=(("parts[0].image", text),))) == line


def test_too_long_says_limit_and_figure(gateway):
    info = error_pb2.ErrorInfo(
        reason="CONTEXT_LENGTH_EXCEEDED", domain="triptych", metadata={"limit": "4096", "requested": "5000"}
    )
    gateway.fail(grpc.StatusCode.INVALID_ARGUMENT, "too long", info)
    error = caught(gateway, errors.ContextLengthExceeded)
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert error.metadata == {"limit": "4096", "requested": "5000"}


def test_overload_says_when_to_come_back_and_is_not_retried(gateway):
    delay = RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    gateway.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", delay)
    assert caught(gateway, errors.ResourceExhausted, request_id="mine").retry_delay == 1.5
    assert gateway.request_ids == ["mine"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.INTERNAL, errors.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unimplemented),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (grpc.StatusCode.ABORTED, errors.TriptychError),
    ],
)
def test_every_code_has_a_class_and_is_tried_once(gateway, code, kind):
    gateway.fail(code, "no")
    error = caught(gateway, kind, request_id="mine")
    assert (type(error), error.code, error.message, error.request_id) == (kind, code, "no", "mine")
    assert len(gateway.requests) == 1


def test_unavailable_is_retried_under_the_same_id(gateway):
    soon = RetryInfo(retry_delay=duration_pb2.Duration(nanos=1))
    gateway.fail(grpc.StatusCode.UNAVAILABLE, "draining", soon, calls=2)
    with triptych.Client(gateway.address) as client:
        assert client.chat("what?", timeout=5).text
    assert len(gateway.requests) == 3 and len(set(gateway.request_ids)) == 1


def test_tries_share_one_deadline(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    call = attempts.Attempts("somewhere:1", timeout=10)
    assert call.remaining() == 10
    now[0] += 4
    assert call.remaining() == 6
    now[0] += 20
    assert call.remaining() == 0


def test_unavailable_is_tried_three_times(gateway):
    gateway.fail(grpc.StatusCode.UNAVAILABLE, "draining")
    assert caught(gateway, errors.Unavailable).message == "draining"
    assert len(gateway.requests) == 3


def test_a_retry_delay_beyond_the_deadline_ends_the_tries(gateway):
    delay = RetryInfo(retry_delay=duration_pb2.Duration(seconds=60))
    gateway.fail(grpc.StatusCode.UNAVAILABLE, "draining", delay)
    assert caught(gateway, errors.Unavailable, timeout=5).retry_delay == 60
    assert len(gateway.requests) == 1


def test_nothing_is_retried_after_a_message(gateway, events):
    gateway.fail(grpc.StatusCode.UNAVAILABLE, "backend died", after=events[:2])
    with triptych.Client(gateway.address) as client, client.stream("what?") as stream:
        assert next(stream) == "It is "
        with pytest.raises(errors.Unavailable, match="backend died"):
            next(stream)
    assert len(gateway.requests) == 1


@pytest.mark.asyncio
async def test_the_async_client_fails_and_retries_alike(gateway, events):
    gateway.fail(grpc.StatusCode.UNAVAILABLE, "draining", calls=1)
    async with triptych.AsyncClient(gateway.address) as client:
        assert (await client.chat("what?")).text
        assert len(gateway.requests) == 2 and len(set(gateway.request_ids)) == 1
        gateway.fail(grpc.StatusCode.INVALID_ARGUMENT, "bad", BAD_IMAGE)
        with pytest.raises(errors.InvalidArgument) as error:
            await client.chat("what?")
        assert error.value.violations
        gateway.fail(grpc.StatusCode.UNAVAILABLE, "backend died", after=events[:2])
        gateway.requests.clear()
        with pytest.raises(errors.Unavailable, match="backend died"):
            await client.chat("what?")
        assert len(gateway.requests) == 1
        gateway.script = lambda context: iter(events[:2])
        with pytest.raises(errors.StreamTruncated):
            await client.chat("what?")


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_stream_without_done_is_truncated(gateway, events, length):
    gateway.script = lambda context: iter(events[:length])
    error = caught(gateway, errors.StreamTruncated, request_id="mine")
    assert error.request_id == "mine" and "before it was complete" in str(error)


def test_the_deadline_passes(gateway):
    gateway.script = gateway.wait_for_cancel
    with triptych.Client(gateway.address) as client:
        assert client.ready()
        with pytest.raises(errors.DeadlineExceeded, match=r"within 0\.5 s"):
            client.chat("what?", timeout=0.5)
    assert gateway.cancelled.wait(5)


def test_nobody_there_says_what_to_do(nowhere):
    with triptych.Client(nowhere) as client, pytest.raises(errors.Unavailable) as error:
        client.models()
    assert str(error.value) == f"no Triptych gateway answers at {nowhere}: start one with `triptych up`"
    assert error.value.request_id


def test_a_broken_details_trailer_does_not_hide_the_error(gateway):
    def script(context):
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(grpc.StatusCode.INTERNAL, "opaque")
        yield

    gateway.script = script
    assert caught(gateway, errors.InternalError).message == "opaque"


def test_a_request_too_large_for_a_message_is_not_sent(gateway):
    with triptych.Client(gateway.address) as client, pytest.raises(errors.InvalidArgument) as error:
        client.chat("x" * 64 * 2**20)
    assert "64.0 MiB, the limit is 64; send fewer or smaller media" in str(error.value)
    assert error.value.reason == "MESSAGE_TOO_LARGE" and error.value.metadata["limit"] == str(64 * 2**20)
    assert not gateway.requests


def test_a_message_that_grpc_refuses_says_what_to_do(gateway):
    text = "SERVER: Received message larger than max (5 vs. 4)"
    gateway.script = lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    error = caught(gateway, errors.InvalidArgument, request_id="mine")
    assert "(5 vs. 4)); send fewer or smaller media" in str(error) and error.request_id == "mine"
    assert error.reason == "MESSAGE_TOO_LARGE" and len(gateway.requests) == 1
