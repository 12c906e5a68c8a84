"""`triptych status`: is the gateway there, what does it serve, how busy is it."""

import argparse
import json
from dataclasses import asdict

from triptych.cli import options
from triptych.client import Client

HELP = "Show the gateway's health, models and load. Exit code 1 if it takes no requests."
EXAMPLES = """examples:
  triptych status
  triptych status --address gateway.internal:50050 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.add_address(parser, timeout=5.0)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    with Client(args.address, timeout=args.timeout) as client:
        serving, models, load = client.ready(), client.models(), client.load()
    if args.json:
        models_json = [asdict(model) for model in models]
        print(json.dumps({"address": args.address, "serving": serving, "models": models_json, "load": asdict(load)}))
    else:
        print(f"gateway  {args.address} {'serving' if serving else 'not serving'}")
        for model in models:
            modalities = ", ".join(("text", *model.modalities))
            print(f"model    {model.name} ({model.family}): {modalities}; at most {model.max_model_len} tokens")
        blocks = f"{load.reserved_kv_blocks} of {load.total_kv_blocks} KV blocks reserved"
        requests = f"{load.running_requests} running, {load.queued_requests} queued, {load.finished_requests} finished"
        print(f"load     {requests}; {blocks}")
    return 0 if serving else 1
