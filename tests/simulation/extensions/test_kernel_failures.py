"""What a kernel does wrong is found: CUDA's error at the next wait, for good, and a line with kernel, block, thread; printf.

Each program has a GPU for each failure, because a process loses the GPU on which a kernel has failed.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import python, simulated_environment
from tests.support.discovery import evaluate_simulated
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("extensions")]

START = """
import torch, ctypes, sys
from tests.simulation.extensions.binaries import Binary
from tests.simulation.extensions.fat_binaries import Entry
from tests.simulation.extensions.texts import *

def outcome(name, launch):
    try:
        error = launch()
        torch.cuda.synchronize()
        print(name, error, "ends")
    except RuntimeError as failure:
        print(name, type(failure).__name__, str(failure).splitlines()[0])
"""


def run_program(program: str, variables: dict[str, str] | None = None, **options: object) -> tuple[list[str], str]:
    environment = {**simulated_environment(variables, **options), "ACCELERATOR_SIM_KERNEL_TIMEOUT": "1"}
    done = python(START + textwrap.dedent(program), environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_failures_of_kernels_are_cudas_errors_and_name_the_thread() -> None:
    program = """
        saxpy, total, wrong = Binary(SAXPY).kernel("saxpy"), Binary(TOTAL).kernel("total"), Binary(WRONG)
        n, zero, one, two = ctypes.c_uint(1000), ctypes.c_uint(0), ctypes.c_uint(1), ctypes.c_float(2)
        memory = [torch.zeros(5_000_000, device=f"cuda:{i}") for i in range(8)]  # a segment of its own in each allocator
        ends = [ctypes.c_uint64(x.data_ptr() + 4 * x.numel() - 3996) for x in memory]
        host = torch.zeros(1000)
        launches = {
            "bounds": lambda x: saxpy(4, 256, two, ctypes.c_uint64(segment(x) - 3996), x, n),
            "host": lambda x: saxpy(4, 256, two, host, x, n),
            "peer": lambda x: saxpy(4, 256, two, memory[7], x, n),
            "misaligned": lambda x: wrong.kernel("misaligned")(1, 1, x),
            "trap": lambda x: wrong.kernel("trap_")(1, 1),
            "endless": lambda x: wrong.kernel("endless")(1, 1, x),
            "barrier": lambda x: total(1, 64, x, x, one, shared=256),
        }
        def segment(x):
            return next(s["address"] + s["total_size"] for s in torch.cuda.memory_snapshot() if s["address"] == x.data_ptr())
        for index, (name, launch) in enumerate(launches.items()):
            with torch.cuda.device(index):
                outcome(name, lambda: launch(memory[index]))
        with torch.cuda.device(0):
            for name, call in (("op", lambda: memory[0] + 1), ("malloc", lambda: torch.empty(10**8, device="cuda")),
                               ("launch", lambda: saxpy(1, 1, two, memory[0], memory[0], n))):
                outcome(name, call)
        with torch.cuda.device(7):
            outcome("other", lambda: saxpy(4, 256, two, memory[7], memory[7], n))
        """
    lines, errors = run_program(program, gpus=8)
    illegal = "CUDA error: an illegal memory access was encountered"
    torch: Any = importlib.import_module("torch")
    accelerator = getattr(torch, "AcceleratorError", RuntimeError).__name__  # torch 2.8 and newer have it
    assert lines == [
        f"bounds {accelerator} {illegal}",
        f"host {accelerator} {illegal}",
        f"peer {accelerator} {illegal}",
        f"misaligned {accelerator} CUDA error: misaligned address",
        f"trap {accelerator} CUDA error: unspecified launch failure",
        f"endless {accelerator} CUDA error: the launch timed out and was terminated",
        f"barrier {accelerator} CUDA error: the launch timed out and was terminated",
        f"op {accelerator} {illegal}",
        f"malloc {accelerator} {illegal}",
        f"launch {accelerator} {illegal}",
        "other 0 ends",
    ]
    patterns = [
        r"saxpy on device 0 fails \(cudaErrorIllegalAddress\): block \(3,0,0\), thread \(231,0,0\): ld\.global\.f32 %v, \[%x\]"
        r" accesses 4 bytes at 0x\w+, 0 bytes after \d+ bytes of device memory of device 0 at 0x\w+$",
        r"saxpy on device 1 fails .*: block \(0,0,0\), thread \(0,0,0\): ld\.global\.f32",
        r"saxpy on device 2 fails .*, in \d+ bytes of device memory of device 7 at ",
        r"misaligned on device 3 fails .* at 0x\w+2, which is no multiple of 4$",
        r"trap_ on device 4 fails .*block \(0,0,0\), thread \(0,0,0\): ",
        r"endless on device 5 fails .*no block has ended for 1 s \(ACCELERATOR_SIM_KERNEL_TIMEOUT\)$",
        r"total on device 6 fails .*: of its 64 threads wait 32 at bar\.sync 0, 32 at bar\.sync 1; 0 have returned$",
    ]
    for pattern in patterns:
        assert re.search(pattern, errors, re.MULTILINE), (pattern, errors)


LAST_ERRORS = """
def error(call):
    try:
        call()
    except RuntimeError:
        return "raised"

wrong, x = Binary(WRONG), torch.ones(4, device="cuda")
get, peek = wrong.runtime.cudaGetLastError, wrong.runtime.cudaPeekAtLastError
print(error(lambda: FAIL), get(), error(torch.cuda.synchronize), get(), peek(), get(), error(lambda: x + 1))
with torch.cuda.device(1):
    print(get(), torch.ones(4, device="cuda").sum().item())
"""


@pytest.mark.parametrize(
    ("call", "number"), [("wrong.kernel('trap_')(1, 1)", 719), ("x[torch.tensor([9], device='cuda')]", 710)]
)
def test_the_error_of_a_broken_context_stays_the_last_error(call: str, number: int) -> None:
    lines, errors = run_program(LAST_ERRORS.replace("FAIL", call), gpus=2)
    assert lines == [f"None 0 raised {number} {number} {number} raised", "0 4.0"], errors


def test_launch_blocking_returns_the_error_of_a_kernel_at_its_launch() -> None:
    lines, _ = run_program("print(Binary(WRONG).kernel('trap_')(1, 1))", gpus=1, variables={"CUDA_LAUNCH_BLOCKING": "1"})
    assert lines == ["719"]


PLANTED = {
    "check": (
        "device-side assert triggered",
        r"^k\.cu:7: check: block: \[0,0,0\], thread: \[3,0,0\] Assertion `x > 0` failed\.$",
    ),
    "deep": (
        "an illegal memory access was encountered",
        r"deep on device 1 fails .*: block \(0,0,0\), thread \(0,0,0\): its stack overflows$",
    ),
    "loops": ("the launch timed out and was terminated", r"loops on device 2 fails .*no block has ended for 1 s"),
    "locked": ("the launch timed out and was terminated", r"locked on device 3 fails .*no block has ended for 1 s"),
    "apart": (
        "the launch timed out and was terminated",
        r"apart on device 4 fails .*: of its 64 threads wait 24 at bar\.warp\.sync 0xffffffff, 40 at bar\.sync 0; 0 have",
    ),
}


def test_planted_errors_end_with_cudas_error_and_a_line() -> None:
    program = f"""
        planted, one = Binary(PLANTED), ctypes.c_uint(1)
        for index, name in enumerate({list(PLANTED)}):
            with torch.cuda.device(index):
                x = torch.zeros(64, dtype=torch.int32, device="cuda")
                arguments = {{"check": (), "loops": (one,), "apart": ()}}.get(name, (x,))
                outcome(name, lambda: planted.kernel(name)(1, 64, *arguments))
        """
    lines, errors = run_program(program, gpus=len(PLANTED))
    assert [line.partition("CUDA error: ")[2] for line in lines] == [text for text, _ in PLANTED.values()]
    for _, pattern in PLANTED.values():
        assert re.search(pattern, errors, re.MULTILINE), (pattern, errors)


def test_a_missing_barrier_shows_as_nan() -> None:
    program = """
        x = torch.arange(64.0, device="cuda")
        Binary(PLANTED).kernel("reverse")(1, 64, x)
        print(x.isnan().any().item())
        """
    assert run_program(program, gpus=1, fill="nan")[0] == ["True"]


def test_the_next_op_raises_the_error_of_a_launch_that_nobody_has_read() -> None:
    program = """
        saxpy, x = Binary(SAXPY).kernel("saxpy"), torch.ones(4, device="cuda")
        arguments = (ctypes.c_float(2), x, x, ctypes.c_uint(4))
        print(saxpy(1, 2000, *arguments), (x + 1).sum().item())  # which reads the error
        saxpy.read_error = lambda: None
        print(saxpy(1, 2000, *arguments))
        for _ in range(2):
            outcome("op", lambda: (x + 1).sum().item())
        """
    lines, errors = run_program(program, gpus=1)
    said = "kernel saxpy is not launched (cudaErrorInvalidConfiguration): grid (1,1,1), block (2000,1,1), 0 bytes of dynamic"
    assert errors.count(f"accelerator: {said} shared memory\n") == errors.count("is not launched") == 1
    assert lines[:2] == ["9 8.0", "9"]
    assert lines[2].endswith("Error CUDA error: invalid configuration argument")
    assert lines[3] == "op 8.0 ends"


def test_printf_and_nan_in_shared_memory() -> None:
    program = """
        x, out = torch.arange(64, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        total = Binary(TOTAL).kernel("total")
        total(1, 32, x, out, ctypes.c_uint(0), shared=256)
        print(out.item(), flush=True)
        Binary(WRONG).kernel("say")(1, 2, ctypes.c_uint(5))
        # Twice as many numbers as threads: nobody writes the other half.
        text = TOTAL.replace("setp.lt.u32 %p, %t, %n;\\n    @%p bra LOOP", "setp.lt.u32 %p, %t, 64;\\n    @%p bra LOOP")
        Binary(text).kernel("total")(1, 32, x, out, ctypes.c_uint(0), shared=256)
        print(out.item())
        """
    lines, _ = run_program(program, gpus=1, fill="nan")
    assert lines == ["496", "x = 5", "x = 5", str(496 - 32)]  # integers of NaN bytes are -1


def test_slow_and_hung_gpus_delay_kernels_and_errors_count_them() -> None:
    program = """
        import time
        from accelerator import simulation

        saxpy, n, two = Binary(SAXPY).kernel("saxpy"), ctypes.c_uint(1000), ctypes.c_float(2)
        memory = [torch.zeros(1000, device=f"cuda:{gpu}") for gpu in range(3)]

        def launch(gpu, times=1):
            with torch.cuda.device(gpu):
                for _ in range(times):
                    assert saxpy(4, 256, two, memory[gpu], memory[gpu], n) == 0
                return times

        launch(0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        simulation.inject_fault("slow=100ms,gpu=0")
        start.record()
        launch(0, 3)
        end.record()
        end.synchronize()
        print(300 <= start.elapsed_time(end) < 2000)
        begin = time.monotonic()
        simulation.inject_fault("hang,gpu=1,for=0.3")
        launch(1)
        torch.cuda.synchronize(1)
        print(time.monotonic() - begin >= 0.3)
        simulation.inject_fault("xid=94,gpu=2,after_ops=2")
        launch(2, 2)
        torch.cuda.synchronize(2)
        launch(2)
        try:
            torch.cuda.synchronize(2)
        except RuntimeError as failure:
            print(str(failure).splitlines()[0])
    """
    lines, errors = run_program(program, gpus=3)
    assert lines == ["True", "True", "CUDA error: uncorrectable ECC error encountered"], errors


@pytest.mark.slow
def test_kernels_do_nothing_without_computation_and_fail_if_they_are_refused() -> None:
    program = """
        x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        print(Binary(SAXPY).kernel("saxpy")(1, 4, ctypes.c_float(2), x, y, ctypes.c_uint(4)))
        """
    assert run_program(program, gpus=1, compute=False) == (["0"], "")
    lines, errors = run_program(program, gpus=1, kernels="refuse")
    assert lines == ["801"]
    assert errors == "kernel saxpy is not simulated: ACCELERATOR_SIM_KERNELS refuses kernels that are not torch's own\n"


LAUNCH = """
x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
print(Binary(SAXPY).kernel("saxpy")(1, 4, ctypes.c_float(2), x, y, ctypes.c_uint(4)), y.tolist() if len(sys.argv) else "")
"""


@pytest.mark.parametrize(
    ("mode", "compiler", "reason"),
    [
        (0o755, "/missing/compiler", "its PTX cannot run: no C compiler was found; install one or set CC; give its op"),
        (0o777, "cc", "others may write into the directory for compiled kernels"),
    ],
)
def test_why_a_kernel_cannot_be_compiled(tmp_path: Path, mode: int, compiler: str, reason: str) -> None:
    variables = {"ACCELERATOR_SIM_KERNEL_CACHE": str(tmp_path), "CC": compiler}
    tmp_path.chmod(mode)
    program = START + LAUNCH.replace("y.tolist() if len(sys.argv) else ", "")
    done = python(program, {**simulated_environment(gpus=1), **variables})
    assert done.stdout.split()[0] == "801"
    assert f"kernel saxpy is not simulated: {reason}" in done.stderr


def test_a_forked_child_has_no_gpu() -> None:
    program = """
        import os
        saxpy = Binary(SAXPY).kernel("saxpy")
        x = torch.ones(4, device="cuda")
        print(saxpy(1, 4, ctypes.c_float(1), x, x, ctypes.c_uint(4)), flush=True)
        child = os.fork()
        if child == 0:
            try:
                saxpy(1, 4, ctypes.c_float(1), x, x, ctypes.c_uint(4))
            except RuntimeError as error:
                os._exit(3 if "forked subprocess" in str(error) else 4)
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), x.tolist())
        """
    lines, _ = run_program(program, gpus=1)
    assert lines == ["0", "3 [2.0, 2.0, 2.0, 2.0]"]


def test_a_program_that_uses_the_driver_alone() -> None:
    """The driver finds the streams of the runtime, of which the program has called nothing."""
    program = """
        from tests.ptx.driver import DriverKernel, programs
        (program,) = (each for each in programs() if each.name == "branches")
        print(json.dumps([program.failures(DriverKernel), "torch" in sys.modules]))
    """
    assert evaluate_simulated(program, gpus=1) == [[], False]
