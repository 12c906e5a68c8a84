"""`triptych ask`: streams one answer to stdout; figures go to stderr."""

import argparse
import json
import sys
import time
from dataclasses import asdict

from triptych.cli import options, render
from triptych.client import Client

HELP = "Ask a question about text, images, audio and video."
EXAMPLES = """examples:
  triptych ask "What is the capital of France?"
  triptych ask "What is this?" --image cat.jpg --timings
  triptych ask "Which one is in the clip?" --image a.png --image b.png --video clip.mp4 --max-tokens 64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("question", metavar="QUESTION", help="comes after the media")
    options.add_conversation(parser)
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (the model's own)")
    parser.add_argument("--seed", metavar="S", type=int, help="same seed, same answer")
    parser.add_argument("--timings", action="store_true", help="draw where the time went")
    parser.add_argument("--usage", action="store_true", help="print the tokens as a line of JSON instead of a sentence")
    parser.add_argument("--quiet", action="store_true", help="print the answer alone")
    options.add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    conversation = options.messages(args)
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    start = time.monotonic()
    written = False
    with Client(args.address, timeout=args.timeout) as client:
        try:
            with client.stream(conversation, model=args.model, **sampling) as stream:
                for delta in stream:
                    written = written or bool(delta)
                    sys.stdout.write(delta)
                    sys.stdout.flush()
        finally:
            if written:
                print(flush=True)
    if args.usage:
        print(json.dumps(asdict(stream.result.usage)), file=sys.stderr)
    elif not args.quiet:
        print(render.usage_line(stream.result.usage, time.monotonic() - start), file=sys.stderr)
    if args.timings:
        print(*render.timing_lines(stream.result.stage_times), sep="\n", file=sys.stderr)
    return 0
