"""Plain transformers: one request after the other, or all of a load as one batch padded on the left.

python -m bench.incumbents.padded MODEL DTYPE {one-by-one,batch}
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def main() -> None:
    model_path, dtype, how = sys.argv[1:]
    import torch
    from PIL import Image

    from bench.incumbents.answering import serve_loads
    from bench.load import Ask
    from services.models.hf import transformers

    vision = "vision" in model_path
    kind: Any = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(model_path) if vision else None
    if vision:
        processor.tokenizer.padding_side = "left"

    def inputs(asks: Sequence[Ask]) -> dict[str, Any]:
        if vision:
            pictures = [Image.open(ask.image).convert("RGB") for ask in asks]
            made = processor(text=[ask.text for ask in asks], images=pictures, padding=True, return_tensors="pt")
            return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in made.items()}
        longest = max(len(ask.prompt) for ask in asks)
        padded = [[0] * (longest - len(ask.prompt)) + ask.prompt for ask in asks]
        mask = [[0] * (longest - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks]
        return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}

    @torch.inference_mode()
    def together(asks: Sequence[Ask]) -> list[int]:
        longest = max(ask.new_tokens for ask in asks)
        given = inputs(asks)
        out = model.generate(**given, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0)
        assert out.shape[1] - given["input_ids"].shape[1] == longest
        return [ask.new_tokens for ask in asks]  # what is longer than asked for is the padding's price

    def answer(asks: Sequence[Ask]) -> list[int]:
        if how == "batch":
            return together(asks)
        return [made for ask in asks for made in together([ask])]

    serve_loads(answer)


if __name__ == "__main__":
    main()
