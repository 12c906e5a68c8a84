"""What an installation pulls, and what the repository must hold."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[; ]", r)[0] for r in requirements}


def test_the_sdk_pulls_grpcio_and_protobuf_only() -> None:
    assert names(PROJECT["dependencies"]) == {"grpcio", "protobuf"}


def test_the_gateway_pulls_neither_torch_nor_transformers() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not names(extras["gateway"]) & {"torch", "torchvision", "transformers"}
    assert extras["all"] == ["triptych[gateway,encoder,llm,pdf]"]


def test_everything_installed_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    exact = {line.split("==")[0].lower().replace("_", "-") for line in pins if "==" in line}
    wanted = names(PROJECT["dependencies"]) | {n for extra in PROJECT["optional-dependencies"].values() for n in names(extra)}
    assert {n.lower() for n in wanted} - {"triptych"} <= exact


def test_the_embedded_model_is_small_and_whole() -> None:
    folder = ROOT / "services/models/embedded"
    weights = list(folder.glob("*.safetensors"))
    assert weights and sum(f.stat().st_size for f in weights) <= 30_000_000
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "processor_config.json", "accuracy.json"):
        assert (folder / name).is_file(), name


def test_the_readme_states_the_recorded_accuracy() -> None:
    record = json.loads((ROOT / "services/models/embedded/accuracy.json").read_text())
    readme = (ROOT / "README.md").read_text()
    for group, figures in record.items():
        row = f"| {group} | {figures['accuracy']:.1%} | {figures['questions']:,} |"
        assert row in readme, f"the README should have the row {row}"
