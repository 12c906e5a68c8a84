"""Write a complete random-weight checkpoint of a model family, for tests and demonstrations without real weights.

Stock ``transformers`` loads the directory with its Auto classes; the same arguments always give the same bytes.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

EXAMPLES = """examples:
  python scripts/make_checkpoint.py --family qwen2_vl --out /tmp/tiny-qwen2-vl
  python scripts/make_checkpoint.py --family llava --out /tmp/tiny-llava --hidden-size 128 --layers 6 --dtype bfloat16
  python -m scripts.make_checkpoint --family llama --out /tmp/tiny-llama --seed 7 --shard-size 1MB --force
"""


DTYPES = ("float32", "bfloat16")
VOCAB_SIZE = "tokens, special ones included; rows are padded to 64 and zero past the last token (default %(default)s)"
SHARD_SIZE = "largest weight file, unless one tensor is larger: 300KB, 5MB, 1GB (default %(default)s)"


def shard_size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 300KB, 5MB or 1GB")
    return text


def parser(families: Sequence[str]) -> argparse.ArgumentParser:
    from scripts.checkpoints.blueprint import Options

    result = argparse.ArgumentParser(
        prog="make_checkpoint",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--family", required=True, metavar="FAMILY", help=f"one of: {', '.join(families)}")
    add("--out", required=True, type=Path, metavar="DIR", help="directory to write, created if missing")
    add("--seed", type=int, default=0, help="weights are a function of this (default %(default)s)")
    add(
        "--hidden-size",
        type=int,
        default=Options.hidden_size,
        help="decoder width, multiple of 32 (default %(default)s)",
    )
    add("--layers", type=int, default=Options.layers, help="decoder layers (default %(default)s)")
    add("--vocab-size", type=int, default=Options.vocab_size, help=VOCAB_SIZE)
    add("--dtype", choices=DTYPES, default="float32", help="of the stored weights (default %(default)s)")
    add("--shard-size", type=shard_size, default="300KB", help=SHARD_SIZE)
    add("--force", action="store_true", help="replace an earlier checkpoint in DIR; other files there stay")
    return result


def refuse(message: str) -> int:
    print(f"make_checkpoint: {message}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    from scripts.checkpoints.blueprint import Options
    from scripts.checkpoints.registry import FAMILIES
    from scripts.checkpoints.writer import say, write

    args = parser(list(FAMILIES)).parse_args(arguments)
    if args.family not in FAMILIES:
        return refuse(f"unknown family {args.family!r}; known families: {', '.join(FAMILIES)}")
    if args.out.exists() and not args.out.is_dir():
        return refuse(f"{args.out} is not a directory")
    if args.out.is_dir() and any(args.out.iterdir()) and not args.force:
        return refuse(f"{args.out} is not empty; choose another directory or pass --force")
    started = time.monotonic()
    try:
        options = Options(hidden_size=args.hidden_size, layers=args.layers, vocab_size=args.vocab_size)
        blueprint = FAMILIES[args.family](options)
    except (ImportError, ValueError) as error:
        return refuse(str(error))
    say(f"writing {args.family} (seed {args.seed}, {args.dtype}) to {args.out}")
    write(blueprint, args.out, seed=args.seed, dtype=args.dtype, shard_size=args.shard_size)
    total = sum(path.stat().st_size for path in args.out.iterdir())
    say(f"done: {total / 1e6:.1f} MB in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
