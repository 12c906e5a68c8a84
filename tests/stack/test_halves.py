"""Neither service loads the other's weights: seen in parameters and in resident memory."""

from __future__ import annotations

from pathlib import Path

import triptych
from scripts.local_stack import local_stack
from scripts.make_checkpoint import main as make_checkpoint
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from tests.stack.conftest import RunningStack

MIB = 1 << 20
PICTURE = Path(__file__).resolve().parents[2] / "examples" / "shapes.png"


def resident_bytes(pid: int) -> int:
    """Memory of a process in RAM, mapped weight files included."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024


def test_each_half_holds_its_own_weights(tmp_path: Path) -> None:
    """A language model that is 100 MB larger makes its own process larger, and the encoder's hardly."""
    parameters: dict[str, tuple[int, int]] = {}
    resident: dict[str, tuple[int, int]] = {}
    whole: dict[str, int] = {}
    for name, flags in (("small", []), ("large", ["--hidden-size", "768", "--layers", "8"])):
        path = tmp_path / name
        assert make_checkpoint(["--family", "qwen2_vl", "--out", str(path), "--shard-size", "20MB", *flags]) == 0
        model = getattr(transformers, open_checkpoint(str(path)).family.architecture).from_pretrained(path)
        whole[name] = sum(p.numel() * p.element_size() for p in model.parameters())
        logs = tmp_path / f"{name}-logs"
        with local_stack("--model", str(path), "--dtype", "float32", quiet=True, log_dir=logs) as stack:
            running = RunningStack(stack, logs)
            with triptych.Client(stack.address) as client:  # touches every weight once
                client.chat([triptych.image(PICTURE), "what is this?"], max_tokens=2)
            loads = running.loads()
            parameters[name] = (loads.encoder.parameter_bytes, loads.llm.parameter_bytes)
            encoder, llm = (resident_bytes(running.serving(s)["pid"]) for s in ("encoder", "llm"))
            resident[name] = (encoder, llm)
    for name, (encoder, llm) in parameters.items():
        assert encoder + llm == whole[name], "the halves are not the whole"
    grown = parameters["large"][1] - parameters["small"][1]
    assert grown > 100 * MIB
    assert resident["large"][1] - resident["small"][1] > 0.8 * grown
    assert resident["large"][0] - resident["small"][0] < 0.3 * grown
