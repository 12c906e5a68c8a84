"""Configuration from one frozen dataclass: its defaults, ``TRIPTYCH_*`` variables, then command-line flags.

The dataclass is the only place where an option exists; the flags, their help and the environment variables are derived
from it. An unknown flag or a value of the wrong type is an error; variables of the same prefix may be other services'.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

PREFIX = "TRIPTYCH_"
C = TypeVar("C", bound="ServiceConfig")


_BOUNDS = {
    "least": ("at least", operator.ge), "above": ("more than", operator.gt),
    "most": ("at most", operator.le), "below": ("less than", operator.lt),
}  # fmt: skip


def option(default: Any, help: str, choices: Sequence[str] | None = None, **bounds: float) -> Any:
    """A dataclass field with the help text that its flag shows, and its ``least`` or ``above``, ``most`` or ``below``."""
    assert bounds.keys() <= _BOUNDS.keys()
    return field(default=default, metadata={"help": help, "choices": choices, "bounds": bounds})


@dataclass(frozen=True)
class ServiceConfig:
    """Options that every service has."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "gRPC port; 0 takes a free one and logs it", least=0, most=65535)
    metrics_port: int = option(0, "HTTP port of /metrics; 0 turns it off", least=0, most=65535)
    grace_seconds: float = option(30.0, "after SIGTERM, time for running requests to finish", least=0)
    log_level: str = option("info", "least severe log lines to write", ["debug", "info", "warning", "error"])

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, bounds = getattr(self, f.name), f.metadata["bounds"]
            if not all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):  # NaN is never within
                raise ValueError(f"{_flag(f.name)} must be {_range(bounds)}, got {value}")

    @property
    def max_held_request_bytes(self) -> float:
        """Most bytes of gRPC requests held at once; the services behind the gateway bound what they take in otherwise."""
        return math.inf


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _range(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds.items())


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
        facts = [f"default: {f.default if f.default not in ('', None) else 'none'}", _range(f.metadata["bounds"]), variable]
        text = f"{f.metadata['help']} ({'; '.join(filter(None, facts))})".replace("%", "%%")
        flag = _flag(name)
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
