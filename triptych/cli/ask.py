"""`triptych ask`: streams an answer, or one for each page of a document, to stdout; figures go to stderr."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from triptych import content
from triptych.answer import ChatResult, Delta
from triptych.cli import options, render
from triptych.cli.document import Document
from triptych.errors import InvalidArgument, TriptychError

HELP = "Ask a question about text, images, audio and video."
EXAMPLES = """examples:
  triptych ask "What is the capital of France?"
  triptych ask "What is this?" --image cat.jpg --timings
  triptych ask "Which one is in the clip?" --image a.png --image b.png --video clip.mp4 --max-tokens 64
  triptych ask "What is the total?" --pages invoices.pdf                     an answer for each page
  triptych ask "Who signed?" --pages scans/ last.png                         a folder's files, then one more
  triptych ask "What happens?" --pages part1.mp4 part2.mp4 --remember 2      each knows the two answers before"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("question", metavar="QUESTION", help="comes after the media")
    options.add_conversation(parser)
    what = "ask of every page by itself: PDFs, pictures, recordings, videos, folders of them; --timeout is then for each page"
    parser.add_argument("--pages", metavar="FILE", nargs="+", help=what)
    parser.add_argument("--remember", metavar="N", type=int, default=0, help="how many pages before it a page's answer knows (0)")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (the model's own)")
    parser.add_argument("--seed", metavar="S", type=int, help="same seed, same answer")
    parser.add_argument("--timings", action="store_true", help="draw where the time went")
    parser.add_argument("--usage", action="store_true", help="print the tokens as a line of JSON instead of a sentence")
    parser.add_argument("--quiet", action="store_true", help="print the answer alone")
    options.add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.pages is not None:
        return _run_pages(args)
    conversation = options.messages(args)
    start = time.monotonic()
    with options.client(args) as client, client.stream(conversation, **_choices(args)) as stream:
        _write(stream)
    _report(args, stream.result, start)
    return 0


def _run_pages(args: argparse.Namespace) -> int:
    """A title, the answer and its figures for each page; a page without an answer is told and leaves the others alone."""
    if args.media:
        raise InvalidArgument("--pages cannot go with --image, --audio or --video: name all files after --pages")
    document = Document(args.pages)
    messages = [] if args.system is None else [content.system(args.system)]
    more = {"messages": messages, "remember": args.remember, "timeout": args.timeout * len(document)}
    start, answered = time.monotonic(), 0
    with options.client(args) as client, client.pages(args.question, document, **more, **_choices(args)) as answers:
        for answer in answers:
            place = document.sent[answer.index]
            print(f"== {document.titles[place]} ({place + 1} of {len(document)})", flush=True)
            try:
                _write(answer)
            except TriptychError as error:
                if error is not answer.error:  # it ended the call
                    raise
                print(f"triptych: error: {document.titles[place]}: {error}", file=sys.stderr)
            else:
                _report(args, answer.result, start)
                answered += 1
            start = time.monotonic()
    for failure in document.failures.values():
        print(f"triptych: error: {failure}", file=sys.stderr)
    if answered < len(document):
        print(f"{answered} of {len(document)} pages were answered", file=sys.stderr)
    return int(answered < len(document))


def _choices(args: argparse.Namespace) -> Any:
    return {"model": args.model, "max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}


def _write(deltas: Iterable[Delta]) -> None:
    """To stdout as they come, and to the end of the line however they end."""
    written = False
    try:
        for delta in deltas:
            written = written or bool(delta)
            sys.stdout.write(delta)
            sys.stdout.flush()
    finally:
        if written:
            print(flush=True)


def _report(args: argparse.Namespace, result: ChatResult, start: float) -> None:
    if args.usage:
        print(json.dumps(asdict(result.usage)), file=sys.stderr)
    elif not args.quiet:
        print(render.usage_line(result.usage, time.monotonic() - start), file=sys.stderr)
    if args.timings:
        print(*render.timing_lines(result.stage_times), sep="\n", file=sys.stderr)
