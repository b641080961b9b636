"""Kernels of extensions run from the PTX in their fat binaries, or are refused with a remedy."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests import support
from tests.simulation.extensions.binaries import Binary
from tests.simulation.extensions.fat_binaries import CODE, LZ4, ZSTD, Entry
from tests.simulation.extensions.texts import CALLED, CALLER, HEADER, SAXPY, TOTAL, VARIABLES, WRONG
from tests.simulation.runtime.test_launches_simulated import Dim3

INVALID_VALUE, INVALID_CONFIGURATION, OUT_OF_RESOURCES, TOO_LARGE, NOT_SUPPORTED = 1, 9, 701, 720, 801
INVALID_IMAGE, FILE_NOT_FOUND = 200, 301

pytestmark = pytest.mark.xdist_group("extensions")


def saxpy(binary: Binary, device: str = "cuda") -> torch.Tensor:
    """Run the kernel, and return its result minus the right one."""
    x = torch.arange(1000, dtype=torch.float32, device=device)
    y = torch.ones(1000, device=device)
    with torch.cuda.device(x.device):
        assert binary.kernel("saxpy")((4, 1), 256, ctypes.c_float(2), x, y, ctypes.c_uint(1000)) == 0
        torch.cuda.synchronize()
    return y - (2 * x + 1)


@pytest.fixture
def pending(runtime: ctypes.CDLL) -> Iterator[None]:
    """Read the error of a refused launch after the test."""
    yield
    runtime.accelerator_simulation_refusal(None, ctypes.c_size_t(0))


@pytest.mark.parametrize("flags", support.sample([0, LZ4, ZSTD], ZSTD))
def test_values(flags: int) -> None:
    repeated = "// " + "=" * 500  # a match of LZ4 that overlaps itself
    assert saxpy(Binary(Entry(80, SAXPY + repeated, flags))).abs().max() == 0


def test_two_gpus_have_variables_of_their_own() -> None:
    binary = Binary(VARIABLES)
    kernel, counter = binary.kernel("add_table"), binary.variable("counter", 4)
    for index, launches in ((0, 1), (1, 3)):
        with torch.cuda.device(index):
            y, value = torch.zeros(4, device="cuda"), ctypes.c_uint()
            for _ in range(launches):
                assert kernel(1, 4, y) == 0
            arguments = (ctypes.byref(value), counter, ctypes.c_size_t(4), ctypes.c_size_t(0), 4)
            assert binary.runtime.cudaMemcpyFromSymbol(*arguments) == 0
            assert y.tolist() == [launches * number for number in (1, 2, 3, 4)]
            assert value.value == 41 + launches


def test_a_part_of_a_constant_is_written_before_the_first_launch() -> None:
    binary, y = Binary(VARIABLES), torch.zeros(4, device="cuda")
    table, value = binary.variable("table", 16), ctypes.c_float(50)
    arguments = (table, ctypes.byref(value), ctypes.c_size_t(4), ctypes.c_size_t(4), 1)
    assert binary.runtime.cudaMemcpyToSymbol(*arguments) == 0
    assert binary.kernel("add_table")(1, 4, y) == 0
    assert y.tolist() == [1, 50, 3, 4]


def test_the_host_reads_a_managed_variable() -> None:
    binary, y = Binary(VARIABLES), torch.zeros(4, device="cuda")
    pointer = binary.managed("limit", 4)
    value = ctypes.c_uint.from_address(pointer.value)
    assert value.value == 7
    value.value = 100
    assert binary.kernel("add_table")(1, 4, y) == 0
    torch.cuda.synchronize()
    assert value.value == 101


def test_modules_are_linked() -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    binary = Binary(Entry(80, kind=CODE), linked=[CALLER, CALLED])
    assert binary.kernel("call")(1, 1, out) == 0
    assert out.item() == 42


def test_an_inline_variable_of_two_modules_is_one() -> None:
    """As nvcc writes a C++17 inline variable and a template's static buffer into each module that uses them."""
    weak = ".weak .global .align 4 .u32 counter = 3;\n.weak .shared .align 4 .b8 buffer[4];\n"
    prototype = "(.param .b32 result) add()"
    kernel = f"""
.extern .func {prototype};
.visible .entry run(.param .u64 out)
{{
    .reg.b32 %a;.reg.b64 %o;
    ld.param.u64 %o, [out]; ld.global.u32 %a, [counter]; add.u32 %a, %a, 100; st.global.u32 [counter], %a;
    st.shared.u32 [buffer], 41; {{ .param .b32 r; call (r), add; ld.param.b32 %a, [r]; }} st.global.u32 [%o], %a;
    ret;
}}
"""
    function = f"""
.visible .func {prototype}
{{
    .reg .b32 %a, %b;
    ld.global.u32 %a, [counter]; ld.shared.u32 %b, [buffer]; mad.lo.u32 %a, %a, 1000, %b; st.param.b32 [result], %a;
    ret;
}}
"""
    out, value = torch.zeros(1, dtype=torch.int32, device="cuda"), ctypes.c_uint()
    binary = Binary(Entry(80, kind=CODE), linked=[HEADER + weak + kernel, HEADER + weak + function])
    counter = binary.variable("counter", 4)
    assert binary.kernel("run")(1, 1, out) == 0
    assert out.item() == 103_041
    assert binary.runtime.cudaMemcpyFromSymbol(ctypes.byref(value), counter, ctypes.c_size_t(4), ctypes.c_size_t(0), 2) == 0
    assert value.value == 103


@pytest.mark.parametrize("static", [0, 8192])
def test_dynamic_shared_memory_and_its_limit(static: int) -> None:
    """Static and dynamic memory together are limited: to 48 KiB unless the program asks for more, and to 227 KiB then."""
    x = torch.arange(128, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    declared = TOTAL.replace(".reg", f".shared .align 4 .b8 own[{static}]; .reg", 1)
    kernel = Binary(declared.replace("%tid.x;", "%tid.x; st.shared.u32 [own], %t;") if static else TOTAL).kernel("total")

    attributes = (ctypes.c_int * 36)()

    def set_dynamic_limit(size: int) -> int:
        return kernel.runtime.cudaFuncSetAttribute(kernel.function, 8, size)

    large, most = 100_000, (227 << 10) - static
    for limit in ((48 << 10) - static, large, most):
        if limit >= large:
            assert (set_dynamic_limit(most + 1), set_dynamic_limit(limit)) == (INVALID_VALUE, 0)
        assert (kernel.runtime.cudaFuncGetAttributes(attributes, kernel.function), attributes[11]) == (0, limit)
        for size in (512, limit):
            assert kernel(1, 128, x, out.zero_(), ctypes.c_uint(0), shared=size) == 0
            assert out.item() == x.sum().item()
        assert kernel(1, 128, x, out, ctypes.c_uint(0), shared=limit + 1) == INVALID_VALUE


def test_a_graph_runs_the_kernel_at_each_replay() -> None:
    kernel = Binary(SAXPY).kernel("saxpy")
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kernel(1, 8, ctypes.c_float(3), x, y, ctypes.c_uint(8)) == 0
    assert y.tolist() == [0] * 8
    for count in (1, 2):
        graph.replay()
        assert y.tolist() == [3 * count] * 8


@pytest.mark.parametrize(
    ("architectures", "chosen"),
    [((70, 80, 90, 100), 90), ((100, 80), 80), ((120, 103), 103), ((52,), 52)],
)
def test_the_best_ptx_is_chosen(architectures: tuple[int, ...], chosen: int) -> None:
    """The newest that is not newer than the GPU, which has 9.0; else the oldest."""
    texts = [SAXPY.replace("sm_80", f"sm_{architecture}") for architecture in architectures]
    binary = Binary(*(Entry(architecture, text) for architecture, text in zip(architectures, texts, strict=True)))
    attributes, kernel = (ctypes.c_int * 36)(), binary.kernel("saxpy")
    assert binary.runtime.cudaFuncGetAttributes(attributes, kernel.function) == 0
    ptx_version = attributes[8]
    assert ptx_version == chosen


def test_occupancy_and_limits_of_launches() -> None:
    binary, blocks = Binary(WRONG), ctypes.c_int()
    limited, trap = binary.kernel("limited"), binary.kernel("trap_")
    occupancy = binary.runtime.cudaOccupancyMaxActiveBlocksPerMultiprocessor
    assert occupancy(ctypes.byref(blocks), limited.function, 64, ctypes.c_size_t(0)) == 0
    assert blocks.value == 32
    assert occupancy(ctypes.byref(blocks), limited.function, 64, ctypes.c_size_t(100_000)) == 0
    assert blocks.value == 2
    assert limited(1, 64) == 0
    assert limited(1, 65) == OUT_OF_RESOURCES
    assert trap(1, 1025) == INVALID_CONFIGURATION
    assert trap((1, 70_000), 1) == INVALID_CONFIGURATION
    assert limited(5, 64, cooperative=True) == 0
    assert limited(32 * 132 + 1, 64, cooperative=True) == TOO_LARGE


def test_a_program_of_the_driver_runs_its_kernels() -> None:
    cuda, y = ctypes.CDLL("libcuda.so.1"), torch.zeros(4, device="cuda")
    module, function, address, size = (ctypes.c_void_p() for _ in range(4))
    text = ctypes.create_string_buffer(VARIABLES.encode())
    assert cuda.cuModuleLoadData(ctypes.byref(module), text) == 0
    ctypes.memset(text, 0, len(text))  # the program may free it
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"add_table") == 0
    pointer = ctypes.c_uint64(y.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 4, 1, 1, 0, None, parameters, None) == 0
    assert y.tolist() == [1, 2, 3, 4]
    length = ctypes.c_size_t(8)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(pointer), 2, ctypes.addressof(length), None)
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 4, 1, 1, 0, None, None, extra) == 0
    assert y.tolist() == [2, 4, 6, 8]
    assert cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, b"counter") == 0
    assert size.value == 4
    value = ctypes.c_uint()
    assert cuda.cuMemcpyDtoH_v2(ctypes.byref(value), address, ctypes.c_size_t(4)) == 0
    assert value.value == 43
    assert cuda.cuModuleGetGlobal_v2(ctypes.byref(address), None, module, b"missing") == 500


TAKES_HEAP = """
.version 7.0
.target sm_80
.address_size 64
.extern .func (.param .b64 result) malloc(.param .b64 size);
.extern .func free(.param .b64 pointer);
.visible .entry takes_heap(.param .u64 out) {
    .reg .b64 %at, %out; .reg .b32 %x; .reg .pred %p; ld.param.u64 %out, [out];
    { .param .b64 a; .param .b64 r; st.param.b64 [a], 1048576; call (r), malloc, (a); ld.param.b64 %at, [r]; }
    setp.ne.u64 %p, %at, 0; vote.sync.ballot.b32 %x, %p, -1; popc.b32 %x, %x; st.global.u32 [%out], %x;
    { .param .b64 a; st.param.b64 [a], %at; call free, (a); }
    ret;
}
"""


def test_a_limit_of_the_driver_sets_the_size_of_a_gpus_heap() -> None:
    cuda, kernel, heap_limit = ctypes.CDLL("libcuda.so.1"), Binary(TAKES_HEAP).kernel("takes_heap"), 2
    for device, megabytes, allocations in ((0, 8, 8), (1, 8, 8), (1, 20, 20), (0, 8, 8), (1, 8, 8)):
        with torch.cuda.device(device):
            found = torch.zeros(1, dtype=torch.int32, device="cuda")
            assert cuda.cuCtxSetLimit(heap_limit, ctypes.c_size_t(megabytes << 20)) == 0
            assert kernel(1, 32, found) == 0
            assert found.item() == allocations


def test_a_library_of_the_driver_runs_its_kernels() -> None:
    cuda, y = ctypes.CDLL("libcuda.so.1"), torch.zeros(4, device="cuda")
    library, kernel, function = (ctypes.c_void_p() for _ in range(3))
    text = ctypes.create_string_buffer(VARIABLES.encode())
    assert cuda.cuLibraryLoadData(ctypes.byref(library), text, None, None, 0, None, None, 0) == 0
    assert cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, b"add_table") == 0
    assert cuda.cuKernelGetFunction(ctypes.byref(function), kernel) == 0
    pointer = ctypes.c_uint64(y.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 4, 1, 1, 0, None, parameters, None) == 0
    assert y.tolist() == [1, 2, 3, 4]
    assert cuda.cuLibraryUnload(library) == 0


def link(cuda: ctypes.CDLL, *inputs: tuple[int, bytes]) -> tuple[int, ctypes.c_void_p]:
    """Link inputs, each with its type; return the last error, and the module that was made."""
    state, image, size, module = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_void_p()
    torch.cuda.synchronize()  # makes a context
    assert cuda.cuLinkCreate_v2(0, None, None, ctypes.byref(state)) == 0
    for kind, data in inputs:
        error = cuda.cuLinkAddData_v2(state, kind, data, ctypes.c_size_t(len(data)), b"part", 0, None, None)
        if error:
            break
    else:
        error = cuda.cuLinkComplete(state, ctypes.byref(image), ctypes.byref(size))
        copy = ctypes.string_at(image, size.value)  # that a program keeps in a file
        error = error or cuda.cuModuleLoadData(ctypes.byref(module), copy)
    assert cuda.cuLinkDestroy(state) == 0
    return error, module


def test_the_driver_links_ptx() -> None:
    cuda, out, function = ctypes.CDLL("libcuda.so.1"), torch.zeros(1, dtype=torch.int32, device="cuda"), ctypes.c_void_p()
    error, module = link(cuda, (1, CALLER.encode()), (1, CALLED.encode() + b"\0"))
    assert error == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"call") == 0
    pointer = ctypes.c_uint64(out.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None) == 0
    assert out.item() == 42


def test_the_driver_links_files(tmp_path: Path) -> None:
    cuda, state, image = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    (tmp_path / "called.ptx").write_text(CALLED)
    torch.cuda.synchronize()  # makes a context
    assert cuda.cuLinkCreate_v2(0, None, None, ctypes.byref(state)) == 0
    assert cuda.cuLinkAddFile_v2(state, 1, b"/missing.ptx", 0, None, None) == FILE_NOT_FOUND
    assert cuda.cuLinkComplete(state, ctypes.byref(image), None) == INVALID_IMAGE
    assert cuda.cuLinkAddFile_v2(state, 1, str(tmp_path / "called.ptx").encode(), 0, None, None) == 0
    assert cuda.cuLinkComplete(state, ctypes.byref(image), None) == 0
    assert (ctypes.string_at(image) or b"").startswith(CALLED.encode())
    assert cuda.cuLinkDestroy(state) == 0


# What is refused.


def test_the_driver_links_no_machine_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert link(ctypes.CDLL("libcuda.so.1"), (4, b"!<arch>\n"))[0] == NOT_SUPPORTED
    assert capfd.readouterr().err == "cuLinkAddData: part is a library, and simulated GPUs link PTX alone\n"


@pytest.mark.usefixtures("pending")
def test_a_module_of_machine_code_is_refused_at_the_launch(capfd: pytest.CaptureFixture[str]) -> None:
    cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    torch.zeros(1, device="cuda")
    assert cuda.cuModuleLoadData(ctypes.byref(module), b"\177ELF" + bytes(60)) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"twice") == 0
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None) == NOT_SUPPORTED
    text = capfd.readouterr().err
    assert text.startswith("kernel twice is not simulated: simulated GPUs run kernels from PTX, and its module is machine code")


@pytest.mark.usefixtures("pending")
@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (
            [Entry(75, kind=CODE), Entry(80, kind=CODE)],
            r"machine code alone \(7\.5, 8\.0\); compile it with -gencode arch=compute_90",
        ),
        ([Entry(80, WRONG)], r"tex\.1d\.v4\.f32\.s32"),
        ([Entry(80, SAXPY)], "no kernel textured"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(
    entries: list[Entry], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.zeros(4, device="cuda")
    kernel = Binary(*entries).kernel("textured")
    assert kernel(1, 1, x) == NOT_SUPPORTED
    kernel.runtime.accelerator_simulation_refusal(None, ctypes.c_size_t(0))
    text = capfd.readouterr().err
    assert text.startswith("kernel textured is not simulated: ")
    assert re.search(reason, text), text
    assert kernel(1, 1, x) == NOT_SUPPORTED
    assert capfd.readouterr().err == ""  # each kernel is reported once


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


@pytest.mark.usefixtures("pending")
@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, NOT_SUPPORTED)])
def test_clusters_of_blocks_are_refused(size: int, expected: int, capfd: pytest.CaptureFixture[str]) -> None:
    kernel, y = Binary(SAXPY).kernel("saxpy"), torch.zeros(4, device="cuda")
    cluster = (Attribute * 1)(Attribute(4, 0, (size, 1, 1)))
    configuration = Configuration(Dim3(2, 1, 1), Dim3(4, 1, 1), 0, None, cluster, 1)
    values = (ctypes.c_float(1), ctypes.c_uint64(y.data_ptr()), ctypes.c_uint64(y.data_ptr()), ctypes.c_uint(4))
    pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
    assert kernel.runtime.cudaLaunchKernelExC(ctypes.byref(configuration), kernel.function, pointers) == expected
    kernel.runtime.cudaGetLastError()
    assert ("clusters of blocks are not simulated" in capfd.readouterr().err) == (expected != 0)


def test_two_threads_take_turns_on_a_stream() -> None:
    """All blocks add to the same numbers, without atomics: what two launches did at once would be lost."""
    kernel, x, y = Binary(SAXPY).kernel("saxpy"), torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    blocks, launches = 2000, 400  # few enough threads for one thread of the CPU

    def launch(_: int) -> int:
        return kernel((1, blocks), 8, ctypes.c_float(1), x, y, ctypes.c_uint(8))

    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(launch, range(launches))} == {0}
    assert y.tolist() == [blocks * launches] * 8


def test_kernels_of_an_unloaded_library_are_unknown() -> None:
    binary = Binary(SAXPY)
    kernel, y = binary.kernel("saxpy"), torch.zeros(4, device="cuda")
    assert kernel(1, 1, ctypes.c_float(0), y, y, ctypes.c_uint(1)) == 0
    binary.unregister()
    assert kernel(1, 1, ctypes.c_float(0), y, y, ctypes.c_uint(1)) == NOT_SUPPORTED
