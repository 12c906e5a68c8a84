"""`triptych up`: the local stack on one machine, each service a child process, until Ctrl-C."""

import argparse
import importlib.util
import socket
import tempfile
from pathlib import Path

from triptych.cli.child import Child
from triptych.cli.profiles import ENCODER, LLM
from triptych.cli.stack import ChildEnded, Interrupted, Stack, say
from triptych.client import Client
from triptych.errors import TriptychError

HELP = "Start the local stack: a gateway, encoders and language models. Ctrl-C drains it; a second one kills it."
EXAMPLES = """examples:
  triptych up                                        the embedded model
  triptych up --model Qwen/Qwen2-VL-2B-Instruct --dtype bfloat16 --device cuda
  triptych up --encoders 2 --llms 2 --verbose

It prints `ready grpc=HOST:PORT http=HOST:PORT` to stdout when it takes requests."""

_POLL = 0.1
_HTTP_PORT = 8000
_NEEDED = ("services", "uvloop", "uvicorn", "prometheus_client", "tokenizers", "torch", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="checkpoint (the embedded one)")
    parser.add_argument("--host", default="127.0.0.1", help="where the gateway listens (%(default)s)")
    parser.add_argument("--grpc-port", metavar="P", type=int, default=50050, help="(%(default)s; 0 picks one)")
    http = f"of the OpenAI API, on the same host (0 picks one; {_HTTP_PORT}, or where that is taken 0)"
    parser.add_argument("--http-port", metavar="P", type=int, help=http)
    parser.add_argument("--encoders", metavar="N", type=_count, default=1, help="(%(default)s)")
    parser.add_argument("--llms", metavar="N", type=_count, default=1, help="(%(default)s)")
    parser.add_argument("--dtype", metavar="D", help="such as float32 or bfloat16 (the services' default)")
    parser.add_argument("--device", metavar="D", help="such as cpu or cuda (the services' default)")
    parser.add_argument("--max-model-len", metavar="N", type=_count, help="most tokens of prompt and answer together")
    parser.add_argument(
        "--profile", choices=list(LLM), help="what it is mostly used for; sets batches, queues and limits (mixed)"
    )
    parser.add_argument("--log-dir", metavar="DIR", type=Path, help="where logs go (a new temporary directory)")
    parser.add_argument("--verbose", action="store_true", help="show the services' logs here")


def run(args: argparse.Namespace) -> int:
    """Runs the command: 0 after a clean drain, 1 if a service failed, 128 + signal if stopped before it was ready."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        say(f"triptych: error: not installed: {', '.join(missing)}; run pip install 'triptych[all]'")
        return 1
    for flag, port in (("--grpc-port", args.grpc_port), ("--http-port", args.http_port)):
        if (port or 0) > 0 and not _is_free(args.host, port):  # found out now, not when models are loaded
            why = "it is taken, or not this machine's"
            say(f"triptych: error: cannot listen on {args.host}:{port}: {why}; choose another {flag}")
            return 1
    log_dir = args.log_dir
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            say(f"triptych: error: --log-dir: cannot make {log_dir}: {error.strerror}")
            return 1
    elif not args.verbose:
        log_dir = Path(tempfile.mkdtemp(prefix="triptych-"))
    if log_dir is not None:
        say(f"logs in {log_dir}")
    stack = Stack(log_dir, verbose=args.verbose)
    ready = False
    try:
        gateway = _start(stack, args)
        ready = True
        print(f"ready grpc={gateway.address} http={gateway.http_address}", flush=True)
        stack.wait(lambda: False)
        return 0
    except Interrupted as interrupted:
        say("draining; Ctrl-C again kills")
        clean = stack.drain()
        return (0 if clean else 1) if ready else 128 + interrupted.number
    except ChildEnded as ended:
        say("\n".join(f"[{ended.child.name}] {line}" for line in ended.child.errors()))
        stack.drain()
        when = "" if ready else " before the stack was ready"
        where = f" (log: {ended.child.log})" if ended.child.log else ""
        say(f"triptych: error: {ended}{when}{where}")
        return 1
    finally:
        stack.kill()


def _start(stack: Stack, args: argparse.Namespace) -> Child:
    """Starts everything and returns the gateway once it takes requests."""
    model = _flags(args, "model")
    length = _flags(args, "max_model_len")
    backend = ["--host", "127.0.0.1", "--port", "0", *model, *_flags(args, "dtype", "device")]
    encoders = stack.start("encoder", args.encoders, *backend, *ENCODER.get(args.profile, ()))
    llms = stack.start("llm", args.llms, *backend, *length, *LLM.get(args.profile, ()))
    stack.wait(lambda: all(child.address for child in [*encoders, *llms]))
    http_port = args.http_port
    if http_port is None:
        http_port = _HTTP_PORT if _is_free(args.host, _HTTP_PORT) else 0
    door = ["--host", args.host, "--port", str(args.grpc_port), "--http-port", str(http_port)]
    addresses = [",".join(str(child.address) for child in children) for children in (encoders, llms)]
    (gateway,) = stack.start(
        "gateway", 1, *door, "--encoder", addresses[0], "--llm", addresses[1], *model, *length, *_flags(args, "profile")
    )
    stack.wait(lambda: gateway.address is not None)
    address = str(gateway.address)
    with Client(address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]"), timeout=1.0) as client:
        stack.wait(lambda: _is_ready(client), poll=_POLL)
    return gateway


def _is_ready(client: Client) -> bool:
    try:
        return client.ready()
    except TriptychError:
        return False


def _is_free(host: str, port: int) -> bool:
    bare = host.strip("[]")
    try:
        socket.create_server((bare, port), family=socket.AF_INET6 if ":" in bare else socket.AF_INET).close()
    except (OSError, OverflowError):
        return False
    return True


def _flags(args: argparse.Namespace, *names: str) -> list[str]:
    """The named options as flags, those left out left out."""
    given = [(name, getattr(args, name)) for name in names if getattr(args, name) is not None]
    return [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count
