"""The module ``accelerator``: the modules that it imports, its names, and the errors for unknown names."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import accelerator as acc
from accelerator import _EXPORTS, _SUBMODULES
from tests.support import plain_environment, run

PACKAGE = Path(acc.__file__).parent
NAMES = [name for name in acc.__all__ if name != "__version__"]

# Submodules that may have the name of a public attribute. The module ``random`` is itself public and callable.
ALLOWED_CLASHES = {"random", *_SUBMODULES}


def test_tests_import_the_package_of_this_checkout() -> None:
    assert Path(__file__).parent.parent / "accelerator" == PACKAGE


def test_importing_imports_few_modules() -> None:
    """The benchmarks check that the import takes less than 10 ms, most of it for ctypes."""
    code = """
        import sys
        before = set(sys.modules)
        import accelerator
        print(*set(sys.modules) - before)
    """
    imported = set(run(code, plain_environment()).split())
    own = {name for name in imported if name.startswith("accelerator.")}
    assert own <= {"accelerator._machine"} | {
        f"accelerator._machine.{name}" for name in ("driver", "imports", "initialization", "process", "triton")
    }
    small = {"__future__", "accelerator", "os", "types", "time", "threading"}
    assert {name.partition(".")[0] for name in imported - own} <= small | {"ctypes", "_ctypes", "struct", "_struct"}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(acc, name) is not None
    assert name in dir(acc)


@pytest.mark.parametrize(("module", "names"), _EXPORTS.items())
def test_export_table_equals_all_of_each_module(module: str, names: tuple[str, ...]) -> None:
    assert list(names) == sorted(names)
    assert sorted(importlib.import_module(f"accelerator.{module}").__all__) == list(names)


def test_type_checking_imports_cover_the_export_table() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [statement for statement in ast.walk(tree) if isinstance(statement, ast.ImportFrom)]
    assert {statement.module for statement in imports if statement.names[0].name == "*"} == set(_EXPORTS)


def test_public_names_do_not_clash_with_submodules() -> None:
    modules = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert not (set(NAMES) - ALLOWED_CLASHES) & modules


@pytest.mark.parametrize(
    "name", ["get_accelerator", "abstract_accelerator", "real_accelerator", "cuda_accelerator", "nonsense"]
)
def test_unknown_names_raise_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'accelerator' has no attribute '{name}'"):
        getattr(acc, name)
    with pytest.raises(ImportError):
        exec(f"from accelerator import {name}")
    with pytest.raises(ImportError):
        importlib.import_module(f"accelerator.{name}")


def test_unknown_names_do_not_import_torch() -> None:
    code = """
        import sys
        import accelerator
        print(hasattr(accelerator, "get_accelerator"), "torch" in sys.modules)
    """
    assert run(code, plain_environment()).split() == ["False", "False"]


def test_queries_import_no_torch() -> None:
    code = """
        import sys
        import accelerator as acc
        acc.is_available(), acc.device_count(), acc.unavailable_reason(), acc.visible_devices(), acc.get_device_name()
        acc.is_initialized(), acc.is_in_bad_fork(), acc.is_fork_safe(), acc.driver_version(), acc.driver_cuda_version()
        acc.refresh(), acc.export_envs(), acc.visible_devices_envs(), acc.communication_backend_name()
        acc.communication_backend_version(), acc.set_visible_devices_envs({}, [0]), acc.simulation.is_simulated()
        print("torch" in sys.modules)
    """
    assert run(code, plain_environment()).strip() == "False"


def test_deprecated_name_warning_names_its_replacement() -> None:
    with pytest.warns(FutureWarning, match="current_device_index"):
        assert acc.current_device_idx() == acc.current_device_index()
