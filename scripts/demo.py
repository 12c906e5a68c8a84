"""``make demo``: starts the local stack on the embedded model, asks about pictures, prints the answers, stops.

The pictures in examples/ were drawn for this and are in no training set; the number's font is not one that was trained on.
Fails if an answer is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.local_stack import local_stack

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
QUESTIONS = (
    ("circle.png", "What color is the circle?", "red"),
    ("shapes.png", "How many shapes are there?", "two"),
    ("number.png", "What number is this?", "42"),
)


def ask(address: str, question: str, picture: Path) -> str:
    """The answer of `triptych ask`, shown as it streams."""
    command = [sys.executable, "-m", "triptych", "ask", question, "--image", str(picture), "--address", address, "--timings"]
    answer = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while character := process.stdout.read(1):
            print(character, end="", flush=True)
            answer += character
    return answer.strip() if process.returncode == 0 else ""


def main() -> int:
    print("==> starting gateway, encoder and language model with the embedded model", flush=True)
    wrong = []
    with local_stack() as stack:
        for picture, question, expected in QUESTIONS:
            print(f'\n==> triptych ask "{question}" --image examples/{picture} --timings', flush=True)
            if ask(stack.address, question, EXAMPLES / picture) != expected:
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
