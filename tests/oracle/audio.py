"""Families that listen: what their towers' output means item by item."""

from __future__ import annotations

import re
from typing import Any

import torch

from services.models.hf import transformers
from services.models.media import Grid, Modality
from tests.oracle import Item, Takes
from tests.oracle.prompt import in_order, runs
from tests.oracle.qwen import seen_items

VOXTRAL_ROWS = 375  # of each window of 30 s


def recording(rows: torch.Tensor, **details: Any) -> Item:
    return Item(Modality.AUDIO, rows, Grid(1, 1, len(rows)), details=details)


def qwen2_audio_items(model: Any, inputs: Any) -> list[Item]:
    """Recordings, taken from the projector while the whole model runs: this family has no method for its features."""
    if "input_features" not in inputs:
        return []
    caught: list[torch.Tensor] = []
    base = model.base_model
    hook = base.multi_modal_projector.register_forward_hook(lambda module, args, out: caught.append(out))
    try:
        base(**inputs)
    finally:
        hook.remove()
    _, rows = base.audio_tower._get_feat_extract_output_lengths(inputs["feature_attention_mask"].sum(-1))
    return [recording(features[:count]) for features, count in zip(caught[0], rows.tolist(), strict=True)]


def voxtral_items(model: Any, inputs: Any) -> list[Item]:
    """Recordings; the tower knows windows of 30 s, the prompt says which belong together."""
    if "input_features" not in inputs:
        return []
    rows = model.base_model.get_audio_features(inputs["input_features"], return_dict=True).pooler_output
    return [recording(part) for part in rows.split(runs(model, inputs, Modality.AUDIO))]


def omni_items(model: Any, inputs: Any) -> list[Item]:
    """Pictures, clips and recordings; ``feature_length`` is a recording's mel frames, from which positions are made."""
    items = seen_items(model, inputs)
    if "input_features" in inputs:
        base, mask = model.base_model, inputs["feature_attention_mask"]
        frames = mask.sum(-1)
        _, rows = base.audio_tower._get_feat_extract_output_lengths(frames)
        features = base.get_audio_features(inputs["input_features"], mask, return_dict=True).last_hidden_state
        parts = zip(features.split(rows.tolist()), frames.tolist(), strict=True)
        items += [recording(part, feature_length=length) for part, length in parts]
    return in_order(model, inputs, items)


def voxtral_inputs(processor: Any, messages: list[dict[str, Any]]) -> Any:
    """What ``VoxtralProcessor`` makes of a conversation when its tokenizer comes from ``mistral_common``.

    With an ordinary tokenizer it renders text only; here [AUDIO] is repeated, and its own mel windows are attached.
    """
    heard = [part["audio"] for message in messages for part in message["content"] if part["type"] == "audio"]
    settings = processor._merge_kwargs()["audio_kwargs"]
    positions = settings.pop("max_source_positions")
    windows = [processor._retrieve_input_features([samples], positions, **settings) for samples in heard]
    counts = iter([VOXTRAL_ROWS * len(window) for window in windows])
    prompt = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = re.sub(re.escape(processor.audio_token), lambda match: match[0] * next(counts), prompt)
    inputs = processor.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    extra = {"input_features": torch.cat(windows)} if windows else {}
    return transformers.BatchFeature({**inputs, **extra})


ITEMS = {"qwen2_audio": qwen2_audio_items, "voxtral": voxtral_items, "qwen2_5_omni_thinker": omni_items}
INPUTS = {"voxtral": voxtral_inputs}
TAKES = {
    "qwen2_audio": Takes((Modality.AUDIO,)),
    "voxtral": Takes((Modality.AUDIO,)),
    "qwen2_5_omni_thinker": Takes((Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)),
}
