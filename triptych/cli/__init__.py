"""The `triptych` command. Exit codes: 0 done, 1 failed, 2 the input is wrong, 130 interrupted."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from triptych import errors
from triptych.cli import ask, estimate, status, up

_EPILOG = """examples:
  triptych up                                    start the local stack; Ctrl-C stops it
  triptych ask "What is this?" --image cat.jpg   in another terminal
  triptych estimate --video clip.mp4             count tokens without running a model

`triptych COMMAND --help` has more."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"triptych: error: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Raises:
        SystemExit: after --help (0) and wrong usage (2).
    """
    raw = argparse.RawDescriptionHelpFormatter
    about = "Serves and asks multimodal models."
    parser = _Parser(prog="triptych", description=about, epilog=_EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (ask, estimate, status, up):
        child = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.HELP,
            description=command.HELP,
            epilog=command.EXAMPLES,
            formatter_class=raw,
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except errors.TriptychError as error:
        quote = f" (request {error.request_id})" if isinstance(error, errors.InternalError) else ""
        print(f"triptych: error: {error}{quote}", file=sys.stderr)
        return 2 if isinstance(error, errors.InvalidArgument | errors.NotFound) else 1
