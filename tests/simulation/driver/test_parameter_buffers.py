"""The sizes of a buffer of parameters that cuLaunchKernel accepts, as measured on an H200 with a driver of CUDA 13.0."""

from __future__ import annotations

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only, run

pytestmark = linux_only

SUCCESS, INVALID_VALUE, OUT_OF_RESOURCES = 0, 1, 701

KERNEL = """.version 6.3
.target sm_60
.address_size 64
.visible .entry main(PARAMETERS) {
    ret;
}
.visible .entry store(.param .u64 at, .param .u32 number) {
    .reg .b64 %at; .reg .b32 %number;
    ld.param.u64 %at, [at]; ld.param.u32 %number, [number]; st.global.u32 [%at], %number; ret;
}
"""

PROGRAM = """
from tests.ptx.driver import DriverKernel, _library

def launch(kernel, data, size):
    buffer = ctypes.create_string_buffer(bytes(data), len(data))
    length = ctypes.c_size_t(size or 0)
    sizes = () if size is None else (2, ctypes.addressof(length))
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), *sizes, 0)
    return _library().cuLaunchKernel(kernel._function, 1, 1, 1, 1, 1, 1, 0, None, None, extra)
"""


def launch_errors(parameters: str, *sizes: int | None) -> list[int]:
    """Launch a kernel with buffers of sizes, and return the errors."""
    program = f"""{PROGRAM}
kernel = DriverKernel([{KERNEL.replace("PARAMETERS", parameters)!r}], "main")
report([launch(kernel, bytes(64), size) for size in {sizes!r}])
"""
    errors: list[int] = run(program, simulated_environment())
    return errors


def test_a_buffer_without_parameters_is_invalid() -> None:
    assert launch_errors(".param .u64 a", 0, None) == [INVALID_VALUE] * 2


@pytest.mark.slow
def test_a_buffer_may_have_padding_to_eight_bytes_after_the_parameters() -> None:
    assert launch_errors(".param .u64 a, .param .u32 b", 12, 16, 17, 24, 64) == [SUCCESS] * 2 + [OUT_OF_RESOURCES] * 3
    assert launch_errors(".param .u64 a", 8, 24) == [SUCCESS, OUT_OF_RESOURCES]


def test_parameters_that_a_buffer_lacks_are_zero() -> None:
    program = f"""{PROGRAM}
address, value = ctypes.c_uint64(), ctypes.c_uint32(7)
assert _library().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64)) == 0
kernel = DriverKernel([{KERNEL.replace("PARAMETERS", "")!r}], "store")
data = address.value.to_bytes(8, "little") + b"\\xff" * 8
errors = []
for size in (12, 8):
    errors.append(launch(kernel, data, size))
    assert _library().cuMemcpyDtoH_v2(ctypes.byref(value), address, ctypes.c_size_t(4)) == 0
    errors.append(value.value)
report(errors)
"""
    assert run(program, simulated_environment()) == [SUCCESS, 0xFFFFFFFF, SUCCESS, 0]
