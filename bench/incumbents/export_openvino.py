"""Exports the comparison's checkpoints for OpenVINO, with the python of its virtual environment.

    python -m bench.incumbents.export_openvino FOLDER

``FOLDER/text-float32`` becomes ``FOLDER/openvino-text``, ``FOLDER/vision-float32`` becomes ``FOLDER/openvino-vision``; weights
are stored as float16. The vision checkpoint's configuration is written as transformers 4 reads it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    folder = Path(sys.argv[1])
    from services.models.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig  # noqa: F401  # registers what the export needs

    settings: dict[str, Any] = {"ov_config": OVConfig(dtype="fp16")}
    main_export(str(folder / "text-float32"), folder / "openvino-text", task="text-generation-with-past", **settings)
    with tempfile.TemporaryDirectory() as copy:
        source = Path(copy) / "vision"
        shutil.copytree(folder / "vision-float32", source)
        _write_for_transformers_4(source)
        main_export(str(source), folder / "openvino-vision", task="image-text-to-text", **settings)
    for name in ("text", "vision"):
        _export_tokenizer(folder / f"{name}-float32", folder / f"openvino-{name}")


def _export_tokenizer(source: Path, out: Path) -> None:
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    config = json.loads((source / "tokenizer_config.json").read_text())
    named = {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), **named)
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(there, out / "openvino_tokenizer.xml")
    openvino.save_model(back, out / "openvino_detokenizer.xml")


def _write_for_transformers_4(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    config = {**text, **config, "model_type": "qwen2_vl"}
    (source / "config.json").write_text(json.dumps(config))
    processor = json.loads((source / "processor_config.json").read_text())
    (source / "preprocessor_config.json").write_text(json.dumps(processor["image_processor"]))
    (source / "video_preprocessor_config.json").write_text(json.dumps(processor["video_processor"]))
    (source / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))


if __name__ == "__main__":
    main()
