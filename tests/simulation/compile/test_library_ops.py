"""Ops of C++ extensions: on simulated GPUs their CPU kernel runs in place of their compiled CUDA kernel."""

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

# The CUDA kernels return a wrong result, -1. Real ones would launch code for a GPU, which the simulation refuses.
SOURCE = """
#include <torch/library.h>
#include <ATen/ATen.h>

static at::Tensor add_on_cpu(const at::Tensor& x, double y) {
    TORCH_CHECK(x.device().is_cpu());
    return x + y;
}
static at::Tensor& scale_on_cpu(at::Tensor& x, double y) {
    TORCH_CHECK(x.device().is_cpu());
    return x.mul_(y);
}
static at::Tensor add_on_cuda(const at::Tensor& x, double y) { return at::full_like(x, -1); }
static at::Tensor& scale_on_cuda(at::Tensor& x, double y) { return x.fill_(-1); }
static at::Tensor choose(const at::Tensor& x) {
    at::Tensor host = x.cpu();
    return x.slice(0, 0, host.data_ptr<float>()[0] > 0 ? 1 : 2);
}

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("add(Tensor x, float y) -> Tensor");
    m.def("scale_(Tensor(a!) x, float y) -> Tensor(a!)");
    m.def("only_cuda(Tensor x, float y) -> Tensor");
    m.def("choose(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("add", add_on_cpu);
    m.impl("scale_", scale_on_cpu);
    m.impl("choose", choose);
}
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("add", add_on_cuda);
    m.impl("scale_", scale_on_cuda);
    m.impl("only_cuda", add_on_cuda);
    m.impl("choose", choose);
}
"""

PROGRAM = """
import ctypes, sys, torch
if sys.argv[2] == "load_library":
    torch.ops.load_library(sys.argv[1])
else:  # as the import of an extension module loads it
    ctypes.CDLL(sys.argv[1])
ops = torch.ops.acc_test
x = torch.arange(4.0, device="cuda")[1:]
print(ops.add(x, 10).tolist(), ops.scale_(x, 2) is x, x.tolist(), ops.only_cuda(x, 1).tolist())

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


@pytest.mark.parametrize(("loaded_by", "own"), [("load_library", ""), ("import", ""), ("load_library", "other, acc_test")])
def test_ops_of_a_cpp_extension(library: Path, loaded_by: str, own: str) -> None:
    env = simulated_environment({"ACCELERATOR_SIM_OWN_KERNELS": own})
    command = [sys.executable, "-c", PROGRAM, os.fspath(library), loaded_by]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = "[-1.0, -1.0, -1.0]"
    added, scaled = (values, values) if own else ("[11.0, 12.0, 13.0]", "[2.0, 4.0, 6.0]")
    python = "[1.0, 1.0, 1.0]" if own else "[4.0, 6.0, 8.0]"
    assert done.stdout.splitlines() == [f"{added} True {scaled} {values}", python]


REHEARSED = """
import resource, sys, torch
torch.ops.load_library(sys.argv[1])
ops = torch.ops.acc_test
known_values = sys.modules["_accelerator_simulation._kernels.known_values"]
x = torch.arange(4.0, device="cuda")[1:]
assert ops.add(x, 10).tolist() == [11, 12, 13]  # small arguments compute
assert ops.scale_(x, 2) is x and x.tolist() == [2, 4, 6] and ops.choose(x).tolist() == [2]
assert ops.add(torch.ones(3), 1).tolist() == [2, 2, 2]
assert not known_values.noted()
large = torch.empty(2**30, device="cuda")
assert ops.add(large, 1).shape == large.shape and ops.scale_(large, 2) is large
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20
chosen = ops.choose(torch.empty(1000, device="cuda") + 1)
[(op, line, count)] = known_values.noted()  # the op read on the host what was not computed
assert (op, chosen.shape, count) == ("acc_test::choose", (2,), 1), known_values.noted()
"""


def test_rehearsed_ops_of_a_cpp_extension(library: Path) -> None:
    env = simulated_environment(compute=False, memory="16GiB")
    done = subprocess.run([sys.executable, "-c", REHEARSED, os.fspath(library)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
