"""The layers of the package: import-linter's contracts (pyproject.toml), and rules that it cannot check."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import file_list
from tests.support import ROOT

PACKAGE = ROOT / "accelerator"
QUERIES = ("discovery", "identity", "launching", "memory_info", "monitoring", "out_of_memory", "_machine")
# They register functions with the modules below, which must not name them.
REGISTERING = ("simulation", "deepspeed_bridge")
ABOVE = (*REGISTERING, "__init__", "__main__", "_command")
# torch's private bindings change between versions. These modules hide the differences.
PRIVATE_BINDINGS = (
    "_torch/bindings.py",
    "checkpointing/bindings.py",
    "simulation/_inside/ops/bindings.py",
    "_machine/process.py",
)

pytestmark = pytest.mark.torch_free


def read_modules(*names: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of each module of the package, or of the named modules and packages."""
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if not names or path.with_suffix("").parts[0] in names:
            yield path.as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def imports_torch(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.level == 0 and (statement.module or "").split(".")[0] == "torch"
    return isinstance(statement, ast.Import) and any(alias.name.split(".")[0] == "torch" for alias in statement.names)


def test_query_modules_do_not_import_torch_at_module_level() -> None:
    modules = list(read_modules(*QUERIES))
    assert len(modules) > 15
    assert [path for path, tree in modules if any(map(imports_torch, tree.body))] == []


def test_lower_layers_do_not_name_registering_modules() -> None:
    """import-linter does not notice a name in a string, such as ``importlib.import_module(".simulation")``."""
    names = [
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in read_modules()
        if path.partition("/")[0].removesuffix(".py") not in ABOVE
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value.rpartition(".")[2] in REGISTERING or node.value.startswith("accelerator.simulation"))
    ]
    assert names == []


def test_private_bindings_of_torch_are_used_in_few_modules() -> None:
    users = {
        path
        for path, tree in read_modules()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "_C")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._C"))
        or (isinstance(node, ast.ImportFrom) and node.module == "torch" and any(alias.name == "_C" for alias in node.names))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("torch._C") for alias in node.names))
        or (isinstance(node, ast.Constant) and node.value == "torch._C")
    }
    assert users == set(PRIVATE_BINDINGS)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the package and its contracts into a folder."""
    pytest.importorskip("importlinter")
    shutil.copytree(PACKAGE, tmp_path / "accelerator", ignore=shutil.ignore_patterns("__pycache__", "native"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_are_kept(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout


# What is added to a module, and what its contract then says: which part must not import which.
VIOLATIONS = (
    ("monitoring", "from .streams import synchronize", "monitoring", "accelerator.streams"),
    ("_machine.nvml", "from .. import discovery", "_machine", "accelerator.discovery"),
    ("_machine.nvml", "def f():\n    import torch", "_machine", "torch"),
    ("devices", "from . import simulation", "devices", "accelerator.simulation"),
    ("checkpointing.checkpoint_call", "from .. import deepspeed_bridge", "checkpointing", "accelerator.deepspeed_bridge"),
    (
        "simulation._inside.compiled.dynamo",
        "from ..._outside import found_races",
        "simulation._inside",
        "accelerator.simulation._outside",
    ),
    ("simulation._outside.found_races", "def f():\n    import torch", "simulation._outside", "torch"),
)


def test_broken_import_contracts_are_reported(copy: Path) -> None:
    circle = ("simulation._inside.ops.op", "from . import dispatch", "", "")
    for module, violation, _, _ in (*VIOLATIONS, circle):
        with (copy / "accelerator" / f"{module.replace('.', '/')}.py").open("a", encoding="utf-8") as file:
            file.write(f"\n{violation}\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    printed = " ".join(done.stdout.split())
    for module, _, part, imported in VIOLATIONS:
        assert f"accelerator.{part} is not allowed to import {imported}: - accelerator.{module} -> {imported}" in printed, (
            module
        )
    assert "No cycles are allowed in accelerator.simulation._inside.ops." in printed


def test_a_module_in_no_layer_is_reported(copy: Path) -> None:
    (copy / "accelerator/simulation/_new.py").touch()
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "simulation._new" in done.stdout


def test_every_file_says_what_it_is() -> None:
    lines = list(file_list.lines())
    assert len(lines) > 400
    assert [line for line in lines if "(nothing)" in line] == []
