"""The families that can be written, by ``model_type``."""

from __future__ import annotations

from scripts.checkpoints.blueprint import Builder
from scripts.checkpoints.gemma import gemma2, gemma3, gemma3_text, paligemma
from scripts.checkpoints.gemma4 import gemma4
from scripts.checkpoints.idefics import idefics3, smolvlm
from scripts.checkpoints.llama import llama, llava
from scripts.checkpoints.llava_family import internvl, llava_next, llava_onevision
from scripts.checkpoints.mllama import mllama
from scripts.checkpoints.phi import phi4_multimodal
from scripts.checkpoints.qwen import qwen2, qwen2_vl

FAMILIES: dict[str, Builder] = {"qwen2_vl": qwen2_vl, "llava": llava, "llama": llama, "qwen2": qwen2}
FAMILIES |= {"gemma3": gemma3, "mllama": mllama, "paligemma": paligemma, "gemma2": gemma2, "gemma3_text": gemma3_text}
FAMILIES |= {"gemma4": gemma4, "llava_next": llava_next, "llava_onevision": llava_onevision, "internvl": internvl}
FAMILIES |= {"smolvlm": smolvlm, "idefics3": idefics3, "phi4_multimodal": phi4_multimodal}
