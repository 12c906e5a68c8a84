"""The families that can be written, by ``model_type``; a variant has a suffix."""

from __future__ import annotations

from scripts.checkpoints.audio import qwen2_5_omni_thinker, qwen2_audio, voxtral
from scripts.checkpoints.blueprint import Builder
from scripts.checkpoints.gemma import gemma2, gemma3, gemma3_text, paligemma
from scripts.checkpoints.gemma4 import gemma4
from scripts.checkpoints.idefics import idefics3, smolvlm
from scripts.checkpoints.llama import llama, llama_dynamic, llava
from scripts.checkpoints.llava_family import internvl, llava_next, llava_onevision
from scripts.checkpoints.mllama import mllama
from scripts.checkpoints.phi import phi4_multimodal
from scripts.checkpoints.qwen import qwen2, qwen2_vl
from scripts.checkpoints.qwen_vl import qwen2_5_vl, qwen3_vl
from scripts.checkpoints.text import mistral, phi3, qwen3

FAMILIES: dict[str, Builder] = {
    "qwen2_vl": qwen2_vl,
    "llava": llava,
    "llama": llama,
    "qwen2": qwen2,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3": qwen3,
    "mistral": mistral,
    "phi3": phi3,
    "llama_dynamic": llama_dynamic,
    "qwen2_audio": qwen2_audio,
    "voxtral": voxtral,
    "qwen2_5_omni_thinker": qwen2_5_omni_thinker,
    "gemma3": gemma3,
    "mllama": mllama,
    "paligemma": paligemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma4": gemma4,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
    "smolvlm": smolvlm,
    "idefics3": idefics3,
    "phi4_multimodal": phi4_multimodal,
}
