"""Run programs on simulated machines, for the tests of the simulation."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import accelerator.simulation
from tests import support
from tests.support import simulated_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

linux_only = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="simulated GPUs are for Linux on x86-64"
)

REPOSITORY = Path(accelerator.simulation.__file__).parents[2]
GIB = 2**30
MIB = 2**20
# Seconds after which a hanging process fails its test.
DEADLINE = 120


def python(program: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process."""
    return support.python(program, dict(os.environ if env is None else env), *arguments, timeout=DEADLINE, cwd=REPOSITORY)


def plain() -> dict[str, str]:
    """Return the environment of this process without the variables that load the simulated libraries."""
    return {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}


def allocator_variables(settings: str) -> dict[str, str]:
    """Return the settings of torch's allocator under both names of the variable. The name depends on the version of torch."""
    return dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), settings) if settings else {}


def make_compiler(directory: Path, body: str = 'exec cc "$@"') -> Path:
    """Write a compiler that records its calls, and return its path."""
    compiler = directory / "recorded-cc"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {directory}/calls\n{body}\n')
    compiler.chmod(0o755)
    return compiler


# The body of a compiler that writes text instead of a library.
FAKE_BUILD = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'

# The start of every program that calls NVML.
PRELUDE = """
import ctypes, json, os, sys
import pynvml as n

def code(function, *arguments):
    try:
        function(*arguments)
    except n.NVMLError as error:
        return error.value
    return 0

def handles():
    return [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]

def instances(gpu):
    handles_by_index = {}
    for index in range(n.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handles_by_index[index] = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except n.NVMLError_NotFound:
            pass
    return handles_by_index

def allocate(bytes, ordinal=0):
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device, pointer = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(bytes)) == 0
    return cuda, pointer

def report(value):
    print(json.dumps(value))
"""


def evaluate(program: str, gpus: int = 1, **machine: Any) -> Any:
    """Run a program on a simulated machine, with NVML initialized, and return what it reports."""
    return evaluate_uninitialized("n.nvmlInit()\n" + textwrap.dedent(program), gpus, **machine)


def evaluate_uninitialized(program: str, gpus: int = 1, **machine: Any) -> Any:
    """Run a program on a simulated machine and return what it reports."""
    return run(program, simulated_environment(gpus=gpus, **machine))


def run(program: str, child: dict[str, str]) -> Any:
    """Run a program in an environment and return what it reports."""
    done = support.python(support.with_prelude(PRELUDE, program), child, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
