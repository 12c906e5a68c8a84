"""`triptych status`: is the gateway there, what does it serve, how busy is it."""

import argparse
import json
from dataclasses import asdict

from triptych.cli import options

HELP = "Show the gateway's health, models and load, or another service's health. Exit code 1 if it takes no requests."
EXAMPLES = """examples:
  triptych status
  triptych status --address gateway.internal:50050 --json
  triptych status --address 127.0.0.1:50052 --service triptych.llm.v1.LlmService"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--service", metavar="NAME", help="ask for this gRPC service's health alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.add_address(parser, timeout=5.0)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.service:
        return _check(args)
    with options.client(args) as client:
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


def _check(args: argparse.Namespace) -> int:
    with options.client(args) as client:
        serving = client.ready(args.service)
    print(json.dumps({"address": args.address, "serving": serving}) if args.json else "serving" if serving else "not serving")
    return 0 if serving else 1
