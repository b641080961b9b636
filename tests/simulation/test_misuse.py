"""What happens where a simulated machine is not used as it was meant to be."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support import environment, simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation import DEADLINE, MIB, PRELUDE, linux_only, python, run

pytestmark = linux_only

USED = "[n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used for h in handles()]"


def test_memory_is_released_at_exec(tmp_path: Path) -> None:
    program = f"""
        allocate({64 * MIB})
        n.nvmlInit()
        before = {USED}
        rows = "len(n.nvmlDeviceGetComputeRunningProcesses(handles()[0]))"
        after = PRELUDE + f"n.nvmlInit(); report([json.loads(sys.argv[1]), {USED}, {{rows}}])"
        os.execv(sys.executable, [sys.executable, "-c", after, json.dumps(before)])
    """
    child = simulated_environment(state=tmp_path / "state")
    assert run(f"PRELUDE = {PRELUDE!r}\n" + textwrap.dedent(program), child) == [[64 * MIB], [0], 0]


def test_memory_after_exec_is_the_new_programs(tmp_path: Path) -> None:
    program = f"""
        allocate({64 * MIB})
        after = PRELUDE + "allocate({32 * MIB}); n.nvmlInit(); report({USED})"
        os.execv(sys.executable, [sys.executable, "-c", after])
    """
    child = simulated_environment(state=tmp_path / "state")
    assert run(f"PRELUDE = {PRELUDE!r}\n" + textwrap.dedent(program), child) == [32 * MIB]


def test_a_forked_child_does_not_release_its_parents_memory(tmp_path: Path) -> None:
    program = f"""
        allocate({64 * MIB})
        read, write = os.pipe()
        if os.fork() == 0:
            n.nvmlInit()
            os.write(write, json.dumps({USED}).encode())
            os._exit(0)
        report(json.loads(os.read(read, 100)))
    """
    assert run(program, simulated_environment(state=tmp_path / "state")) == [64 * MIB]


# A library with an object that frees its memory when the process ends, maybe after the driver has left.
LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

size_t held;

__attribute__((destructor)) static void release(void)
{
    int (*free_memory)(size_t) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemFree_v2");
    free_memory(held);
}
"""


def test_memory_that_is_freed_late_is_nobody_elses(tmp_path: Path) -> None:
    for name in ("before.so", "after.so"):  # libraries are left in an order that depends on that in which they were loaded
        compiled(LATE, tmp_path / name, "-shared", "-fPIC")
    child = simulated_environment(memory="1GiB", state=tmp_path / "state")
    program = f"""
        before = ctypes.CDLL({str(tmp_path / "before.so")!r})
        cuda, pointer = allocate({256 * MIB})
        after = ctypes.CDLL({str(tmp_path / "after.so")!r})
        ctypes.c_size_t.in_dll(before, "held").value = pointer.value
        ctypes.c_size_t.in_dll(after, "held").value = allocate({256 * MIB})[1].value
        report(0)
    """
    run(program, child)
    program = f"""
        cuda, pointer = allocate({800 * MIB})
        report(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t({400 * MIB})))
    """
    out_of_memory = 2
    assert run(program, child) == out_of_memory


def test_a_state_that_became_unusable_is_an_error(tmp_path: Path) -> None:
    child = environment(state=tmp_path / "state", base={})
    (tmp_path / "state").mkdir()
    done = python("import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))", env=child)
    assert done.stdout == "304\n"
    assert done.stderr == f"accelerator: the state of the simulated machine cannot be kept in {tmp_path / 'state'}\n"


def test_a_replaced_library_path_is_named() -> None:
    program = "import ctypes; print(ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))"
    inside = environment()
    replaced = subprocess.run(
        [sys.executable, "-c", program],
        env={**inside, "LD_LIBRARY_PATH": "/opt/other"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert replaced.stdout == "35\n"
    assert replaced.stderr.startswith("accelerator: there is no simulated driver, for something has replaced LD_LIBRARY_PATH")
    assert replaced.stderr.count("\n") == 1
    absent = python(program, env=environment(driver="absent"))
    assert (absent.stdout, absent.stderr) == ("35\n", "")
