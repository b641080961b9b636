"""The cache of compiled kernels, which processes share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerator.simulation._ptx import compiler
from tests.support import python, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("extensions")]

LAUNCH = """
import ctypes, torch
from tests.simulation.extensions.binaries import Binary
from tests.simulation.extensions.texts import SAXPY

x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
print(Binary(SAXPY).kernel("saxpy")(1, 4, ctypes.c_float(2), x, y, ctypes.c_uint(4)), y.tolist())
"""
RESULT = "0 [2.0, 2.0, 2.0, 2.0]\n"


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """An empty cache, and a compiler that counts its calls."""
    (tmp_path / "cache").mkdir(mode=0o755)
    wrapper = tmp_path / "cc"
    wrapper.write_text(f'#!/bin/sh\necho call >> {tmp_path}/calls\nexec cc "$@"\n')
    wrapper.chmod(0o755)
    return {"ACCELERATOR_SIM_KERNEL_CACHE": str(tmp_path / "cache"), "CC": str(wrapper)}


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().split())


@pytest.mark.slow
def test_a_kernel_is_compiled_once_for_all_processes(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**simulated_environment(gpus=1), **variables}
    for _ in range(2):
        done = python(LAUNCH, environment)
        assert done.stdout == RESULT, done.stderr
    assert calls(tmp_path) == 1


@pytest.mark.slow
def test_a_use_makes_a_kernel_young(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**simulated_environment(gpus=1), **variables}
    assert python(LAUNCH, environment).stdout == RESULT
    (kernel,) = (tmp_path / "cache").glob("*.so")
    os.utime(kernel, (1, 1))
    assert python(LAUNCH, environment).stdout == RESULT
    assert kernel.stat().st_mtime > 1
    assert calls(tmp_path) == 1


@pytest.mark.slow
def test_processes_that_need_a_kernel_at_once_compile_it_once(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**simulated_environment(gpus=1), **variables}
    command = [sys.executable, "-c", LAUNCH]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == [RESULT] * 3
    assert calls(tmp_path) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "a folder":
        path.unlink()
        (path / "of").mkdir(parents=True)
        (path / "of" / "others").touch()
    elif how == "a link":
        path.unlink()
        path.symlink_to(path.parent / "nothing")
    elif how == "others may write it":
        path.chmod(0o666)
    elif how == "nobody may read it":
        path.chmod(0)
    else:
        middle = len(content) // 2
        changed = {
            "empty": b"",
            "a few bytes": content[:10],
            "half": content[:middle],
            "without its end": content[:-1],
            "text": b"text\n" * 1000,
            "one other bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "other headers": content[:40] + b"\xff" * 200 + content[240:],
            "a changed end": content[:-2] + b"no",
        }
        path.write_bytes(changed[how])


DAMAGES = (
    *("empty", "a few bytes", "half", "without its end", "text", "one other bit", "other headers", "a changed end"),
    *("a folder", "a link", "others may write it", "nobody may read it"),
)


@pytest.mark.parametrize("how", ["half", *(pytest.param(how, marks=pytest.mark.slow) for how in DAMAGES if how != "half")])
def test_a_damaged_kernel_is_made_again(variables: dict[str, str], tmp_path: Path, how: str) -> None:
    """Also one whose lock was damaged, and the table of a program's variables, which is a file of the cache too."""
    program = """
import ctypes
from ctypes import byref, c_size_t, c_void_p
from tests.simulation.extensions.damaged_images import KERNEL, Loader
driver, module, function = Loader().driver, c_void_p(), c_void_p()
assert driver.cuModuleLoadData(byref(module), KERNEL.encode()) == 0
assert driver.cuModuleGetFunction(byref(function), module, b"count") == 0
out, value = c_void_p(), ctypes.c_int()
assert driver.cuMemAlloc_v2(byref(out), c_size_t(4)) == 0
parameters = (c_void_p * 1)(ctypes.addressof(out))
print(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None), end=" ")
assert driver.cuMemcpyDtoH_v2(byref(value), out, c_size_t(4)) == 0
print(value.value)
"""
    environment = {**simulated_environment(gpus=1), **variables}
    done = python(program, environment)
    assert done.stdout == "0 42\n", done.stderr
    kernels = sorted((tmp_path / "cache").glob("*.so"))
    assert len(kernels) == 2
    for kernel in kernels:
        damage(kernel, how)
        if how == "empty":
            kernel.unlink()
            kernel.with_suffix(".lock").mkdir()
    done = python(program, environment)
    assert (done.stdout, done.stderr) == ("0 42\n", "")
    assert sorted((tmp_path / "cache").iterdir()) == kernels
    done = python(program, environment)
    assert (done.stdout, done.stderr) == ("0 42\n", "")
    assert calls(tmp_path) == (2 if how == "nobody may read it" and os.geteuid() == 0 else 4)


def test_the_kernels_that_were_used_longest_ago_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CACHE_SIZE", 3000)
    now = time.time()
    for age in (50, 10, 40, 20, 30):
        path = tmp_path / f"{age}.so"
        path.write_bytes(bytes(1000))
        os.utime(path, (now - age, now - age))
    for name, age in ((".building-old", 7200), (".building-new", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.c").touch()
        os.utime(tmp_path / name, (now - age, now - age))
    compiler.limit_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".building-new", "10.so", "20.so", "30.so"]
