"""Ops of C++ extensions: their CUDA kernels run on simulated GPUs, and where one cannot, the op's CPU kernel computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

# The CUDA kernels launch through a function that the program sets, and compute other values than the CPU's.
SOURCE = """
#include <torch/library.h>
#include <ATen/ATen.h>

static int launch_nothing(const char* kernel, float* y, unsigned count) { return 0; }
extern "C" int (*launch)(const char*, float*, unsigned);
int (*launch)(const char*, float*, unsigned) = launch_nothing;

static at::Tensor add_on_cpu(const at::Tensor& x, double y) {
    TORCH_CHECK(x.device().is_cpu());
    return x + y;
}
static at::Tensor& scale_on_cpu(at::Tensor& x, double y) {
    TORCH_CHECK(x.device().is_cpu());
    return x.mul_(y);
}
static at::Tensor add_unchecked(const at::Tensor& x, double y) {
    at::Tensor result = x.clone();
    launch("unchecked", result.data_ptr<float>(), x.numel());
    return result;
}
static at::Tensor add_without_cpu_kernel(const at::Tensor& x, double y) {
    at::Tensor result = x.clone();
    launch("alone", result.data_ptr<float>(), x.numel());
    return result;
}
static at::Tensor& scale_checked(at::Tensor& x, double y) {
    TORCH_CHECK(y > 0, "not positive");
    TORCH_CHECK(launch("checked", x.data_ptr<float>(), x.numel()) == 0, "the launch failed");
    return x;
}
static at::Tensor fill(const at::Tensor& x, double y) {
    at::Tensor result = x.clone();
    TORCH_CHECK(launch("fill", result.data_ptr<float>(), x.numel()) == 0, "the launch failed");
    return result;
}
static at::Tensor choose(const at::Tensor& x) {
    at::Tensor host = x.cpu();
    return x.slice(0, 0, host.data_ptr<float>()[0] > 0 ? 1 : 2);
}

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("add(Tensor x, float y) -> Tensor");
    m.def("scale_(Tensor(a!) x, float y) -> Tensor(a!)");
    m.def("with_ptx(Tensor x, float y) -> Tensor");
    m.def("only_cuda(Tensor x, float y) -> Tensor");
    m.def("choose(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("add", add_on_cpu);
    m.impl("scale_", scale_on_cpu);
    m.impl("with_ptx", add_on_cpu);
    m.impl("choose", choose);
}
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("add", add_unchecked);
    m.impl("scale_", scale_checked);
    m.impl("with_ptx", fill);
    m.impl("only_cuda", add_without_cpu_kernel);
    m.impl("choose", choose);
}
"""

PROGRAM = """
import ctypes, sys, torch
from tests.simulation.extensions.binaries import Binary
from tests.simulation.extensions.fat_binaries import CODE, Entry

library, loaded_by = sys.argv[1:]
if loaded_by == "load_library":
    torch.ops.load_library(library)
else:  # as the import of an extension module loads it
    ctypes.CDLL(library)

FILL = '''.version 7.0
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 y, .param .u32 count) {
    .reg .b64 %d<3>;
    .reg .b32 %r<3>;
    .reg .pred %p;
    ld.param.u64 %d0, [y];
    ld.param.u32 %r0, [count];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p, %r1, %r0;
    @%p bra done;
    mul.wide.u32 %d1, %r1, 4;
    add.u64 %d2, %d0, %d1;
    mov.b32 %r2, 0fBF800000;
    st.global.b32 [%d2], %r2;
done:
    ret;
}
'''
machine_code = Binary(Entry(90, "machine code", kind=CODE))
kernels = {name: machine_code.kernel(name) for name in ("unchecked", "checked", "alone")}
for name in ("unchecked", "alone"):
    kernels[name].read_error = lambda: None
kernels["fill"] = Binary(FILL).kernel("fill")

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint)
def launch(name, y, count):
    return kernels[name.decode()](1, 32, ctypes.c_void_p(y), ctypes.c_uint(count))

ctypes.c_void_p.in_dll(ctypes.CDLL(library), "launch").value = ctypes.cast(launch, ctypes.c_void_p).value
ops = torch.ops.acc_test
x = torch.arange(4.0, device="cuda")[1:]

def show(call):
    try:
        result = call()
        torch.cuda.synchronize()
        print(result.tolist(), result is x)
    except RuntimeError as error:
        print(str(error).partition("\\n")[0])

for _ in range(2):  # the second calls know that the first were refused
    show(lambda: ops.add(x, 10))
    show(lambda: ops.scale_(x, 2))
    show(lambda: ops.with_ptx(x, 1))
show(lambda: ops.add(x.cpu(), 1))
show(lambda: ops.only_cuda(x, 1))

python = torch.library.Library("acc_python", "DEF")
python.define("add(Tensor x) -> Tensor")
python.impl("add", lambda x: x + 1, "CPU")
python.impl("add", lambda x: x + 2, "CUDA")
print(torch.ops.acc_python.add(x).tolist())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    folder = tmp_path_factory.mktemp("library")
    (folder / "ops.cpp").write_text(SOURCE.replace("NAMESPACE", "acc_test"))
    output = folder / "ops.so"
    includes = [flag for path in include_paths() for flag in ("-isystem", path)]
    paths = [flag for path in library_paths() for flag in ("-L", path)]
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-shared", "-fPIC", "-O0"]
    command = ["c++", *flags, *includes, str(folder / "ops.cpp"), "-o", str(output), *paths]
    done = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def run(program: str, library: Path, env: dict[str, str], loaded_by: str = "load_library") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, os.fspath(library), loaded_by], env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("loaded_by", ["load_library", "import"])
def test_an_ops_cpu_kernel_computes_where_its_cuda_kernel_cannot_run(library: Path, loaded_by: str) -> None:
    done = run(PROGRAM, library, simulated_environment(), loaded_by)
    assert done.returncode == 0, done.stderr
    filled, only_cuda = "[-1.0, -1.0, -1.0] False", "CUDA error: operation not supported"
    assert done.stdout.splitlines() == [
        *("[11.0, 12.0, 13.0] False", "[2.0, 4.0, 6.0] True", filled),
        *("[12.0, 14.0, 16.0] False", "[4.0, 8.0, 12.0] True", filled),
        *("[5.0, 9.0, 13.0] False", only_cuda, "[6.0, 10.0, 14.0]"),
    ]
    said = [line.partition(" is not simulated")[0] for line in done.stderr.splitlines() if " is not simulated" in line]
    ops = {"add": "unchecked", "scale_": "checked"}
    fallbacks = [f"the CPU's kernel of acc_test::{op} computes: kernel {kernel}" for op, kernel in ops.items()]
    assert said == [*fallbacks, "kernel alone"]


@pytest.mark.parametrize("own", ["acc_test", "other, acc_test"])
def test_own_kernels_are_left_alone(library: Path, own: str) -> None:
    done = run(PROGRAM, library, simulated_environment({"ACCELERATOR_SIM_OWN_KERNELS": own}))
    refused = "CUDA error: operation not supported"
    assert done.stdout.splitlines()[:3] == [refused, "the launch failed", "[-1.0, -1.0, -1.0] False"], done.stderr


def test_an_error_of_an_ops_cuda_kernel_is_its_own(library: Path) -> None:
    program = PROGRAM.partition("for _ in")[0] + "show(lambda: ops.scale_(x, -1))"
    done = run(program, library, simulated_environment())
    assert done.stdout == "not positive\n", done.stderr
    assert "CPU's kernel" not in done.stderr


REHEARSED = """
import resource, sys, torch
torch.ops.load_library(sys.argv[1])
ops = torch.ops.acc_test
missing_values = sys.modules["_accelerator_simulation._inside.rehearsal.missing_values"]
x = torch.arange(4.0, device="cuda")[1:]
assert ops.add(x, 10).tolist() == [11, 12, 13]  # small arguments compute
assert ops.scale_(x, 2) is x and x.tolist() == [2, 4, 6] and ops.choose(x).tolist() == [2]
assert ops.add(torch.ones(3), 1).tolist() == [2, 2, 2]
assert not missing_values.noted()
large = torch.empty(2**30, device="cuda")
assert ops.add(large, 1).shape == large.shape and ops.scale_(large, 2) is large
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20
chosen = ops.choose(torch.empty(1000, device="cuda") + 1)
[(op, line, count)] = missing_values.noted()  # the op read on the host what was not computed
assert (op, chosen.shape, count) == ("acc_test::choose", (2,), 1), missing_values.noted()
"""


def test_rehearsed_ops_of_a_cpp_extension(library: Path) -> None:
    env = simulated_environment(compute=False, memory="16GiB")
    done = run(REHEARSED, library, env)
    assert done.returncode == 0, done.stderr
