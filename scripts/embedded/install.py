"""Puts a trained checkpoint where the services look for the embedded model, as bfloat16 and without training state.

example: python -m scripts.embedded.install build/embedded && make eval
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen2VLForConditionalGeneration

from services.models.checkpoint import EMBEDDED

COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path, help="folder that scripts.embedded.train wrote")
    args = parser.parse_args(argv)
    model = Qwen2VLForConditionalGeneration.from_pretrained(args.trained, dtype=torch.bfloat16)
    model.save_pretrained(EMBEDDED)
    for name in COPIED:
        shutil.copyfile(args.trained / name, EMBEDDED / name)
    print(f"{EMBEDDED}: {sum(f.stat().st_size for f in EMBEDDED.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
