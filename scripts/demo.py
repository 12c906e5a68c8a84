"""``make demo``: starts the local stack on the embedded model, asks about a picture, prints the answer, stops.

The picture, examples/shapes.png, was drawn for this and is in no training set. Fails if the answers are wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.local_stack import local_stack

PICTURE = Path(__file__).resolve().parent.parent / "examples" / "shapes.png"
QUESTIONS = {
    "What color is the circle?": "red",
    "How many shapes are there?": "two",
    "What shape is blue?": "triangle",
}


def main() -> int:
    print("==> starting gateway, encoder and language model with the embedded model", flush=True)
    wrong = []
    with local_stack() as stack:
        for question, expected in QUESTIONS.items():
            print(f'\n==> triptych ask "{question}" --image examples/{PICTURE.name}', flush=True)
            command = [
                sys.executable,
                "-m",
                "triptych",
                "ask",
                question,
                "--image",
                str(PICTURE),
                "--address",
                stack.address,
                "--timings",
            ]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            print(result.stdout, end="", flush=True)
            if result.returncode or result.stdout.strip() != expected:
                wrong.append(f"{question} should be answered {expected!r}")
        print("\n==> stopping", flush=True)
        code = stack.stop()
    if wrong or code:
        print("==> the demo failed: " + "; ".join(wrong or [f"the stack ended with exit code {code}"]), file=sys.stderr)
        return 1
    print("==> every answer was right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
