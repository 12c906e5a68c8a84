"""Configuration from one frozen dataclass: its defaults, ``TRIPTYCH_*`` variables, then command-line flags.

The dataclass is the only place where an option exists; the flags, their help and the environment variables are derived
from it. An unknown flag or a value of the wrong type is an error; variables of the same prefix may be other services'.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

PREFIX = "TRIPTYCH_"
C = TypeVar("C", bound="ServiceConfig")


def option(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field with the help text that its flag shows."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class ServiceConfig:
    """Options that every service has."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "gRPC port; 0 takes a free one and logs it")
    metrics_port: int = option(0, "HTTP port of /metrics; 0 turns it off")
    grace_seconds: float = option(30.0, "after SIGTERM, time for running requests to finish")
    log_level: str = option("info", "least severe log lines to write", ["debug", "info", "warning", "error"])

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"--{name.replace('_', '-')} must be between 0 and 65535, got {getattr(self, name)}")
        if self.grace_seconds < 0:
            raise ValueError(f"--grace-seconds must not be negative, got {self.grace_seconds}")


def parse_config(
    config_type: type[C], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None, *, examples: str = ""
) -> C:
    """Read the configuration, or exit with code 2 and one line that names the option.

    Args:
        config_type: a frozen dataclass whose fields were made with :func:`option`.
        argv: arguments without the program's name; None means ``sys.argv[1:]``.
        environ: None means ``os.environ``.
        examples: shown at the end of ``--help``.
    """
    environ = os.environ if environ is None else environ
    types = get_type_hints(config_type)
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # twenty lines, before every error too
        description=config_type.__doc__,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, f in fields.items():
        variable = PREFIX + name.upper()
        text = f"{f.metadata['help']} (default: {f.default if f.default not in ('', None) else 'none'}; {variable})".replace(
            "%", "%%"
        )
        flag = "--" + name.replace("_", "-")
        if types[name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(
                flag, type=types[name], choices=f.metadata["choices"], default=None, metavar=name.upper(), help=text
            )
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    values: dict[str, Any] = {}
    for name, f in fields.items():
        variable = PREFIX + name.upper()
        if name in given:
            values[name] = given[name]
        elif variable in environ:
            values[name] = _from_environment(parser, variable, environ[variable], types[name], f.metadata["choices"])
    try:
        return config_type(**values)
    except ValueError as error:
        parser.error(str(error))


def _from_environment(
    parser: argparse.ArgumentParser, variable: str, text: str, kind: type, choices: Sequence[str] | None
) -> Any:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            parser.error(f"{variable} must be 0, 1, true or false, got {text!r}")
        return text.lower() in ("1", "true")
    try:
        value = kind(text)
    except ValueError:
        parser.error(f"{variable} must be of type {kind.__name__}, got {text!r}")
    if choices and value not in choices:
        parser.error(f"{variable} must be one of {', '.join(choices)}, got {text!r}")
    return value
