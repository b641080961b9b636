"""Op builders: those that a program registers, and those that a package provides."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelerator as acc
from accelerator import extensions
from tests.support import plain_environment, run

SUFFIX = "" if acc.device_count() else ".cpu"


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(extensions, "_registered", {})
    extensions._modules_of.cache_clear()
    yield
    extensions._modules_of.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "op_builder"]:
        del sys.modules[name]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a package like DeepSpeed's, whose modules record that they were imported."""
    root = tmp_path / "op_builder"
    note = "from op_builder import imported; imported.append(__name__)\n"
    _write(root / "__init__.py", "__deepspeed__ = True\nimported = []\n")
    _write(root / "builder.py", note + "class OpBuilder: pass\nclass CUDAOpBuilder(OpBuilder): pass\n")
    _write(root / "all_ops.py", note + "raise ImportError\n")
    _write(root / "cpu" / "__init__.py", "")
    _write(root / "cpu" / "host.py", note + "class HostOnlyBuilder: pass\n")
    _write(root / "cpu" / "comm.py", note + "class CommBuilder: pass\n")
    _write(root / "pages.py", note + "from op_builder.builder import OpBuilder\n\nclass PagesBuilder(OpBuilder): pass\n")
    _write(
        root / "cpu" / "pages.py",
        note + "from op_builder.builder import OpBuilder\nfrom op_builder.pages import PagesBuilder\n\n"
        '__all__ = [\n    "PagesBuilder",\n]\n',
    )
    _write(root / "cpu" / "no_impl.py", note + "class NotImplementedBuilder: pass\n")
    _write(root / "parts" / "__init__.py", "class HandedBuilder: pass\n")
    for directory, word in ((root, "device"), (root / "cpu", "host")):
        _write(directory / "handed.py", note + "from op_builder.parts import HandedBuilder\n\n__all__ = ('HandedBuilder',)\n")
        _write(
            directory / "adam.py", note + f"class AdamBuilder:\n    where = '{word}'\n\nclass OtherBuilder(AdamBuilder): pass\n"
        )
        _write(directory / "broken.py", note + "import no_such_module\n\nclass BrokenBuilder: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("op_builder")  # as DeepSpeed's installer does
    return root


def _imported() -> list[str]:
    return sys.modules["op_builder"].imported  # type: ignore[no-any-return]


def test_registered_builders_are_returned_and_created() -> None:
    class MineBuilder:
        pass

    assert acc.get_op_builder("MineBuilder") is None
    assert acc.register_op_builder("MineBuilder", MineBuilder) is None
    assert acc.get_op_builder("MineBuilder") is MineBuilder
    first, second = acc.create_op_builder("MineBuilder"), acc.create_op_builder("MineBuilder")
    assert type(first) is type(second) is MineBuilder
    assert first is not second


def test_latest_registration_overrides_the_package(package: Path) -> None:
    acc.register_op_builder("AdamBuilder", dict)
    acc.register_op_builder("AdamBuilder", list)
    assert acc.get_op_builder("AdamBuilder") is list
    assert _imported() == []


def test_wrong_registrations_raise() -> None:
    with pytest.raises(TypeError, match="callable"):
        acc.register_op_builder("MineBuilder", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a str"):
        acc.register_op_builder(list, list)  # type: ignore[arg-type]


def test_get_op_builder_imports_only_the_builders_module(package: Path) -> None:
    assert acc.op_builder_dir() == f"op_builder{SUFFIX}"
    builder = acc.get_op_builder("AdamBuilder")
    assert builder.where == ("host" if SUFFIX else "device")
    assert _imported() == [f"op_builder{SUFFIX}.adam"]
    assert acc.create_op_builder("OtherBuilder").where == builder.where
    assert acc.get_op_builder("HostOnlyBuilder").__name__ == "HostOnlyBuilder"
    assert _imported() == [f"op_builder{SUFFIX}.adam", "op_builder.cpu.host"]


def test_reexported_builders_are_returned(package: Path) -> None:
    assert acc.get_op_builder("HandedBuilder").__module__ == "op_builder.parts"
    assert _imported().pop() == f"op_builder{SUFFIX}.handed"
    # In DeepSpeed too, the package for the CPU exports a builder that is defined in CUDA's.
    builder = acc.get_op_builder("PagesBuilder")
    assert builder.__module__ == "op_builder.pages"
    assert _imported()[0] == f"op_builder{SUFFIX}.pages"


def test_comm_builder_exists_on_the_cpu_only(package: Path) -> None:
    builder = acc.get_op_builder("CommBuilder")
    assert (builder is not None) is bool(SUFFIX)
    assert _imported() == (["op_builder.cpu.comm"] if SUFFIX else [])


def test_unknown_and_abstract_builders_are_none(package: Path) -> None:
    for name in ("NoSuchBuilder", "OpBuilder", "CUDAOpBuilder", "NotImplementedBuilder", "adam", ""):
        assert acc.get_op_builder(name) is None
        assert acc.create_op_builder(name) is None
    assert _imported() == []


def test_broken_builder_module_raises(package: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        acc.get_op_builder("BrokenBuilder")


@pytest.mark.parametrize("imported", [False, True])
def test_foreign_op_builder_package_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool) -> None:
    _write(tmp_path / "op_builder" / "__init__.py", "")
    _write(tmp_path / "op_builder" / "adam.py", "class AdamBuilder: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        importlib.import_module("op_builder")
    assert acc.op_builder_dir() == f"deepspeed.ops.op_builder{SUFFIX}"
    assert acc.get_op_builder("AdamBuilder") is None


def test_op_builder_in_working_directory_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "op_builder" / "__init__.py", "__deepspeed__ = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert acc.op_builder_dir() == f"deepspeed.ops.op_builder{SUFFIX}"
    assert "op_builder" not in sys.modules


def test_get_op_builder_while_the_package_is_imported(tmp_path: Path) -> None:
    # DeepSpeed's package does this for each of its builders.
    root = tmp_path / "deepspeed" / "ops" / "op_builder"
    _write(root.parent.parent / "__init__.py", "")
    _write(root.parent / "__init__.py", "")
    _write(root / "__init__.py", "import accelerator\nAdamBuilder = accelerator.get_op_builder('AdamBuilder')\n")
    _write(root / "cpu" / "__init__.py", "")
    _write(root / "cpu" / "adam.py", "class AdamBuilder: pass\n")
    run(
        """
        import torch
        import sys
        sys.path.insert(0, sys.argv[1])
        from deepspeed.ops.op_builder import AdamBuilder
        assert AdamBuilder.__name__ == "AdamBuilder"
        """,
        plain_environment(),
        str(tmp_path),
    )


def test_build_extension_returns_torchs_class_silently() -> None:
    from torch.utils.cpp_extension import BuildExtension

    assert acc.build_extension() is BuildExtension
    printed = run(
        """
        import contextlib, io, logging, os, torch
        import accelerator as acc
        os.environ["CUDA_HOME"] = "/"
        is_available, output = torch.cuda.is_available, io.StringIO()
        logging.basicConfig(stream=output)
        with contextlib.redirect_stderr(output):
            assert acc.build_extension().__name__ == "BuildExtension"
        assert torch.cuda.is_available is is_available
        assert acc.is_fork_safe()
        print(output.getvalue(), end="")
        """,
        plain_environment(),
    )
    assert printed == ""


def test_first_build_extension_calls_from_several_threads() -> None:
    run(
        """
        import os, sys, threading, torch
        import accelerator as acc
        acc.build_extension  # imports the module
        os.environ["CUDA_HOME"] = "/"
        is_available = torch.cuda.is_available
        sys.setswitchinterval(1e-6)
        ready, builder = threading.Barrier(8), []
        def first():
            ready.wait()
            builder.append(acc.build_extension())
        threads = [threading.Thread(target=first) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(builder)) == 1 and len(builder) == 8, builder
        assert torch.cuda.is_available is is_available
        assert acc.is_fork_safe()
        """,
        plain_environment(),
    )
