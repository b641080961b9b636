"""Unusual use of a simulated machine: exec, memory that is freed late, unusable state files, a replaced library path."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

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


def test_memory_after_exec_counts_only_the_new_program(tmp_path: Path) -> None:
    program = f"""
        allocate({64 * MIB})
        after = PRELUDE + "allocate({32 * MIB}); n.nvmlInit(); report({USED})"
        os.execv(sys.executable, [sys.executable, "-c", after])
    """
    child = simulated_environment(state=tmp_path / "state")
    assert run(f"PRELUDE = {PRELUDE!r}\n" + textwrap.dedent(program), child) == [32 * MIB]


def test_forked_child_does_not_release_its_parents_memory(tmp_path: Path) -> None:
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


# The destructor of this library frees device memory at the end of the process, maybe after the driver's destructor.
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


def test_memory_freed_by_destructors_is_released_once(tmp_path: Path) -> None:
    for name in ("before.so", "after.so"):  # the order of loading determines the order of destructors
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


# If the tests run with sanitizers, child processes need these variables of this process, but no others.
SANITIZERS = {n: os.environ[n] for n in ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS") if "ASAN_OPTIONS" in os.environ}

CU_INIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
OPERATING_SYSTEM_ERROR = "304\n"


def refused(state: Path, reason: str, **machine: Any) -> bool:
    """Return whether the driver does not start with this state and gives this reason."""
    # Set the variable without environment()'s check of the file, which may change after the check.
    child = {**environment(base=SANITIZERS, **machine), "ACCELERATOR_SIM_STATE": str(state)}
    done = python(CU_INIT, env=child)
    expected = f"accelerator: the state of the simulated machine cannot be kept in {state}: {reason}\n"
    return (done.stdout, done.stderr) == (OPERATING_SYSTEM_ERROR, expected)


def test_state_file_of_another_program_is_rejected(tmp_path: Path) -> None:
    for content in (b"a letter\n", b"x" * 10_000, b"\0" * 10_000, b"x" * 1_000_000):
        (tmp_path / "letter").write_bytes(content)
        assert refused(tmp_path / "letter", "it is another program's file")
        assert (tmp_path / "letter").read_bytes() == content


def test_half_created_state_is_completed(tmp_path: Path) -> None:
    """A process may be killed between the reservation of the file and its first write."""
    state, child = tmp_path / "state", environment(base=SANITIZERS, state=tmp_path / "state")
    assert python(CU_INIT, env=child).stdout == "0\n"
    whole = state.read_bytes()
    for content, is_completed in ((bytes(len(whole)), True), (bytes(len(whole) - 1), False), (bytes(len(whole) + 1), False)):
        state.write_bytes(content)
        if is_completed:
            assert python(CU_INIT, env=child).stdout == "0\n"
            assert state.read_bytes()[:16] == whole[:16]
        else:
            assert refused(state, "it is another program's file")
            assert state.read_bytes() == content


def test_state_path_that_is_no_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("nothing")
    assert refused(tmp_path / "directory", "Is a directory")
    assert refused(tmp_path / "fifo", "it is not a regular file")
    assert refused(tmp_path / "link", "it is a symbolic link")
    assert refused(tmp_path / "dangling", "it is a symbolic link")
    assert refused(tmp_path / "nowhere/state", "No such file or directory")
    assert (tmp_path / "target").read_bytes() == b""
    assert not (tmp_path / "nothing").exists()


def test_state_of_another_machine_is_rejected(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert python(CU_INIT, env=environment(2, memory="1GiB", state=state, base=SANITIZERS)).stdout == "0\n"
    content = state.read_bytes()
    reason = "it belongs to a machine with other GPUs, MIG instances or memory sizes"
    for machine in ({"gpus": 1, "memory": "1GiB"}, {"gpus": 2, "memory": "2GiB"}, {"gpus": 2, "memory": "1GiB", "mig": 2}):
        assert refused(state, reason, **machine)
    assert state.read_bytes() == content
    assert python(CU_INIT, env=environment(2, memory="1GiB", name="Other", state=state, base=SANITIZERS)).stdout == "0\n"


def test_state_of_another_version_is_rejected(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert python(CU_INIT, env=environment(state=state, base=SANITIZERS)).stdout == "0\n"
    content = bytearray(state.read_bytes())
    content[8] += 1
    state.write_bytes(content)
    assert refused(state, "it is from another version of accelerator")
    assert state.read_bytes() == content


@pytest.mark.parametrize("size", ["64k", "8k"])
def test_full_file_system_is_an_error(tmp_path: Path, size: str) -> None:
    state = tmp_path / "state"
    child = {**environment(base=SANITIZERS), "ACCELERATOR_SIM_STATE": str(state)}
    shell = f'mount -t tmpfs -o size={size} tmpfs {tmp_path} && "$@" && "$@" && stat -c %s {state}'
    name_space = ["unshare", "--mount", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*name_space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs name spaces of its own to be allowed")
    command = [*name_space, "sh", "-c", shell, "sh", sys.executable, "-c", CU_INIT]
    done = subprocess.run(command, env=child, capture_output=True, text=True, check=False, timeout=DEADLINE)
    reason = f"accelerator: the state of the simulated machine cannot be kept in {state}: No space left on device\n"
    # The second process finds an empty file, not a damaged one.
    assert (done.stdout, done.stderr) == (2 * OPERATING_SYSTEM_ERROR + "0\n", 2 * reason)


def test_unusable_state_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("a letter")
    program = """
        import pynvml as n
        n.nvmlInit()
        for _ in range(3):
            n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))
    """
    child = {**simulated_environment(), "ACCELERATOR_SIM_STATE": str(tmp_path / "letter")}
    done = python(textwrap.dedent(program), env=child)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)


def test_concurrently_started_processes_share_one_state(tmp_path: Path) -> None:
    program = PRELUDE + f"kept = allocate({64 * MIB}); report(1); sys.stdout.flush(); sys.stdin.read()"
    child = simulated_environment(state=tmp_path / "state")
    command = [sys.executable, "-c", program]
    users = [subprocess.Popen(command, env=child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    try:
        for user in users:
            assert user.stdout is not None
            assert user.stdout.readline() == "1\n"
        assert run(f"n.nvmlInit(); report({USED})", child) == [6 * 64 * MIB]
    finally:
        for user in users:
            user.communicate("")


def test_a_signal_does_not_end_the_wait_for_another_process_that_creates_the_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = """
        import ctypes, signal
        signal.signal(signal.SIGALRM, lambda *_: None)  # without SA_RESTART
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        driver = ctypes.CDLL("libcuda.so.1")
        print("calls", flush=True)
        print(driver.cuInit(0), flush=True)
    """
    child = {**environment(base=SANITIZERS), "ACCELERATOR_SIM_STATE": str(state)}
    with open(state, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", textwrap.dedent(program)]
        with subprocess.Popen(command, env=child, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            assert process.stdout
            assert process.stdout.readline() == "calls\n"
            returned, _, _ = select.select([process.stdout], [], [], 0.3)
            fcntl.flock(file, fcntl.LOCK_UN)
            assert process.stdout.read() == "0\n"
    assert not returned


def test_replaced_library_path_is_reported() -> None:
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
    assert replaced.stderr.startswith(
        "accelerator: the simulated driver was not found, because something has replaced LD_LIBRARY_PATH"
    )
    assert replaced.stderr.count("\n") == 1
    absent = python(program, env=environment(driver="absent"))
    assert (absent.stdout, absent.stderr) == ("35\n", "")
