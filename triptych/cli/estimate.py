"""`triptych estimate`: what a conversation would cost, counted from headers alone."""

import argparse
import json
from dataclasses import asdict

from triptych import errors
from triptych.cli import options, render
from triptych.reports import Estimate, MediaEstimate

HELP = "Count a conversation's tokens and cost without running a model."
EXAMPLES = """examples:
  triptych estimate --image photo.jpg
  triptych estimate "Summarise both." --video clip.mp4 --audio talk.wav --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("question", metavar="QUESTION", nargs="?", help="comes after the media")
    options.add_conversation(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, as the HTTP gateway's /v1/estimate does")
    options.add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.question is None and not args.media:
        raise errors.InvalidArgument("nothing to count: give a QUESTION, --image, --audio or --video")
    conversation = options.messages(args)
    with options.client(args) as client:
        estimate = client.estimate(conversation, model=args.model, max_tokens=args.max_tokens)
    print(json.dumps(_json(estimate)) if args.json else "\n".join(_lines(estimate)))
    return 0


def _json(estimate: Estimate) -> dict[str, object]:
    figures = asdict(estimate)
    usage = {name: figures.pop(name) for name in ("prompt_tokens", "prompt_tokens_details")}
    return {"usage": usage, **figures}


def _lines(estimate: Estimate) -> list[str]:
    cost = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in asdict(estimate.cost).items())
    prompt = render.prompt_tokens(estimate.prompt_tokens_details)
    return [
        f"prompt {prompt}, of at most {estimate.max_model_len} with the answer",
        *map(_media_line, estimate.media),
        f"cost {cost}",
    ]


def _media_line(item: MediaEstimate) -> str:
    words = [item.field, item.modality]
    if item.width is not None and item.height is not None:
        words.append(f"{item.width}x{item.height} pixels")
    if item.grid is not None:
        words.append("grid " + "x".join(map(str, item.grid)))
    return "  ".join([*words, f"{item.tokens} tokens"])
