"""What faults do to the process that uses the GPU, to its other GPUs, to other processes, and what ends them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accelerator.simulation._outside import machine_faults
from accelerator.simulation._settings import fault_words
from accelerator.simulation._settings.fault_words import XIDS
from tests import support
from tests.support import simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import LOST_GPU, needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch]

CLEARED_WHILE_FIRING = Path(__file__).with_name("cleared_while_firing.c")
PRELUDE = """
import torch
import os, sys, time
from accelerator import simulation

def error(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as raised:
        name = "AcceleratorError" if hasattr(torch, "AcceleratorError") else "RuntimeError"
        assert type(raised).__name__ == name, type(raised)
        return str(raised).splitlines()[0].removeprefix("CUDA error: ")
    return None

def synchronize(gpu):
    torch.cuda.synchronize(gpu)

x, y = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
"""
TEXTS = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    700: "an illegal memory access was encountered",
    719: "unspecified launch failure",
    999: "unknown error",
}


def run(program: str, *, variables: dict[str, str] | None = None, **machine: Any) -> subprocess.CompletedProcess[str]:
    """Run a program on a machine with two GPUs."""
    return support.python(PRELUDE + program, simulated_environment(variables, gpus=2, **machine))


def output(program: str, *, variables: dict[str, str] | None = None, **machine: Any) -> list[str]:
    done = run(program, variables=variables, **machine)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


ERRORS = [number for number, xid in XIDS.items() if xid.kind == "error"]


@pytest.mark.parametrize("number", [*ERRORS, 79])
def test_an_error_is_asynchronous_and_stays_and_other_gpus_go_on(number: int) -> None:
    program = """
for _ in range(5):  # the sixth op is the last one that begins
    y.add_(1)
print(error(y.add_, 1), error(y.add_, 1), sep="|")
print(error(synchronize, 1), error(y.cpu), error(torch.cuda.mem_get_info, 1), sep="|")
print(error(lambda: torch.ones(2**20, device="cuda:1")), sep="|")
print((x + 1).sum().item(), error(synchronize, 0), sep="|")
"""
    done = run(program, faults=[f"xid={number},gpu=1,after_ops=6"])
    text = TEXTS[XIDS[number].error]
    assert done.stdout.splitlines() == [f"None|{text}", f"{text}|{text}|{text}", text, "8.0|None"], done.stderr
    line = rf"NVRM: Xid \(PCI:0000:02:00\): {number}, pid=\d+, name=\S+, {re.escape(XIDS[number].text)}"
    assert len(re.findall(line, done.stderr)) == 1, done.stderr


def test_launch_blocking_raises_at_the_op() -> None:
    program = "y.add_(1)\nprint(error(y.add_, 1))"
    faults = ["xid=94,gpu=1,after_ops=2"]
    assert output(program, faults=faults, variables={"CUDA_LAUNCH_BLOCKING": "1"}) == [TEXTS[214]]
    assert output(program, faults=faults) == ["None"]


@pytest.mark.parametrize("number", [63, 64, 92])
def test_a_note_disturbs_nobody(number: int) -> None:
    done = run("print(error(synchronize, 1), (y + 1).sum().item())", faults=[f"xid={number},gpu=1"])
    assert done.stdout == "None 8.0\n"
    assert done.stderr == f"NVRM: Xid (PCI:0000:02:00): {number}, {XIDS[number].text}\n"


def test_events_of_a_broken_gpu_raise_in_any_thread() -> None:
    program = """
import threading
event = torch.cuda.Event()
event.record(torch.cuda.current_stream(1))
results = [error(event.query), error(event.synchronize)]
simulation.inject_fault("xid=31,gpu=1")
thread = threading.Thread(target=lambda: results.extend((error(event.query), error(event.synchronize))))
thread.start()
thread.join()
print(*results, sep="|")
"""
    assert output(program) == [f"None|None|{TEXTS[700]}|{TEXTS[700]}"]


def test_a_captured_graph_does_not_hide_an_error() -> None:
    program = """
with torch.cuda.device(1):
    y.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(1)
    simulation.inject_fault("xid=94,gpu=1,after_launches=2")
    print([error(graph.replay) for _ in range(4)])
"""
    assert output(program) == [f"[None, None, '{TEXTS[214]}', '{TEXTS[214]}']"]


# ---- When a fault fires. ----


@pytest.mark.parametrize(
    "function", ["cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel"]
)
def test_launches_of_every_function_are_counted(function: str) -> None:
    program = f"""
import ctypes
from tests.support.simulation_driver import loaded_runtime
simulation.inject_fault("xid=94,gpu=0,after_launches=2")
library = ctypes.CDLL("libcuda.so.1") if {function.startswith("cuL")} else loaded_runtime()
nothing = [ctypes.c_void_p()] * 12  # which every function refuses
read = loaded_runtime().cudaGetLastError
print([library.{function}(*nothing) and (read(), error(x.add_, 1))[1] for _ in range(4)])
"""
    assert output(program) == [f"[None, None, '{TEXTS[214]}', '{TEXTS[214]}']"]


def firing_op(condition: str) -> int:
    """Return after how many ops a fault was seen."""
    program = """
for op in range(1, 400):
    if error(y.add_, 1):
        print(op)
        break
else:
    print(-1)
"""
    return int(output(program, faults=[f"xid=94,gpu=1,{condition}"])[0])


def test_ops_are_counted_from_the_first_and_with_and_without_the_engine() -> None:
    # The first op of the GPU fills y; the first call of an op runs in Python.
    assert [firing_op(f"after_ops={count}") for count in (1, 2, 100)] == [2, 3, 101]


def test_a_probability_is_a_function_of_its_seed() -> None:
    found = [firing_op(f"probability=0.02,seed={seed}") for seed in (1, 1, 2, 3)]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert all(0 < each < 400 for each in found)


def test_seconds_are_counted_from_the_start_of_the_machine() -> None:
    program = """
begin = time.monotonic()
while not error(synchronize, 1):
    time.sleep(0.01)
print(time.monotonic() - begin)
"""
    assert 0.2 < float(output(program, faults=["xid=94,gpu=1,after_seconds=1"])[0]) < 30


def test_a_fault_of_a_rank_hits_its_gpu() -> None:
    program = "print(error(synchronize, 0), error(synchronize, 1), sep='|')\ny.add_(1)\nprint(error(synchronize, 1))"
    faults = ["xid=94,rank=3,after_ops=2"]
    assert output(program, faults=faults, variables={"RANK": "3"}) == ["None|None", TEXTS[214]]
    assert output(program, faults=faults, variables={"RANK": "2"}) == ["None|None", "None"]


def test_a_fault_of_a_rank_hangs_only_the_gpu_that_it_hits() -> None:
    program = """
y.add_(1)
x.add_(1)
print(*(torch.cuda.current_stream(gpu).query() for gpu in range(2)))
os._exit(0)
"""
    assert output(program, faults=["hang,rank=3,after_ops=2"], variables={"RANK": "3"}) == ["True False"]


# ---- Hangs, slow GPUs and flipped bits. ----


def test_a_slow_gpu_takes_longer_on_its_stream_and_not_on_the_host() -> None:
    program = """
def measured(gpu):
    with torch.cuda.device(gpu):
        tensor = (x, y)[gpu]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.monotonic()
        for _ in range(20):
            tensor.add_(1)
        host = time.monotonic() - begin
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host
measured(0), measured(1)
with torch.cuda.device(1):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(1).mul_(2)
    simulation.inject_fault("slow=50ms,gpu=1")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    replay = start.elapsed_time(end)
slow, host = measured(1)
print(1000 <= slow < 2500, host < 1, measured(0)[0] < 500, 100 <= replay < 700)
"""
    assert output(program) == ["True True True True"]


def test_a_hang_ends_when_its_time_is_over() -> None:
    program = """
event = torch.cuda.Event()
simulation.inject_fault("hang,gpu=1,for=0.5")
y.add_(1)
event.record(torch.cuda.current_stream(1))
begin = time.monotonic()
print(event.query(), torch.cuda.current_stream(1).query(), (x + 1).sum().item())
synchronize(1)
print(0.3 < time.monotonic() - begin < 20, event.query(), y.sum().item())
"""
    assert output(program) == ["False False 8.0", "True True 8.0"]


def test_a_hang_ends_in_time_whenever_the_host_looks() -> None:
    program = """
torch.cuda.set_device(1)
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin = time.monotonic()
start.record()
simulation.inject_fault("hang,gpu=1,for=0.2")
y.add_(1)
end.record()
called = time.monotonic() - begin
time.sleep(called + 1)
synchronize(1)
print(200 <= start.elapsed_time(end) < 1000 * called + 700)
"""
    assert output(program) == ["True"]


@pytest.mark.parametrize(
    "faults",
    [("hang,gpu=1,for=0.4", "hang,gpu=1,for=0.05"), ("slow=150ms,gpu=1", "slow=250ms,gpu=1")],
    ids=["the longest hang counts", "delays add up"],
)
def test_two_faults_at_once(faults: tuple[str, str]) -> None:
    program = f"""
begin = time.monotonic()
for fault in {faults}:
    simulation.inject_fault(fault)
y.add_(1)
synchronize(1)
print(0.35 < time.monotonic() - begin < 20)
"""
    assert output(program) == ["True"]


def test_another_gpu_waits_for_the_one_that_hangs() -> None:
    program = """
simulation.inject_fault("hang,gpu=0,for=0.6")
begin = time.monotonic()
x.add_(1)
copy = x.to("cuda:1", non_blocking=True)
other = y + 1
print(torch.cuda.current_stream(1).query(), copy.sum().item(), 0.5 < time.monotonic() - begin < 20, other.sum().item())
simulation.inject_fault("hang,gpu=0")
x.add_(1)
copy = x.to("cuda:1", non_blocking=True)
print(torch.cuda.current_stream(1).query(), flush=True)
os._exit(0)
"""
    assert output(program) == ["False 8.0 True 8.0", "False"]


@pytest.mark.parametrize("number", support.sample([109, 119], 119))
def test_a_hang_that_the_driver_notices_is_an_error(number: int) -> None:
    program = f"""
simulation.inject_fault("xid={number},gpu=1,for=0.3")
y.add_(1)
print(error(synchronize, 1), error(y.add_, 1), (x + 1).sum().item(), sep="|")
"""
    done = run(program)
    text = TEXTS[XIDS[number].error]
    assert done.stdout == f"{text}|{text}|8.0\n", done.stderr
    assert f"): {number}, pid=" in done.stderr


def test_a_process_that_begins_while_a_gpu_hangs_has_the_error_too(tmp_path: Path) -> None:
    program = """
import torch
import os
from accelerator import simulation
hangs, begins, ends = os.pipe(), os.pipe(), os.pipe()
def use():
    return torch.ones(4, device="cuda:1").add_(1)
def tell(name):
    try:
        torch.cuda.synchronize(1)
        print(name, None, flush=True)
    except RuntimeError as error:
        print(name, str(error).splitlines()[0], flush=True)
if os.fork() == 0:
    os.read(hangs[0], 1)
    try:
        use()
    except RuntimeError:
        pass  # on a slow machine the hang is over
    os.write(begins[1], b"-")
    os.read(ends[0], 1)
    tell("new")
    os._exit(0)
y = use()
torch.cuda.synchronize(1)
simulation.inject_fault("xid=119,gpu=1,for=0.7")
y.add_(1)
os.write(hangs[1], b"-")
os.read(begins[0], 1)
tell("old")
os.write(ends[1], b"-")
os.wait()
"""
    done = support.python(program, simulated_environment(gpus=2, state=tmp_path / "state"))
    text = f"CUDA error: {TEXTS[XIDS[119].error]}"
    assert done.stdout.splitlines() == [f"old {text}", f"new {text}"], done.stderr


def test_a_flipped_bit_is_one_bit_of_one_element_of_floating_point() -> None:
    # 2.0 is 0x40000000; its bit 22 is the first of the fraction.
    flipped = [3.0, 2.0, 2.0, 2.0]
    for program, expected in (
        ("y.add_(1)\nprint([y.tolist(), (y - y).tolist(), (x + 1).tolist()])", [flipped, [0.0] * 4, [2.0] * 4]),
        ("print([torch.arange(3, device='cuda:1').tolist(), (y * 2).tolist()])", [[0, 1, 2], flipped]),
    ):
        assert output(program, faults=["flip=22,gpu=1,after_ops=1"]) == [str(expected)]


def test_the_first_copy_of_a_process_is_flipped_as_later_ones_are() -> None:
    """The first call of an op is Python's. Later ones are the engine's, unless a collective is pending."""
    program = """
for _ in range(2):
    simulation.inject_fault("flip=22,gpu=1")
    z = torch.empty(4, device="cuda:1")
    z.copy_(y)
    print(z.tolist(), (y - y).tolist())
"""
    assert output(program) == [f"{[1.5, 1.0, 1.0, 1.0]} {[0.0] * 4}"] * 2


def test_kill_ends_the_process() -> None:
    done = run("y.add_(1)\nprint('gone on')", faults=["kill,after_ops=2"])
    assert (done.returncode, done.stdout) == (-9, "")


# ---- Other processes, and what ends a fault. ----


def start(program: str, state: Path, *, faults: Any = None) -> subprocess.Popen[str]:
    """Start a program that writes a line when it has begun, on a machine that has a state."""
    environment = simulated_environment(gpus=2, state=state, faults=faults)
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program],
        env=environment,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n", process.communicate()
    return process


def fault(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m accelerator fault`` outside of the machine."""
    command = [sys.executable, "-m", "accelerator", "fault", "--state", str(state), *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


FIRST_OP = """
import torch
try:
    print((torch.ones(4, device="cuda:1") + 1).sum().item())
except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
    print(str(error).splitlines()[0])
"""


def first_op(state: Path) -> str:
    """Return what the first op on GPU 1 of a new process prints."""
    done = support.python(FIRST_OP, simulated_environment(gpus=2, state=state))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix("CUDA error: ")


WAITS = "print('begun', flush=True)\nsys.stdin.readline()\nprint(error(y.add_, 1), error(synchronize, 1), sep='|')\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "other", "new", "after_reset", "after_clear"),
    [
        (94, "None", "8.0", "8.0", "8.0"),
        (74, TEXTS[220], "8.0", "8.0", "8.0"),
        (48, TEXTS[214], TEXTS[214], "8.0", "8.0"),
        (95, TEXTS[214], TEXTS[214], "8.0", "8.0"),
        (79, TEXTS[999], LOST_GPU, LOST_GPU, "8.0"),
    ],
)
def test_other_and_new_processes(tmp_path: Path, number: int, other: str, new: str, after_reset: str, after_clear: str) -> None:
    state = tmp_path / "state"
    with start(WAITS, state) as victim, start(WAITS, state) as neighbour:
        fault(state, f"xid={number}", "gpu=1")
        # Whoever uses the GPU next fires the fault. An error of one process is this one's.
        first = victim.communicate("\n", timeout=60)
        second = neighbour.communicate("\n", timeout=60)
        text = TEXTS[XIDS[number].error]
        assert first[0] == f"None|{text}\n", first
        assert second[0] in (f"{other}|{other}\n", f"None|{other}\n"), second
    assert new in first_op(state)
    if number == 79:
        with pytest.raises(RuntimeError, match="GPU 1 is lost, and a reset does not bring it back; clear does"):
            machine_faults.end(state, 1, is_reset=True)
    fault(state, "reset", *(["gpu=1"] if number != 79 else []))
    assert after_reset in first_op(state)
    fault(state, "clear", "gpu=1")
    assert after_clear in first_op(state)


def test_a_reset_breaks_the_contexts_of_its_gpu_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = f"""
from pathlib import Path
from accelerator.simulation._outside import machine_faults
machine_faults.end(Path({str(state)!r}), 1, is_reset=True)
print(error(synchronize, 1), error(synchronize, 0), sep="|")
"""
    assert output(program, state=state) == [f"{TEXTS[999]}|None"]


@pytest.mark.slow
def test_clear_lets_a_hung_gpu_go_on_and_reset_breaks_its_users(tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = """
print("begun", flush=True)
sys.stdin.readline()
event = torch.cuda.Event()
y.add_(1)
event.record(torch.cuda.current_stream(1))
print(event.query(), flush=True)
synchronize(1)
print(event.query(), torch.cuda.current_stream(1).query(), y.sum().item(), flush=True)
sys.stdin.readline()
print(error(y.add_, 1), error(synchronize, 0), sep="|", flush=True)
"""
    with start(program, state) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        fault(state, "hang", "gpu=1")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "False\n"
        time.sleep(0.2)
        assert process.poll() is None
        fault(state, "clear", "gpu=1")
        assert process.stdout.readline() == "True True 8.0\n"
        fault(state, "reset", "gpu=1")
        assert process.communicate("\n", timeout=60) == (f"{TEXTS[999]}|None\n", "")


def test_clear_ends_a_hang_before_its_time_and_events_show_it(tmp_path: Path) -> None:
    program = """
import subprocess
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record(torch.cuda.current_stream(1))
simulation.inject_fault("hang,gpu=1,for=600")
y.add_(1)
end.record(torch.cuda.current_stream(1))
print(end.query(), flush=True)
clear = subprocess.Popen([sys.executable, "-m", "accelerator", "fault", "clear", "gpu=1"], stdout=subprocess.DEVNULL)
synchronize(1)
print(clear.wait(), 0 < begin.elapsed_time(end) < 60_000, y.sum().item())
"""
    assert output(program, state=tmp_path / "state") == ["False", "0 True 8.0"]


def test_clear_of_a_gpu_leaves_the_faults_of_ranks_that_wait(tmp_path: Path) -> None:
    state = tmp_path / "state"
    output(
        "print()", state=state, faults=["xid=94,rank=3", "kill,rank=3", "hang,gpu=0,after_ops=500", "hang,gpu=1,after_ops=500"]
    )
    machine_faults.end(state, 0, is_reset=False)
    waits = [line.partition(": ")[0] for line in machine_faults.describe(state).splitlines() if ": waits" in line]
    assert waits == ["xid=94,rank=3", "kill,rank=3", "hang,gpu=1,after_ops=500"]


def test_gpus_and_nodes_must_exist(tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = """
for fault in ("hang,node=1", "xid=7", "hang,gpu=2"):
    try:
        simulation.inject_fault(fault)
    except ValueError as raised:
        print(raised)
"""
    of_node, of_number, of_gpu = output(program, state=state)
    assert of_node == "fault 'hang,node=1': this process is on node 0"
    assert of_number.startswith("fault 'xid=7': Xid 7 is not simulated")
    assert of_gpu == "fault 'hang,gpu=2': there are 2 GPUs, numbered from 0"
    for number in (2, 200):
        with pytest.raises(RuntimeError, match="the machine has no such GPU"):
            machine_faults.add(state, fault_words.parse(f"hang,gpu={number}"))
        with pytest.raises(RuntimeError, match="the machine has no such GPU"):
            machine_faults.end(state, number, is_reset=False)


def test_a_machine_of_one_process_names_a_fault_that_never_fired() -> None:
    program = "import ctypes; assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0"
    child = simulated_environment(gpus=2, faults=["hang,gpu=1,after_ops=50"])
    done = subprocess.run([sys.executable, "-c", program], env=child, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "accelerator: the fault hang,gpu=1,after_ops=50 never fired, after 0 ops\n"


def test_status_says_what_faults_did(tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = "y.add_(1)\ny.add_(1)\nprint(error(y.add_, 1))"
    faults = ["xid=95,gpu=1,after_ops=2", "hang,gpu=0,after_ops=50"]
    assert output(program, state=state, faults=faults) == [TEXTS[214]]
    lines = machine_faults.describe(state).splitlines()
    assert re.fullmatch(r"xid=95,gpu=1,after_ops=2: active, fired at \d\d:\d\d:\d\d on GPU 1 in process \d+", lines[0])
    assert lines[1:] == [
        "hang,gpu=0,after_ops=50: waits, after 1 ops",
        "GPU 1: 1 uncorrectable and 0 corrected ECC errors, 1 remapped rows (pending); to do: reset the GPU",
    ]
    machine_faults.end(state, 1, is_reset=True)
    lines = machine_faults.describe(state).splitlines()
    assert ": cleared, fired at" in lines[0]
    assert lines[2] == "GPU 1: 1 uncorrectable and 0 corrected ECC errors, 1 remapped rows; to do: none"
    fields = "ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total"
    smi = ["nvidia-smi", "-i", "1", f"--query-gpu={fields}", "--format=csv,noheader"]
    assert subprocess.check_output(smi, env=simulated_environment(gpus=2, state=state), text=True, timeout=60) == "0, 1\n"


def test_the_table_takes_new_faults_for_old_ones(tmp_path: Path) -> None:
    state = tmp_path / "state"
    output("print()", state=state, faults=["hang,gpu=0,after_ops=500"] * 63)
    machine_faults.add(state, fault_words.parse("hang,gpu=1,after_ops=500"))
    with pytest.raises(RuntimeError, match="the machine has no place for more faults"):
        machine_faults.add(state, fault_words.parse("hang"))
    machine_faults.end(state, 1, is_reset=False)
    machine_faults.add(state, fault_words.parse("flip=3,after_ops=9"))
    assert machine_faults.describe(state).splitlines()[63] == "flip=3,after_ops=9: waits, after 0 ops"


def test_a_fault_that_is_cleared_while_it_fires_does_not_stay(tmp_path: Path) -> None:
    program = compiled(CLEARED_WHILE_FIRING.read_text(), tmp_path / "cleared", "-rdynamic", "-pthread")
    child = simulated_environment(state=tmp_path / "state", faults=["xid=79,gpu=0"])
    text = subprocess.run([program], env=child, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"xid=79,gpu=0: cleared, fired at [0-9:]+ on GPU 0\n", text), text


def test_a_process_outside_keeps_no_mapping_of_a_machine(tmp_path: Path) -> None:
    state = tmp_path / "state"
    output("print()", state=state)
    for _ in range(3):
        machine_faults.add(state, fault_words.parse("xid=92,gpu=0"))
        machine_faults.end(state, 0, is_reset=False)
        machine_faults.describe(state)
        with pytest.raises(RuntimeError, match="the machine has no such GPU"):
            machine_faults.end(state, 5, is_reset=False)
    assert str(state) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_other_files_are_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(RuntimeError, match="No such file"):
        machine_faults.describe(file)
    file.write_text("no state")
    with pytest.raises(RuntimeError, match="it is not the state of a machine, or another version's"):
        machine_faults.describe(file)


@pytest.mark.parametrize("gpus", [0, 1], ids=["no machine", "no driver"])
def test_a_process_without_simulated_gpus_has_no_faults(gpus: int) -> None:
    program = """
        from accelerator import simulation
        try:
            simulation.inject_fault("xid=31")
        except RuntimeError as error:
            print(error)
    """
    machine = simulated_environment(gpus=1, driver="absent") if gpus else support.plain_environment()
    assert support.run(program, machine).startswith("this process has no simulated GPUs")
