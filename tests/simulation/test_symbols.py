"""Every symbol that the installed torch takes from CUDA is in the simulation, with the right version node.

The loader would resolve a missing symbol in the real runtime of the wheel, which comes later in its search order, and only
a test that calls the symbol would fail. These tests read the ELF files and do not load torch.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from accelerator.simulation import _build
from tests.simulation.elf import ElfSymbols, Symbol
from tests.support.simulation import linux_only

pytestmark = linux_only


@pytest.fixture(scope="module")
def torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torch is not installed")
    directory = Path(spec.submodule_search_locations[0])
    if not (directory / "lib" / "libtorch_cuda.so").exists():
        pytest.skip("the installed torch is no CUDA build")
    return directory


@pytest.fixture(scope="module")
def imported(torch_directory: Path) -> dict[str, set[Symbol]]:
    """The undefined symbols of each of torch's libraries."""
    return {path.name: ElfSymbols(path).undefined for path in sorted((torch_directory / "lib").glob("*.so*"))}


@pytest.fixture(scope="module")
def simulated() -> set[Symbol]:
    root = _build.ensure_built()
    files = [*_build.PRELOADED, "driver/libcuda.so.1", "nvml/libnvidia-ml.so.1"]
    return set().union(*(ElfSymbols(root / file).defined for file in files))


def with_node(imported: dict[str, set[Symbol]], node: str) -> set[Symbol]:
    return {symbol for symbols in imported.values() for symbol in symbols if symbol.version.startswith(node)}


def test_runtime_symbols_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    wanted = with_node(imported, "libcudart.so.")
    assert len(wanted) > 80, "torch's runtime symbols were not found: is the reader broken?"
    assert wanted - simulated == set()


def test_profiler_symbols_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    # CUPTI 12 is not simulated: the real one copes.
    wanted = {symbol for symbol in with_node(imported, "libcupti.so.") if symbol.version != "libcupti.so.12"}
    assert wanted - simulated == set()


def test_communication_symbols_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    # Neither the real library nor ours has version nodes.
    wanted = {symbol for symbols in imported.values() for symbol in symbols if re.match("p?nccl[A-Z]", symbol.name)}
    assert len(wanted) >= 28
    assert wanted - simulated == set()


def test_driver_symbols_of_the_compiler_library_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    wanted = {symbol for symbol in imported["libcaffe2_nvrtc.so"] if re.match("cu[A-Z]", symbol.name)}
    assert len(wanted) > 15
    assert wanted - simulated == set()


def test_entry_points_that_torch_needs_exist(torch_directory: Path, simulated: set[Symbol]) -> None:
    header = (torch_directory / "include" / "c10" / "cuda" / "driver_api.h").read_text()
    entry_points = re.findall(r"_\((cu[A-Z]\w*|nvml\w+)(, \d+)?\)", header)
    assert len(entry_points) > 20
    names = {symbol.name for symbol in simulated}
    # With a version, a name is looked up through the runtime, which finds the second version of a function too.
    missing = {name for name, version in entry_points if name not in names and not (version and f"{name}_v2" in names)}
    assert missing == set()


def test_driver_and_nvml_have_no_version_node(simulated: set[Symbol]) -> None:
    ours = {symbol for symbol in simulated if re.match("cu[A-Z]|nvml", symbol.name)}
    assert {symbol.version for symbol in ours} == {""}


def test_nothing_but_the_interface_is_exported(simulated: set[Symbol]) -> None:
    exported = {symbol.name for symbol in simulated}
    names = r"cuda[A-Z]|__cuda[A-Z]|cu[A-Z]|cupti[A-Z]|nvml[A-Z]|nccl[A-Z]|accelerator_sim"
    interface = re.compile(names + r"|lib.*\.so\.\d+$|pthread_exit$")
    assert {name for name in exported if not interface.match(name)} == set()
