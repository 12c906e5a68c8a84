"""Arguments that several commands take."""

import argparse
import os
from dataclasses import replace
from functools import partial

from triptych import content
from triptych.base import DEFAULT_ADDRESS, DEFAULT_TIMEOUT
from triptych.client import Client

TOKEN = "TRIPTYCH_TOKEN"  # the environment: what stands on a command line, everybody on the machine can read
_READERS = {"image": content.image, "audio": content.audio, "video": content.video}


def add_address(parser: argparse.ArgumentParser, *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """--address and --timeout."""
    key = f"; an API key, where it asks for one, is taken from ${TOKEN}"
    parser.add_argument("--address", metavar="HOST:PORT", default=DEFAULT_ADDRESS, help=f"the gateway (%(default)s){key}")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=timeout, help="(%(default)s)")


def client(args: argparse.Namespace) -> Client:
    """Of the gateway at --address."""
    return Client(args.address, timeout=args.timeout, token=os.environ.get(TOKEN))


def add_conversation(parser: argparse.ArgumentParser) -> None:
    """--image, --audio and --video, which keep their order among each other, --detail, --model, --system and --max-tokens."""
    for modality in _READERS:
        parser.add_argument(
            f"--{modality}",
            metavar="FILE",
            dest="media",
            action="append",
            type=partial(lambda modality, source: (modality, source), modality),
            help=f"{modality} file or URL; may be repeated",
        )
    parser.add_argument(
        "--detail", choices=["auto", "low", "high"], default="auto", help="how closely to look at images (%(default)s)"
    )
    parser.add_argument("--model", default="default", help="a served model's name (the served model)")
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="most tokens to generate (the model's own limit)")


def messages(args: argparse.Namespace) -> list[content.Message]:
    """The conversation: instructions, then the media in command-line order, then the question.

    Raises:
        MediaFileError: a file is missing, empty or unreadable.
    """
    media = [_READERS[modality](source) for modality, source in args.media or ()]
    media = [replace(item, detail=args.detail) if item.modality == "image" else item for item in media]
    question = [] if args.question is None else [args.question]
    instructions = [] if args.system is None else [content.system(args.system)]
    return [*instructions, content.user(*media, *question)]
