"""Modules and libraries of the driver: errors as CUDA documents them, logs, and what unloading frees."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import pytest

from tests.simulation.extensions.damaged_images import KERNEL
from tests.support import simulated_environment
from tests.support.simulation import linux_only, python, run

pytestmark = [linux_only, pytest.mark.xdist_group("extensions")]

START = """
import struct
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from tests.simulation.extensions.damaged_images import KERNEL, Loader
from tests.simulation.extensions.fat_binaries import CODE, LZ4, ZSTD, Entry, fat_binary

def report(*values):
    print(json.dumps(values))

loader = Loader()
driver, runtime = loader.driver, loader.runtime

def load(image, function="cuModuleLoadData", *rest):
    module = c_void_p()
    return getattr(driver, function)(byref(module), image, *rest), module

def loaded(image=KERNEL.encode()):
    error, module = load(image)
    assert error == 0
    return module

def function(module, name=b"count"):
    found = c_void_p()
    return driver.cuModuleGetFunction(byref(found), module, name), found

def launch(function, grid=(1, 1, 1), block=(1, 1, 1), parameters=None, extra=None):
    return driver.cuLaunchKernel(function, *map(c_uint, (*grid, *block)), 0, None, parameters, extra)
"""


def evaluate(program: str, **options: Any) -> Any:
    values = run(START + textwrap.dedent(program), simulated_environment(gpus=1, **options))
    return values if len(values) > 1 else values[0]


INVALID_VALUE, INVALID_IMAGE, INVALID_PTX, INVALID_HANDLE, NOT_FOUND = 1, 200, 218, 400, 500


@pytest.mark.parametrize("compute", [True, False])
def test_images_that_are_none(compute: bool) -> None:
    program = """
        empty = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0)
        images = [b"hello world, this is not ptx at all", bytes(64), b"", b"// " + KERNEL.encode(), empty + bytes(64),
                  struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40) + bytes(64)]
        errors = [load(image)[0] for image in images]
        for content in (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 20) + bytes(64), b"\\177ELF", b""):
            loader.file.write_bytes(content)
            errors.append(load(bytes(loader.file), "cuModuleLoad")[0])
        errors += [load(b"/no/file", "cuModuleLoad")[0], load(None)[0]]
        report(errors)
    """
    file_not_found = 301
    assert evaluate(program, compute=compute) == [INVALID_IMAGE] * 9 + [file_not_found, INVALID_VALUE]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("st.global", "st.glabel"),
        ("add.u32", "addd.u32"),
        (".target sm_80", ""),
        ("ret;", "ret"),
        ("ret;\n}", "ret;\n"),
        ("ret;\n}", "ret;\n}}"),
        ("ld.param.u64", "ld.param.u64.volatil"),
        ("ret;", "ret; what is this;"),
        (".version 7.0", ".version seven"),
    ],
)
def test_broken_ptx_is_invalid_and_the_log_says_where(old: str, new: str) -> None:
    text = KERNEL.replace(old, new)
    assert text != KERNEL
    program = f"""
        log, info = ctypes.create_string_buffer(b"?" * 200, 200), ctypes.create_string_buffer(b"?" * 20, 20)
        options = (c_int * 4)(3, 4, 5, 6)
        values = (c_void_p * 4)(ctypes.addressof(info), 20, ctypes.addressof(log), 200)
        error = load({text.encode()!r}, "cuModuleLoadDataEx", c_uint(4), options, values)[0]
        again = load({text.encode()!r}, "cuLibraryLoadData", options, values, c_uint(4), None, None, c_uint(0))[0]
        sizes = values[1] or 0, values[3] == len(log.value)
        report([error, again, load({text.encode()!r})[0]], log.value.decode(), *sizes, info.value.decode())
    """
    errors, log, info_size, is_size, info = evaluate(program, compute=False)
    assert errors == [INVALID_PTX] * 3
    assert log.startswith("ptxas application ptx input, line ")
    assert (info_size, is_size, info) == (0, True, "")


def test_a_modifier_is_unknown_in_newer_ptx_too() -> None:
    text = KERNEL.replace("7.0", "9.2").replace("st.global", "st.glabel")
    assert evaluate(f"report(load({text.encode()!r})[0])", compute=False) == INVALID_PTX


def test_ptx_that_simulated_gpus_do_not_run_is_valid() -> None:
    program = r"""
        texts = [
            KERNEL.replace("ret;", "wgmma.fence.sync.aligned; tcgen05.wait::ld.sync.aligned; ret;"),
            KERNEL.replace("ld.global.u32", "ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.L2::128B.u32"),
            KERNEL.replace("ret;", "{ .reg .pred %p; L: @%p bra.uni L; @!%p bra L; }\n/* a { */ // and } \nret;"),
            KERNEL.replace(".visible .entry", ".visible .global .align 4 .b8 s[4] = {1, 2, 3, 4};\n.visible .entry"),
            KERNEL + '.section .debug_str { .b8 1,2\n.b8 3 }\n.file 1 "a;b{.cu", 1, 2\n',
            KERNEL.replace("ret;", ".loc 1 5 3, function_name $L, inlined_at 1 2 3\nret;"),
            KERNEL.replace("ret;", "newer.instruction %v; ret;").replace("7.0", "9.9"),
            "// made by hand\n\n" + KERNEL,
        ]
        errors = [load(text.encode())[0] for text in texts]
        entries = [*(Entry(80, KERNEL, flags) for flags in (0, LZ4, ZSTD)), Entry(90, "code", kind=CODE)]
        images = [bytes(fat_binary(entry)) for entry in entries]
        report(errors, [load(image)[0] for image in images], [function(loaded(image))[0] for image in images])
    """
    assert evaluate(program, compute=False) == [[0] * 8, [0] * 4, [0] * 4]


def test_handles_that_are_none_or_gone() -> None:
    program = """
        module, other = loaded(), loaded()
        _, kernel = function(module)
        value, address, size, handle = c_int(), c_uint64(), c_size_t(), c_void_p()
        found = [function(module, b"missing")[0], function(module, b"coun")[0], function(module, b"counter")[0],
                 driver.cuLibraryGetKernel(byref(handle), module, b"missing"),
                 driver.cuModuleGetGlobal_v2(byref(address), byref(size), module, b"missing")]
        unloaded = [driver.cuModuleUnload(module), driver.cuModuleUnload(module), driver.cuLibraryUnload(module)]
        for each in (module, kernel, None, c_void_p(16)):
            unloaded += [function(each)[0], driver.cuLibraryGetKernel(byref(handle), each, b"count"),
                         driver.cuModuleGetGlobal_v2(byref(address), byref(size), each, b"counter"),
                         driver.cuLibraryGetModule(byref(handle), each),
                         driver.cuLibraryGetGlobal(byref(address), None, each, b"counter")]
            unloaded += [launch(each), driver.cuFuncGetAttribute(byref(value), 0, each), driver.cuFuncSetAttribute(each, 8, 0),
                         driver.cuFuncSetCacheConfig(each, 0), driver.cuKernelGetFunction(byref(handle), each),
                         driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(value), each, 32, c_size_t(0))]
        _, kernel = function(other)
        report(found, unloaded, [driver.cuFuncGetAttribute(byref(value), a, kernel) for a in (0, -1, 99)],
               driver.cuFuncSetCacheConfig(kernel, 9))
    """
    found, unloaded, attributes, cache = evaluate(program)
    assert found == [NOT_FOUND] * 5
    assert unloaded == [0] + [INVALID_HANDLE] * 46
    assert attributes == [0, INVALID_VALUE, INVALID_VALUE]
    assert cache == INVALID_VALUE


def test_a_kernel_that_compressed_ptx_lacks_is_not_found() -> None:
    program = """
        images = [bytes(fat_binary(Entry(80, KERNEL, flags))) for flags in (LZ4, ZSTD)]
        report([function(loaded(image), name)[0] for image in images for name in (b"count", b"missing")])
    """
    assert evaluate(program) == [0, NOT_FOUND] * 2


@pytest.mark.parametrize("compute", [True, False])
def test_shapes_of_launches_beyond_the_limits(compute: bool) -> None:
    program = """
        _, kernel = function(loaded())
        out = c_uint64()
        assert driver.cuMemAlloc_v2(byref(out), c_size_t(64)) == 0
        parameters = (c_void_p * 1)(ctypes.addressof(out))
        extra = (c_void_p * 5)(1, ctypes.addressof(out), 2, ctypes.addressof(c_size_t(8)), 0)
        most = 2**31 - 1
        shapes = [((1, 70_000, 1), (1, 1, 1)), ((1, 1, 65_536), (1, 1, 1)), ((most + 1, 1, 1), (1, 1, 1)),
                  ((0, 1, 1), (1, 1, 1)), ((1, 0, 1), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)),
                  ((1, 1, 1), (1, 1025, 1)), ((1, 1, 1), (1, 1, 65)),
                  ((1, 1, 1), (32, 32, 2)), ((1, 1, 1), (1, 1, 0)), ((1, 1, 1), (2007567422, 3062868337, 3)),
                  ((1, 1, 1), (1 << 31, 2, 1)), ((1, 1, 1), (65536, 65536, 1))]
        errors = [launch(kernel, grid, block, parameters) for grid, block in shapes]
        errors.append(launch(kernel, (1, 1, 1), (1, 1, 1), parameters, extra))
        right = [launch(kernel, (3, 2, 2), block, parameters) for block in ((1024, 1, 1), (4, 4, 64), (1, 1024, 1))]
        report(errors, right, driver.cuCtxSynchronize())
    """
    assert evaluate(program, compute=compute) == [[INVALID_VALUE] * 14, [0] * 3, 0]


@pytest.mark.parametrize("unload", ["cuModuleUnload", "cuLibraryUnload", "__cudaUnregisterFatBinary"])
def test_unloading_frees_all(unload: str) -> None:
    text = KERNEL.replace(".u32 counter = 41;", ".u32 counter = 41;\n.visible .global .align 4 .b8 big[4000000];").replace(
        "ret;", ".reg .b32 %w; ld.global.u32 %w, [big+400]; add.u32 %v, %v, %w; st.global.u32 [%a], %v; ret;"
    )
    program = f"""
        text, unload = {text.encode()!r} + b" " * 500_000, {unload!r}
        out, value, free, total = c_uint64(), c_int(), c_size_t(), c_size_t()
        assert driver.cuMemAlloc_v2(byref(out), c_size_t(64)) == 0
        parameters, one = (c_void_p * 1)(ctypes.addressof(out)), (c_uint * 3)(1, 1, 1)
        kept, registered = ctypes.create_string_buffer(text), c_void_p(ctypes.addressof(out))

        class Dim3(ctypes.Structure):
            _fields_ = [(name, c_uint) for name in "xyz"]

        def run_once():
            if unload.startswith("cu"):
                module = loaded(text)
                kernel = function(module)[1]
                assert launch(kernel, parameters=parameters) == 0
                end = lambda: driver[unload](module)
            else:
                handle = c_void_p(loader.register(kept))
                runtime["__cudaRegisterFunction"](handle, registered, b"count", b"count", -1, None, None, None, None, None)
                assert runtime.cudaLaunchKernel(registered, Dim3(1, 1, 1), Dim3(1, 1, 1), parameters, c_size_t(0), None) == 0
                end = lambda: runtime[unload](handle) * 0
            assert driver.cuMemcpyDtoH_v2(byref(value), out, c_size_t(4)) == 0 and value.value == 42
            assert end() == 0

        def figures():
            assert driver.cuMemGetInfo_v2(byref(free), byref(total)) == 0
            pages = int(open("/proc/self/statm").read().split()[1])
            return [free.value, pages * 4096, len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())]

        for _ in range(5):
            run_once()
        before = figures()
        for _ in range(200):
            run_once()
        after = figures()
        report([new - old for new, old in zip(after, before)])
    """
    free, resident, files, mappings = evaluate(program)
    assert (free, files) == (0, 0)
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # it keeps freed memory for a while
        assert resident < 4 << 20
    assert mappings < 20


def test_a_graph_launches_the_kernels_of_an_unloaded_module() -> None:
    program = """
        module, stream, graph, instance = loaded(), c_void_p(), c_void_p(), c_void_p()
        out, value, before, after, total = c_uint64(), c_int(), c_size_t(), c_size_t(), c_size_t()
        assert driver.cuMemAlloc_v2(byref(out), c_size_t(64)) == 0
        assert driver.cuMemGetInfo_v2(byref(before), byref(total)) == 0
        kernel = function(module)[1]
        parameters = (c_void_p * 1)(ctypes.addressof(out))
        assert runtime.cudaStreamCreate(byref(stream)) == 0
        assert runtime.cudaStreamBeginCapture(stream, 2) == 0
        error = driver.cuLaunchKernel(kernel, *(c_uint(1),) * 6, 0, stream, parameters, None)
        assert error == 0, error
        assert runtime.cudaStreamEndCapture(stream, byref(graph)) == 0
        assert runtime.cudaGraphInstantiate(byref(instance), graph, c_uint64(0)) == 0
        assert driver.cuModuleUnload(module) == 0
        error = runtime.cudaGraphLaunch(instance, stream)
        assert error == 0, error
        error = driver.cuMemcpyDtoH_v2(byref(value), out, c_size_t(4))
        assert error == 0, error
        codes = [runtime.cudaGraphExecDestroy(instance), runtime.cudaGraphDestroy(graph)]
        assert driver.cuMemGetInfo_v2(byref(after), byref(total)) == 0
        report(value.value, codes, after.value - before.value)
    """
    assert evaluate(program) == [42, [0, 0], 0]


def test_options_of_the_compiler_are_checked() -> None:
    program = """
        text, module = KERNEL.encode(), c_void_p()
        wrong = [load(text, "cuModuleLoadDataEx", c_uint(1), None, None)[0],
                 load(text, "cuModuleLoadDataEx", c_uint(1), (c_int * 1)(-5), (c_void_p * 1)(0))[0],
                 load(text, "cuModuleLoadDataEx", c_uint(1), (c_int * 1)(500), (c_void_p * 1)(0))[0]]
        linker, log = c_void_p(), ctypes.create_string_buffer(300)
        options, values = (c_int * 2)(5, 6), (c_void_p * 2)(ctypes.addressof(log), 300)
        linked = [driver.cuLinkCreate_v2(c_uint(2), options, values, byref(linker))]
        broken = text.replace(b"st.global", b"st.glabel")
        linked.append(driver.cuLinkAddData_v2(linker, 1, broken, c_size_t(len(broken)), b"name", 0, None, None))
        report(wrong, linked, b"glabel" in log.value, values[1] == len(log.value), driver.cuLinkDestroy(linker))
    """
    assert evaluate(program, compute=False) == [[INVALID_VALUE] * 3, [0, INVALID_PTX], True, True, 0]


def test_names_that_look_like_codes_of_types_are_not_demangled() -> None:
    program = """
import ctypes
ctypes.CDLL("libstdc++.so.6")
from tests.simulation.extensions.damaged_images import Loader
driver = Loader().driver
module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuModuleLoadData(ctypes.byref(module), b"\\177ELF" + bytes(60)) == 0
for name in (b"a", b"z", b"i", b"_Z3addPfi"):
    assert driver.cuModuleGetFunction(ctypes.byref(kernel), module, name) == 0
    driver.cuLaunchKernel(kernel, *(ctypes.c_uint(1),) * 6, 0, None, None, None)
"""
    done = python(program, env=simulated_environment(gpus=1))
    assert done.returncode == 0, done.stderr
    names = [line.split(" is not simulated")[0] for line in done.stderr.splitlines()]
    assert names == ["kernel a", "kernel z", "kernel i", "kernel add(float*, int)"]
