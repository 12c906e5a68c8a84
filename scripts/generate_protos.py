"""Generates the Python stubs and their .pyi from protos/ into triptych/; with --check, fails if they differ.

example: python scripts/generate_protos.py --check
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> list[Path]:
    """Write stubs for every proto under ``out``; returns their paths relative to it."""
    files = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    plugins = [f"--plugin=protoc-gen-{n}={Path(sys.executable).parent / f'protoc-gen-{n}'}" for n in ("mypy", "mypy_grpc")]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *plugins, *outputs, *files], check=True)
    for stub in list(out.rglob("*_pb2_grpc.py*")):
        if "Service" not in (PROTOS / stub.relative_to(out).parent / (stub.name.split("_pb2_grpc")[0] + ".proto")).read_text():
            stub.unlink()  # a proto without a service has nothing to say here
    return sorted(p.relative_to(out) for p in out.rglob("*_pb2*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs instead of writing them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        stubs = generate(out)
        if args.check:
            committed = {p.relative_to(ROOT) for p in (ROOT / "triptych").rglob("*_pb2*") if p.suffix in (".py", ".pyi")}
            stale = [p for p in stubs if p not in committed or not filecmp.cmp(out / p, ROOT / p, shallow=False)]
            stale += sorted(committed - set(stubs))
            if stale:
                sys.exit("stubs differ from protos/: " + ", ".join(map(str, stale)) + "; run `make protos` and commit the result")
            print(f"{len(stubs)} stubs match protos/")
            return
        for stub in stubs:
            target = ROOT / stub
            target.parent.mkdir(parents=True, exist_ok=True)
            for package in [target.parent, target.parent.parent]:
                (package / "__init__.py").touch()
            shutil.copyfile(out / stub, target)
        print(f"wrote {len(stubs)} stubs")


if __name__ == "__main__":
    main()
