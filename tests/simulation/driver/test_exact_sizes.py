"""Functions of the simulated libraries take buffers of exactly the size that is needed, and lists of several elements.

They refuse smaller buffers or cut the text, as CUDA's and NVML's do, and write nothing behind a buffer.
"""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

import pytest

from tests.simulation.driver.test_memory_misuse import evaluate
from tests.support.simulation import linux_only

pytestmark = linux_only

PROGRAM = """
nvml_library = ctypes.CDLL("libnvidia-ml.so.1")
assert nvml_library.nvmlInit_v2() == 0

def nvml(name, *arguments):
    return getattr(nvml_library, name)(*map(convert, arguments))

gpus = [c_void_p() for _ in range(3)]
assert [nvml("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(gpu)) for index, gpu in enumerate(gpus)] == [0, 0, 0]
GUARD = bytes(range(200, 216))

def put(call, size, space=512):
    "Return the error and the text of a call with a buffer of a size, and whether what lies behind it is unchanged."
    buffer = ctypes.create_string_buffer(GUARD * (space // len(GUARD)), space)
    before = buffer.raw
    error = call(buffer, c_uint(size))
    text = ctypes.string_at(buffer, size).partition(bytes(1))[0].decode() if error == 0 else None
    return error, text, buffer.raw[size:] == before[size:]

def exact(call):
    whole = put(call, 256)
    needed = len(whole[1]) + 1
    return whole, [put(call, size) for size in (needed, needed + 1, needed - 1, 0)]

TEXTS = {
    "cuDeviceGetName": lambda buffer, size: cu("cuDeviceGetName", buffer, size, c_int(1)),
    "cuDeviceGetPCIBusId": lambda buffer, size: cu("cuDeviceGetPCIBusId", buffer, size, c_int(1)),
    "cudaDeviceGetPCIBusId": lambda buffer, size: cuda("cudaDeviceGetPCIBusId", buffer, size, c_int(1)),
    "nvmlSystemGetDriverVersion": lambda buffer, size: nvml("nvmlSystemGetDriverVersion", buffer, size),
    "nvmlSystemGetNVMLVersion": lambda buffer, size: nvml("nvmlSystemGetNVMLVersion", buffer, size),
    "nvmlSystemGetProcessName": lambda buffer, size: nvml("nvmlSystemGetProcessName", c_uint(os.getpid()), buffer, size),
    "nvmlDeviceGetName": lambda buffer, size: nvml("nvmlDeviceGetName", gpus[1], buffer, size),
    "nvmlDeviceGetUUID": lambda buffer, size: nvml("nvmlDeviceGetUUID", gpus[1], buffer, size),
}
"""

CUT = {"cuDeviceGetName", "nvmlSystemGetProcessName"}
INVALID_VALUE, NVML_INVALID_ARGUMENT, NVML_INSUFFICIENT_SIZE = 1, 2, 7
MACHINE: dict[str, Any] = {"gpus": 3, "name": "L40S"}


def test_texts() -> None:
    (found,) = evaluate(PROGRAM + "report({name: exact(call) for name, call in TEXTS.items()})", **MACHINE)
    assert len(found) == 8
    for name, ((_, text, _), [fitting, longer, shorter, empty]) in found.items():
        assert text, name
        assert fitting == longer == [0, text, True], name
        too_small = NVML_INSUFFICIENT_SIZE if name.startswith("nvml") else INVALID_VALUE
        assert shorter == ([0, text[:-1], True] if name in CUT else [too_small, None, True]), name
        assert empty[0] == (NVML_INVALID_ARGUMENT if name == "nvmlSystemGetProcessName" else too_small), name
        assert empty[2], name


def test_lists() -> None:
    """A list gets as many elements as it has space for. Its count says how many there are, or how many it got."""
    program = """
        def listed(call, capacity):
            "Return the error, the count and the elements of a call; one that is not written is -1."
            elements, count = (c_uint64 * 8)(*[2**64 - 1] * 8), c_uint64(capacity)
            error = call(byref(count), elements)
            return error, count.value, [None if each == 2**64 - 1 else each for each in elements].index(None)

        def nearest(count, elements):
            short = c_uint(count._obj.value)
            error = nvml("nvmlDeviceGetTopologyNearestGpus", gpus[0], c_uint(40), byref(short), elements)
            count._obj.value = short.value
            return error

        stream, graph = c_void_p(made(cuda, "cudaStreamCreate")), c_void_p()
        block = made(cuda, "cudaMalloc", MIB)
        assert cuda("cudaStreamBeginCapture", stream, c_int(0)) == 0
        for value in range(2):
            assert cuda("cudaMemsetAsync", block, value, MIB, stream) == 0
        assert cuda("cudaStreamEndCapture", stream, byref(graph)) == 0
        node = (c_uint64 * 2)()
        assert cuda("cudaGraphGetNodes", graph, node, byref(c_size_t(2))) == 0
        dependencies = [cuda("cudaGraphNodeGetDependencies", c_void_p(each), None, None, byref(n := c_size_t(9))) or n.value
                        for each in node]
        calls = {
            "nvmlDeviceGetTopologyNearestGpus": nearest,
            "cudaGraphGetNodes": lambda count, elements: cuda("cudaGraphGetNodes", graph, elements, count),
            "cudaGraphNodeGetDependencies": lambda count, elements: cuda(
                "cudaGraphNodeGetDependencies", c_void_p(node[1]), elements, None, count),
        }
        without = c_size_t(0)
        assert cuda("cudaGraphGetNodes", graph, None, byref(without)) == 0
        report({name: [listed(call, capacity) for capacity in range(4)] for name, call in calls.items()}, without.value,
               dependencies)
    """
    found, nodes, dependencies = evaluate(PROGRAM + textwrap.dedent(program), **MACHINE)
    assert (nodes, dependencies) == (2, [0, 1])
    too_small = NVML_INSUFFICIENT_SIZE
    assert found == {
        "nvmlDeviceGetTopologyNearestGpus": [[too_small, 2, 0], [too_small, 2, 1], [0, 2, 2], [0, 2, 2]],
        "cudaGraphGetNodes": [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 2, 2]],
        "cudaGraphNodeGetDependencies": [[0, 0, 0], [0, 1, 1], [0, 1, 1], [0, 1, 1]],
    }


NONE, READ, READ_AND_WRITE = 0, 1, 3


def test_access_of_several_devices() -> None:
    """Memory that one device may write can be written, whatever the others may do and in whatever order they are listed."""
    cases = [*itertools.product((NONE, READ, READ_AND_WRITE), repeat=2), (READ, READ_AND_WRITE, NONE), (NONE, NONE, READ)]
    program = f"""
        address = made(cu, "cuMemAddressReserve", 2 * MIB, 0, 0, 0)
        handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
        assert cu("cuMemMap", address, 2 * MIB, 0, handle, 0) == 0

        def permissions():
            lines = open("/proc/self/maps").read().splitlines()
            return next(line.split()[1][:2] for line in lines if line.startswith(f"{{address:x}}-"))

        found = []
        for flags in {cases!r}:
            accesses = (Access * len(flags))(*(Access(1, device, flag) for device, flag in enumerate(flags)))
            assert cu("cuMemSetAccess", address, 2 * MIB, accesses, len(flags)) == 0
            found.append(permissions())
        report(found)
    """
    (found,) = evaluate(program, **MACHINE)
    assert dict(zip(cases, found, strict=True)) == {
        flags: {NONE: "--", READ: "r-", READ_AND_WRITE: "rw"}[max(flags)] for flags in cases
    }


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_each_of_several_descriptors_is_checked(wrong: int) -> None:
    program = f"""
        address = made(cu, "cuMemAddressReserve", 2 * MIB, 0, 0, 0)
        handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
        assert cu("cuMemMap", address, 2 * MIB, 0, handle, 0) == 0
        def refused(**changes):
            accesses = (Access * 3)(*(Access(1, device, 3) for device in range(3)))
            for name, value in changes.items():
                setattr(accesses[{wrong}], name, value)
            return cu("cuMemSetAccess", address, 2 * MIB, accesses, 3)
        report(refused(), refused(location_id=3), refused(flags=2), refused(location_type=2))
    """
    assert evaluate(program, **MACHINE) == [0, 101, 1, 1]
