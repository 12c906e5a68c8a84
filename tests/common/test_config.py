"""Configuration: defaults, then variables, then flags; every mistake is one line that names the option."""

from __future__ import annotations

import dataclasses

import pytest

from services.common.config import parse_config
from services.encoder.config import EncoderConfig
from services.gateway.config import GatewayConfig
from services.llm.config import LlmConfig


def test_flags_beat_variables_beat_defaults() -> None:
    assert parse_config(LlmConfig, [], {}).max_num_seqs == LlmConfig().max_num_seqs
    environ = {"TRIPTYCH_MAX_NUM_SEQS": "7", "TRIPTYCH_BLOCK_SIZE": "8", "UNRELATED": "x"}
    config = parse_config(LlmConfig, ["--max-num-seqs", "9"], environ)
    assert (config.max_num_seqs, config.block_size) == (9, 8)


def test_an_explicit_default_still_beats_a_variable() -> None:
    default = LlmConfig().max_num_seqs
    assert parse_config(LlmConfig, ["--max-num-seqs", str(default)], {"TRIPTYCH_MAX_NUM_SEQS": "7"}).max_num_seqs == default


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (["--max-num-sequences", "3"], {}, "--max-num-sequences"),
        (["--max-num-seq", "3"], {}, "--max-num-seq"),  # no guessing of abbreviations
        (["--max-num-seqs", "many"], {}, "--max-num-seqs"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs must be at least 1"),
        (["--dtype", "float8"], {}, "--dtype"),
        (["--port", "70000"], {}, "--port must be at least 0 and at most 65535"),
        (["--gpu-memory-utilization", "0"], {}, "--gpu-memory-utilization must be more than 0 and at most 1, got 0.0"),
        (["--grace-seconds", "nan"], {}, "--grace-seconds must be at least 0, got nan"),
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "9"], {}, "--max-num-batched-tokens"),
        ([], {"TRIPTYCH_MAX_NUM_SEQS": "many"}, "TRIPTYCH_MAX_NUM_SEQS"),
        ([], {"TRIPTYCH_DTYPE": "float8"}, "TRIPTYCH_DTYPE must be one of auto, float32"),
    ],
)
def test_mistakes_exit_with_2_and_name_the_option(
    argv: list[str], environ: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(LlmConfig, argv, environ)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.parametrize("kind", [LlmConfig, EncoderConfig, GatewayConfig])
def test_help_shows_every_option_with_its_variable(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(kind, ["--help"], {})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(kind):
        assert "--" + field.name.replace("_", "-") in shown
        assert all(str(bound) in shown for bound in field.metadata["bounds"].values())
        assert "TRIPTYCH_" + field.name.upper() in shown.replace("\n", "").replace(" ", "")


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LlmConfig().port = 3  # type: ignore[misc]
