"""What Python, C and C++ must agree on is written once. If one side has another version of it, it refuses to start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from accelerator._machine import torch_build
from accelerator.simulation._build import libraries
from accelerator.simulation._build.boundary import Boundary, read_with_included
from tests.simulation.exported_names import NATIVE
from tests.support import python, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = linux_only

OTHER_BUILD = r"(\S+/{}) and (\S+/{}) were compiled from different sources: delete their folders, and the next start, or"


def test_every_header_of_the_interface_is_part_of_the_version() -> None:
    read = read_with_included(lambda name: (NATIVE / name).read_bytes(), "interface/boundary.h")
    assert {f"interface/{path.name}" for path in (NATIVE / "interface").iterdir()} <= read.keys()


# Python's view of a structure and of flags, which the engine describes.

DESCRIBED = "rules.first 0 8\nrules.second 8 4\nrules.third 12 4\nrules 0 16\nflags.READS 1 0\nflags.WRITES 2 0\n"


def test_structures_and_flags_are_made_as_described() -> None:
    boundary = Boundary(DESCRIBED)
    rules = boundary.structure("rules", ("first", "second", "third"))(2**63, -1, 7)
    assert bytes(rules) == (2**63).to_bytes(8, "little") + b"\xff" * 4 + (7).to_bytes(4, "little")
    assert boundary.numbers("flags", ("WRITES", "READS")) == [2, 1]


@pytest.mark.parametrize(
    ("old", "new", "different"),
    [
        ("rules.second", "rules.other", "disagree about other, second of rules"),
        ("rules 0 16", "rules.fourth 16 8\nrules 0 24", "disagree about fourth of rules"),
        ("rules.first 0 8\nrules.second 8 4", "rules.second 0 4\nrules.first 8 8", "lay out rules differently"),
        ("rules 0 16", "rules 0 24", "lay out rules differently"),
        ("flags.READS", "flags.SKIPS", "disagree about READS, SKIPS of flags"),
        ("flags.READS 1 0\n", "", "disagree about READS of flags"),
    ],
)
def test_another_structure_or_flag_is_refused(old: str, new: str, different: str) -> None:
    boundary = Boundary(DESCRIBED.replace(old, new))
    with pytest.raises(RuntimeError, match=f"the engine and Python {different}: .*; install it again$"):
        boundary.structure("rules", ("first", "second", "third"))
        boundary.numbers("flags", ("READS", "WRITES"))


# Libraries that were compiled from other headers.

CHANGES = {
    "limit of dimensions": ("race_accesses.h", "RACE_MAX_DIMS = 8", "RACE_MAX_DIMS = 7"),
    "limit of a text": ("race_accesses.h", "RACE_TEXT_SIZE = 8192", "RACE_TEXT_SIZE = 4096"),
    "flag of an op": ("op_rules.h", "X(COPIES, 1 << 4)", "X(COPIES, 1 << 9)"),
    "field of a structure": ("race_accesses.h", "    int32_t flags;\n", "    int64_t flags;\n"),
}
COMPUTE = "import torch\nprint(torch.ones(2, device='cuda').add(1).sum().item())"


def with_changed(paths: tuple[str, ...], change: tuple[str, str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which some libraries were compiled from changed headers."""
    header, old, new = change
    sources = {**libraries._sources()}
    text = sources[f"interface/{header}"].decode()
    assert text.count(old) == 1
    sources[f"interface/{header}"] = text.replace(old, new).encode()
    for name, content in sources.items():
        path = folder / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    environment = simulated_environment(gpus=1)
    root = str(libraries.ensure_built())
    for library in libraries._LIBRARIES:
        if library.path in paths:
            (folder / library.path).parent.mkdir(exist_ok=True)
            libraries._compile(libraries._compiler(), library, folder, folder / "sources")
            for variable, path in (("LD_PRELOAD", library.path), ("LD_LIBRARY_PATH", os.path.dirname(library.path))):
                environment[variable] = environment[variable].replace(f"{root}/{path}", f"{folder}/{path}")
    return environment


def runtime_path() -> str:
    build = torch_build.read()
    assert build is not None
    assert build.cuda is not None
    return f"preload/libcudart.so.{build.cuda.partition('.')[0]}"


@pytest.mark.slow
@needs_cuda_torch
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_engine_refuses_a_runtime_of_other_headers(change: tuple[str, str, str], tmp_path: Path) -> None:
    paths = (runtime_path(), "driver/libcuda.so.1")
    assert python(COMPUTE, simulated_environment(gpus=1)).stdout == "4.0\n"
    done = python(COMPUTE, with_changed(paths, change, tmp_path))
    assert done.returncode != 0
    assert done.stdout == ""
    (paths,) = set(re.findall(OTHER_BUILD.format("engine.so", r"libcudart.so.\d+"), done.stderr))
    assert paths[1] == str(tmp_path / runtime_path())


@pytest.mark.slow
@pytest.mark.parametrize("library", ["preload/libcudart.so.13", "driver/libcuda.so.1"])
def test_runtime_refuses_a_driver_of_other_headers(library: str, tmp_path: Path) -> None:
    program = "import ctypes; print(ctypes.CDLL('libcudart.so.13').cudaFree(None))"
    done = python(program, with_changed((library,), CHANGES["limit of dimensions"], tmp_path))
    assert done.stdout == "35\n"
    ((runtime, driver),) = set(re.findall(OTHER_BUILD.format("libcudart.so.13", "libcuda.so.1"), done.stderr))
    assert str(tmp_path / library) in (runtime, driver)


@pytest.mark.slow
def test_nccl_refuses_a_runtime_of_other_headers(tmp_path: Path) -> None:
    program = """if True:
        import ctypes
        nccl = ctypes.CDLL("libnccl.so.2")
        nccl.ncclGetLastError.restype = ctypes.c_char_p
        print(nccl.ncclMemAlloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8)), nccl.ncclGetLastError(None).decode())
    """
    done = python(program, with_changed(("preload/libnccl.so.2",), CHANGES["field of a structure"], tmp_path))
    assert re.match("2 " + OTHER_BUILD.format("libnccl.so.2", r"libcudart.so.\d+"), done.stdout), done.stdout
