"""The simulation defines every CUDA symbol that the installed torch imports, with the right version node.

The loader would find a missing symbol in NVIDIA's library from the wheel, which comes later in its search order. Then only a
test that calls the symbol would fail. These tests read the ELF files and do not load torch.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from accelerator.simulation._build import libraries
from tests.simulation.exported_names import LISTS, NATIVE
from tests.simulation.native.elf import ElfSymbols, Symbol
from tests.support import run, simulated_environment
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
    """Return the undefined symbols of each of torch's libraries."""
    return {path.name: ElfSymbols(path).undefined for path in sorted((torch_directory / "lib").glob("*.so*"))}


@pytest.fixture(scope="module")
def simulated() -> set[Symbol]:
    root = libraries.ensure_built()
    files = [*libraries.PRELOADED, "driver/libcuda.so.1", "nvml/libnvidia-ml.so.1"]
    return set().union(*(ElfSymbols(root / file).defined for file in files))


def with_node(imported: dict[str, set[Symbol]], node: str) -> set[Symbol]:
    return {symbol for symbols in imported.values() for symbol in symbols if symbol.version.startswith(node)}


def test_runtime_symbols_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    wanted = with_node(imported, "libcudart.so.")
    assert len(wanted) > 80, "torch's runtime symbols were not found: is the reader broken?"
    assert wanted - simulated == set()


def test_profiler_symbols_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    # CUPTI 12 is not simulated, because NVIDIA's library works with the simulation.
    wanted = {symbol for symbol in with_node(imported, "libcupti.so.") if symbol.version != "libcupti.so.12"}
    assert wanted - simulated == set()


def test_communication_symbols_are_complete(imported: dict[str, set[Symbol]], simulated: set[Symbol]) -> None:
    # Neither NVIDIA's library nor the simulated one has version nodes.
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
    # torch finds a name that has a version through the runtime, which returns the second version of a function too.
    missing = {name for name, version in entry_points if name not in names and not (version and f"{name}_v2" in names)}
    assert missing == set()


def test_driver_and_nvml_have_no_version_node(simulated: set[Symbol]) -> None:
    ours = {symbol for symbol in simulated if re.match("cu[A-Z]|nvml", symbol.name)}
    assert {symbol.version for symbol in ours} == {""}


def test_only_interface_names_are_exported(simulated: set[Symbol]) -> None:
    exported = {symbol.name for symbol in simulated}
    names = r"cuda[A-Z]|__cuda[A-Z]|cu[A-Z]|cublasLt[A-Z]|cupti[A-Z]|nvml[A-Z]|p?nccl[A-Z]|accelerator_sim"
    interface = re.compile(names + r"|lib.*\.so\.\d+$|(pthread_exit|getaddrinfo|gethostname|_ZN2at14DynamicLibrary3symEPKc)$")
    assert {name for name in exported if not interface.match(name)} == set()


# NVIDIA's libraries that the simulation replaces.
REPLACED = {"libcudart.so.12", "libcudart.so.13", "libcupti.so.13", "libnccl.so.2"}


def read_listed_names(name: str, major: str = r"\d+") -> set[str]:
    """Return the names in a list that tests/simulation/exported_names.py wrote, of one major version or of all."""
    text = (NATIVE / LISTS[name]).read_text()
    return set(re.findall(rf"\b(?:NAME|DEVICE_NAME|VARIANT)(?:_{major})?\((\w+)", text))


def test_all_names_of_the_replaced_libraries_are_exported(torch_directory: Path, simulated: set[Symbol]) -> None:
    wheels = torch_directory.parent / "nvidia"
    files = [path for path in wheels.rglob("*.so.*") if path.name in REPLACED]
    if not files:
        pytest.skip("the CUDA libraries are not in wheels")
    for library in files:
        # C++ internals and the functions that NVTX loads by the library's path are not part of the interface.
        interface = re.compile(r"(__)?cuda[A-Z]|cupti[A-Z]|p?nccl[A-Z]")
        names = {symbol for symbol in ElfSymbols(library).defined if interface.match(symbol.name)}
        assert len(names) > 50
        assert names - simulated == set(), library


@pytest.mark.parametrize(
    ("name", "node", "count"),
    [
        ("cudart", "libcudart.so.12", 400),
        ("cudart", "libcudart.so.13", 400),
        ("cupti", "libcupti.so.13", 200),
        ("cuda", "", 600),
        ("nvml", "", 400),
        ("nccl", "", 150),
    ],
)
def test_all_listed_names_are_exported(name: str, node: str, count: int, simulated: set[Symbol]) -> None:
    names = read_listed_names(name, node.rpartition(".")[2] or r"\d+")
    assert len(names) > count
    assert {Symbol(function, node) for function in names} - simulated == set()


def test_exported_functions_are_all_listed(simulated: set[Symbol]) -> None:
    # A misspelled function would be exported in addition to the stub with the right name.
    names = set().union(*map(read_listed_names, LISTS))
    ours = {
        symbol.name for symbol in simulated if re.match("(__)?cuda[A-Z]|cu[A-Z]|cupti[A-Z]|nvml[A-Z]|p?nccl[A-Z]", symbol.name)
    }
    assert ours - names == set()


def test_unsimulated_functions_return_error_codes() -> None:
    program = """
        import ctypes, json, sys
        driver, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        codes = [driver.cuMemPrefetchAsync(), nvml.nvmlUnitGetCount()]
        for major in (12, 13):
            runtime = ctypes.CDLL(f"libcudart.so.{major}")
            codes += [runtime.cudaGetLastError(), runtime.cudaMemRangeGetAttribute(), runtime.cudaGetLastError()]
        driver.cuInit(0), nvml.nvmlInit_v2()
        device = ctypes.c_void_p()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        codes += [driver.cuMemPrefetchAsync(), driver.cuMemPrefetchAsync_ptsz(), nvml.nvmlUnitGetCount(),
                  nvml.nvmlDeviceGetSerial(device), nvml.nvmlDeviceGetSerial(None)]
        nccl = ctypes.CDLL("libnccl.so.2")
        codes += [ctypes.CDLL("libcupti.so.13").cuptiActivityEnable(), nccl.ncclParamDumpAll(), nccl.pncclGetVersion(None)]
        print(json.dumps(codes))
    """
    codes = json.loads(run(program, simulated_environment()))
    uninitialized, runtimes = [3, 1], [0, 801, 801, 0, 801, 801]
    assert codes == uninitialized + runtimes + [801, 801, 3, 3, 2, 15, 5, 4]


def test_per_thread_stream_variants_work() -> None:
    program = """
        import ctypes, json
        runtime, address, data = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p(), ctypes.create_string_buffer(b"data")
        codes = [runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4))]
        codes.append(runtime.cudaMemcpyAsync_ptsz(address, data, ctypes.c_size_t(4), 1, None))
        target = ctypes.create_string_buffer(5)
        codes.append(runtime.cudaMemcpy_ptds(target, address, ctypes.c_size_t(4), 2))
        print(json.dumps([codes, target.value.decode()]))
    """
    assert json.loads(run(program, simulated_environment())) == [[0, 0, 0], "data"]


def test_get_proc_address_returns_simulated_functions() -> None:
    # CUDA 13 also has a cuCtxGetDevice_v2 with other parameters. It is not simulated, so the name gives the first version.
    program = """
        import ctypes, json
        driver = ctypes.CDLL("libcuda.so.1")
        def address(name):
            function, status = ctypes.c_void_p(), ctypes.c_int(-1)
            results = ctypes.byref(function), 13000, ctypes.c_uint64(0), ctypes.byref(status)
            return driver.cuGetProcAddress_v2(name.encode(), *results), function.value
        names = {"cuCtxGetDevice": "cuCtxGetDevice", "cuMemAlloc": "cuMemAlloc_v2"}
        names["cuMemPrefetchAsync"] = "cuMemPrefetchAsync_v2"
        print(json.dumps([address(name) == (0, ctypes.cast(driver[function], ctypes.c_void_p).value)
                          for name, function in names.items()]))
    """
    assert json.loads(run(program, simulated_environment())) == [True] * 3


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_bitsandbytes_library_loads() -> None:
    program = "from bitsandbytes import cextension; print(type(cextension.lib).__name__)"
    assert run(program, simulated_environment()) == "CudaBNBNativeLibrary\n"
