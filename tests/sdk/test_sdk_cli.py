"""`triptych ask`, `estimate` and `status`: what they print, where, and their exit codes."""

import json
import os
import re
import signal
import subprocess
import sys

import grpc
import pytest

from tests.patience import PATIENCE
from triptych import reports
from triptych.cli import main, render
from triptych.common.v1 import error_pb2
from triptych.gateway.v1 import gateway_pb2


def test_ask_prints_answer_and_usage(gateway, picture, capsys):
    assert main(["ask", "what?", "--image", str(picture), "--address", gateway.address]) == 0
    out, err = capsys.readouterr()
    assert out == "It is ein Kätzchen.\n"
    assert re.fullmatch(r"prompt 57 tokens \(21 text, 36 image\), answer 4 tokens, \d+\.\d\d s\n", err)


def test_ask_sends_media_in_command_line_order_before_the_question(gateway, tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    a, b, c = (str(tmp_path / name) for name in "abc")
    command = ["ask", "--image", a, "--audio", b, "what?", "--image", c, "--system", "Be brief.", "--seed", "3"]
    command += ["--max-tokens", "9", "--temperature", "0", "--model", "tiny", "--address", gateway.address]
    assert main(command) == 0
    (request,) = gateway.requests
    system, user = request.messages
    assert system.parts[0].text == "Be brief."
    assert [part.WhichOneof("content") for part in user.parts] == ["image", "audio", "image", "text"]
    assert [user.parts[0].image.data, user.parts[1].audio.data, user.parts[2].image.data] == [b"a", b"b", b"c"]
    assert (request.sampling.seed, request.sampling.max_tokens, request.sampling.temperature) == (3, 9, 0)
    assert request.model == "tiny"
    assert {part.image.detail for part in user.parts if part.HasField("image")} == {gateway_pb2.DETAIL_UNSPECIFIED}


def test_detail_is_of_images_alone(gateway, picture, tmp_path):
    (tmp_path / "sound").write_text("b")
    media = ["--image", str(picture), "--audio", str(tmp_path / "sound"), "--detail", "low", "--address", gateway.address]
    assert main(["ask", "what?", *media]) == 0 and main(["estimate", *media]) == 0
    for request in gateway.requests:
        image, audio = request.messages[0].parts[:2]
        assert (image.image.detail, audio.audio.detail) == (gateway_pb2.DETAIL_LOW, gateway_pb2.DETAIL_UNSPECIFIED)


def test_ask_quiet_usage_and_timings(gateway, capsys):
    assert main(["ask", "what?", "--quiet", "--address", gateway.address]) == 0
    assert capsys.readouterr().err == ""
    assert main(["ask", "what?", "--usage", "--address", gateway.address]) == 0
    assert json.loads(capsys.readouterr().err)["prompt_tokens_details"]["image"] == 36
    assert main(["ask", "what?", "--timings", "--quiet", "--address", gateway.address]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line[:13].strip() for line in lines] == ["probe", "wait for rows", "decode"]
    assert lines[2] == "decode        " + "█" * 40 + "      20.0 ms"


def test_timing_bars_are_scaled():
    bars = [line[14:54].rstrip() for line in render.timing_lines(reports.StageTimes(queue=0.5, encode=1.0, decode=0.0))]
    assert bars == ["█" * 20, "█" * 40, ""]
    assert render.timing_lines(reports.StageTimes()) == []


def test_cached_tokens_are_shown():
    assert render.prompt_tokens(reports.PromptTokens(text=3, cached=2)) == "3 tokens (3 text; 2 cached)"


def test_estimate_prints_tokens_media_and_cost(gateway, picture, capsys):
    assert main(["estimate", "--image", str(picture), "--address", gateway.address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "prompt 57 tokens (21 text, 36 image), of at most 4096 with the answer",
        "messages[0].parts[0].image  image  640x480 pixels  grid 1x12x12  36 tokens",
        "cost 144 encoder patches, 57 prefill tokens, 4 kv blocks, 1000 host bytes",
    ]
    assert main(["estimate", "what?", "--json", "--address", gateway.address]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["usage"]["prompt_tokens_details"]["text"] == 21
    assert (figures["media"][0]["modality"], figures["cost"]["kv_blocks"]) == ("image", 4)


def test_the_api_key_is_the_environment_s(gateway, picture, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_TOKEN", "key")
    address = ["--address", gateway.address]
    for command in (["ask", "what?"], ["ask", "what?", "--pages", str(picture)], ["estimate", "what?"], ["status"]):
        assert main([*command, *address]) == 0
    assert set(gateway.keys) == {"Bearer key"} and len(gateway.keys) >= 3


def test_status_of_one_service(gateway, capsys):
    chat = "triptych.gateway.v1.ChatService"
    assert main(["status", "--address", gateway.address, "--service", chat]) == 0
    assert capsys.readouterr().out == "serving\n"
    gateway.serving = False
    assert main(["status", "--address", gateway.address, "--service", chat]) == 1
    assert capsys.readouterr().out == "not serving\n"


def test_status(gateway, capsys):
    assert main(["status", "--address", gateway.address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"gateway  {gateway.address} serving",
        "model    tiny (qwen2_vl): text, image; at most 4096 tokens",
        "load     1 running, 0 queued, 7 finished; 0 of 100 KV blocks reserved",
    ]
    gateway.serving = False
    assert main(["status", "--json", "--address", gateway.address]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["serving"], report["models"][0]["name"], report["load"]["tasks"]) == (False, "tiny", 0)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.NOT_FOUND, 2),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_errors_are_one_line_with_an_exit_code(gateway, capsys, code, exit_code):
    gateway.fail(code, "went\nwrong", error_pb2.RequestInfo(request_id="r7"))
    assert main(["ask", "what?", "--address", gateway.address]) == exit_code
    quote = " (request r7)" if code is grpc.StatusCode.INTERNAL else ""
    assert capsys.readouterr() == ("", f"triptych: error: went wrong{quote}\n")


def test_an_answer_that_breaks_off_keeps_its_line(gateway, events, capsys):
    gateway.script = lambda context: iter(events[:2])
    assert main(["ask", "what?", "--address", gateway.address]) == 1
    out, err = capsys.readouterr()
    assert out == "It is \n" and err.startswith("triptych: error: ") and err.count("\n") == 1


def test_nobody_there(nowhere, capsys):
    for command in (["ask", "what?"], ["estimate", "what?"], ["status"]):
        assert main([*command, "--address", nowhere]) == 1
        expected = f"triptych: error: no Triptych gateway answers at {nowhere}: start one with `triptych up`\n"
        assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("command", [["ask", "what?"], ["estimate"]])
def test_a_missing_file_is_bad_input(gateway, capsys, command):
    assert main([*command, "--image", "gone.jpg", "--address", gateway.address]) == 2
    assert capsys.readouterr().err == "triptych: error: cannot read image file 'gone.jpg': No such file or directory\n"
    assert gateway.requests == []


@pytest.mark.parametrize("command", [[], ["ask"], ["ask", "x", "--seed", "y"], ["nonsense"], ["up", "--llms", "0"]])
def test_wrong_usage_is_one_line(capsys, command):
    with pytest.raises(SystemExit) as exit:
        main(command)
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.startswith("triptych: error: ") and err.count("\n") == 1


def test_an_estimate_of_nothing_is_bad_input(capsys):
    assert main(["estimate"]) == 2
    assert "nothing to count" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ask", "estimate", "status", "up"])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0 and f"  triptych {command}" in capsys.readouterr().out


def heed_ctrl_c():
    """A shell starts what is to run in the background with it ignored, and so would the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_cancels_the_request(gateway):
    gateway.script = gateway.wait_for_cancel
    command = [sys.executable, "-m", "triptych", "ask", "what?", "--address", gateway.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c) as process:
        assert os.read(process.stdout.fileno(), 100) == b"It is "  # streamed before the answer is complete
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, b"\n", b"")
    assert gateway.cancelled.wait(PATIENCE)
