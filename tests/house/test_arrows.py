"""The arrows of the house: who may import whom, and that gateway and SDK never load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Packages of ours that each package may import, besides itself.
ARROWS = {
    "triptych": set(),
    "services.common": {"triptych"},
    "services.models": {"triptych"},
    "services.native": set(),
    "services.decoding": {"services.common"},
    "services.gateway": {"triptych", "services.common", "services.decoding", "services.models"},
    "services.encoder": {"triptych", "services.common", "services.decoding", "services.models", "services.native"},
    "services.llm": {"triptych", "services.common", "services.models", "services.native"},
}
HEAVY = {"torch", "torchvision", "transformers"}
PURE = (
    "layer_groups",
    "sequence",
    "block_manager",
    "prefix_cache",
    "kv_cache",
    "scheduler",
)  # of services.llm: no torch, no grpc, no clock
IMPURE = HEAVY | {"grpc", "time", "asyncio", "threading"}


def imports(file: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_files(package: str) -> list[Path]:
    return sorted((ROOT / package.replace(".", "/")).rglob("*.py"))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", ARROWS)
def test_imports_follow_the_arrows(package: str) -> None:
    files = package_files(package)
    assert files, f"{package} is empty"
    allowed = ARROWS[package] | {package}
    for file in files:
        ours = {
            m
            for m in imports(file)
            if within(m, "triptych") or within(m, "services") or within(m, "scripts") or within(m, "tests")
        }
        strays = {m for m in ours - {"services"} if not any(within(m, a) for a in allowed)}
        assert not strays, f"{file.relative_to(ROOT)} imports {sorted(strays)}"


def test_the_check_sees_a_stray_import(tmp_path: Path) -> None:
    file = tmp_path / "stray.py"
    file.write_text("def f():\n    from services.llm.engine import Engine\n")
    assert "services.llm.engine" in imports(file)


@pytest.mark.parametrize("name", PURE)
def test_the_engine_s_core_is_pure(name: str) -> None:
    roots = {m.split(".")[0] for m in imports(ROOT / f"services/llm/{name}.py")}
    assert not roots & IMPURE


@pytest.mark.parametrize(
    "statement",
    [
        "import triptych, triptych.cli",
        "import services.gateway.service",
        "import services.models.layout, services.models.checkpoint",
        "import services.common.server",
        "import services.decoding.pool, services.decoding.worker",
    ],
)
def test_torch_is_never_loaded(statement: str) -> None:
    code = f"{statement}\nimport sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_the_sdk_needs_grpcio_and_protobuf_only() -> None:
    """In an interpreter that finds nothing of ours but grpc, google.protobuf and the SDK."""
    code = """
import sys
allowed = {'grpc', 'google', 'triptych', 'typing_extensions'}
class Gate:
    def find_spec(self, name, path=None, target=None):
        root = name.split('.')[0]
        if root not in allowed and root not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f'the SDK imported {name}')
sys.meta_path.insert(0, Gate())
import triptych, triptych.cli
print('ok')
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "ok", result.stderr[-500:]


def test_nothing_loads_pickles_or_remote_code() -> None:
    for package in ("triptych", "services"):
        for file in package_files(package):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                    pytest.fail(f"{file}: trust_remote_code")
                if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "pickle.loads", "pickle.load"):
                    pytest.fail(f"{file}: {ast.unparse(node)}")
