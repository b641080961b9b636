"""``python -m accelerator rehearse``: what a program needs, on GPUs that compute nothing."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from accelerator._command import rehearse as _rehearse
from accelerator._command import rehearse_report
from accelerator.simulation._settings import known_gpus, rehearsal_record
from accelerator.simulation._settings.rehearsal_record import (
    CATEGORIES,
    Curve,
    DeviceRecord,
    MissingValue,
    OutOfMemory,
    Peak,
    ProcessRecord,
    Rank,
    Statistics,
)
from tests import support
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("rehearse")]

DEADLINE = 240
GIB = 2**30


def rehearse(*options: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerator", "rehearse", *options, "--", *command],
        cwd=support.ROOT,
        env=support.plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def figures(tmp_path: Path, code: str, *options: str, status: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Rehearse a program and return the entries of its JSON and its standard error."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code), encoding="utf-8")
    file = tmp_path / "figures.json"
    done = rehearse("--json", str(file), *options, command=[sys.executable, str(program)])
    assert done.returncode == status, done.stderr
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["schema"] == 1
    return document["ranks"], done.stderr


@pytest.mark.slow
def test_peaks_are_those_of_the_whole_run(tmp_path: Path) -> None:
    entries, text = figures(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader
        large = torch.empty(2**32, dtype=torch.uint8, device="cuda")
        list(DataLoader([0, 1], num_workers=1))
        on_host = b"x" * (3 * 2**29)
        del large, on_host
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        torch.empty(2**31, dtype=torch.uint8, device="cuda:1")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(1)
        torch.empty(2**30, dtype=torch.uint8, device="cuda:1")
        raise SystemExit(3)
        """,
        *("--gpus", "2", "--name", "h100"),
        status=3,
    )
    assert [(entry.pop("smallest_gpu"), entry.pop("peak")["held"]["other"]) for entry in entries] == [
        ("T4", 4 * GIB),
        ("T4", 2 * GIB),
    ]
    host = entries[0]["peak_host"]
    assert 3 * 2**29 < host < 2**32  # of the whole run, and none of the memory of the GPUs
    common = {"rank": 0, "total": 81089 * 2**20, "retries": 0, "fits": True, "out_of_memory": None, "exit_status": 3}
    common["peak_host"] = host
    assert entries == [
        {**common, "device": 0, "peak_allocated": 4 * GIB, "peak_reserved": 4 * GIB},
        {**common, "device": 1, "peak_allocated": 2 * GIB, "peak_reserved": 2 * GIB},
    ]
    size = rehearse_report.format_size(host)
    assert text.splitlines()[-4:] == [
        "rank  device  peak allocated  peak reserved         of  peak host  retries  fits",
        f"   0  cuda:0        4.00 GiB       4.00 GiB  79.19 GiB   {size}        0   yes",
        f"   0  cuda:1        2.00 GiB       2.00 GiB  79.19 GiB   {size}        0   yes",
        "rank 0 ended with status 3: its figures are those until then",
    ]


@pytest.mark.slow
def test_out_of_memory_names_op_and_line_even_if_it_is_caught(tmp_path: Path) -> None:
    picture, folder = tmp_path / "memory.svg", tmp_path / "new" / "snapshots"
    entries, text = figures(
        tmp_path,
        """
        import torch
        def product(x):
            return x @ x
        x = torch.empty(16384, 16384, device="cuda")
        kept = []
        try:
            while True:
                kept.append(product(x))
        except torch.OutOfMemoryError:
            pass
        """,
        *("--plot", str(picture), "--snapshot", str(folder)),
    )
    [entry] = entries
    assert (entry["fits"], entry["retries"], entry["exit_status"]) == (False, 2, 0)
    assert 62 * GIB < entry["peak_reserved"] <= 64 * GIB  # the loop ends at eight times the memory of the GPU
    failure = entry["out_of_memory"]
    assert failure["requested"] == GIB
    assert 0 < failure["free"] < GIB
    assert failure["op"] == "aten::mm"
    assert failure["where"].endswith("program.py:4 in product")
    assert "is out of memory: aten::mm at " in text
    assert "asked for 1.00 GiB" in text
    assert "it went on and needs more than 63." in text
    assert "the GPU: 8.0 GiB" in "".join(ElementTree.fromstring(picture.read_text(encoding="utf-8")).itertext())
    with open(folder / "rank0.pickle", "rb") as stream:
        assert any(event["action"] == "oom" for event in pickle.load(stream)["device_traces"][0])


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_a_program_that_does_not_fit_goes_on_and_its_peak_is_explained(
    allocator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    entries, text = figures(
        tmp_path,
        """
        import torch
        cached = torch.empty(2**31, dtype=torch.uint8, device="cuda")
        del cached  # which the allocator frees for what follows: this is no lack of memory
        layers = [torch.nn.Linear(16384, 16384, bias=False, device="cuda") for _ in range(7)]
        model, target = torch.nn.Sequential(*layers), torch.empty(2**28, dtype=torch.uint8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.empty(4096, 16384, device="cuda")).sum().backward()
        optimizer.step()
        """,
    )
    [entry] = entries
    peak, gib = entry["peak"], 2.0**30
    assert (entry["fits"], entry["exit_status"]) == (False, 0)
    assert entry["smallest_gpu"] == known_gpus.smallest(entry["peak_reserved"])
    assert entry["peak_allocated"] * 0.97 < peak["allocated"] <= entry["peak_allocated"] <= entry["peak_reserved"]
    held = {name: size / gib for name, size in peak["held"].items()}
    workspaces = pytest.approx(0.05, abs=0.05)  # of cuBLAS, on two streams
    assert held == {"parameters": 7, "gradients": 7, "optimizer state": 7, "activations": workspaces, "other": 0.25}
    lines = {line["where"].rpartition("/")[2].partition(" in ")[0]: line["bytes"] / gib for line in peak["lines"]}
    assert (lines["program.py:9"], lines["program.py:5"], lines["program.py:6"]) == (7, 7, 0.25)
    assert lines["a backward"] == pytest.approx(7.05, abs=0.05)
    assert entry["out_of_memory"]["where"].rpartition("/")[2] == "program.py:8 in <module>"
    assert "  it went on and needs 2" in text


@pytest.mark.slow
def test_out_of_memory_is_remembered_when_the_program_resets_its_statistics(tmp_path: Path) -> None:
    entries, _ = figures(
        tmp_path,
        """
        import torch
        try:
            torch.empty(2**34, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.reset_peak_memory_stats()
        torch.ones(1, device="cuda")
        """,
    )
    assert (entries[0]["fits"], entries[0]["retries"]) == (False, 1)


@pytest.mark.slow
def test_out_of_memory_in_a_backward_names_the_line_that_calls_it(tmp_path: Path) -> None:
    entries, _ = figures(
        tmp_path,
        """
        import torch
        x = torch.empty(2**29, device="cuda", requires_grad=True)
        y = (x * 2).exp()
        del y
        y = x.sigmoid()
        z = torch.empty(2**28, device="cuda")
        y.backward(torch.empty_like(y))
        """,
    )
    [entry] = entries
    assert entry["exit_status"] == 0
    assert not entry["fits"]
    assert entry["out_of_memory"]["where"].partition(" in ")[0].endswith(("program.py:8", "program.py:7"))


WORLD = """
import os
import torch
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"]) - 1
x = torch.empty((1 + dist.get_rank()) * 2**28, dtype=torch.uint8, device="cuda")
dist.all_reduce(x[:2**28])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(5,), (5, 0)])
def test_ranks_of_a_world_run_alone(ranks: tuple[int, ...], tmp_path: Path) -> None:
    files = ("--plot", str(tmp_path / "memory.svg"), "--snapshot", str(tmp_path / "snapshots")) if len(ranks) > 1 else ()
    entries, _ = figures(tmp_path, WORLD, "--gpus", "4", "--world-size", "6", "--rank", ",".join(map(str, ranks)), *files)
    expected = [(rank, rank % 4, rank + 1) for rank in ranks]
    assert [(entry["rank"], entry["device"], entry["peak_allocated"] // 2**28) for entry in entries] == expected
    if files:
        names = {f"memory-rank{rank}.svg": f"Memory of rank {rank}, cuda:{rank % 4}" for rank in ranks}
        assert {each.name for each in tmp_path.glob("*.svg")} == {*names}
        assert all(title in (tmp_path / name).read_text(encoding="utf-8") for name, title in names.items())
        assert {each.name for each in (tmp_path / "snapshots").iterdir()} == {f"rank{rank}.pickle" for rank in ranks}


@pytest.mark.parametrize(
    ("gpus", "world", "rank", "local", "locals_", "node"),
    [(4, 6, 5, 1, 4, 1), (4, 6, 3, 3, 4, 0), (8, 2, 1, 1, 2, 0), (2, 2, 1, 1, 2, 0), (1, 3, 2, 0, 1, 2)],
)
def test_variables_are_those_of_torchrun(gpus: int, world: int, rank: int, local: int, locals_: int, node: int) -> None:
    """A node has as many ranks as GPUs, but no more than the world has."""
    variables = _rehearse._world(argparse.Namespace(gpus=gpus, world_size=world), rank)
    assert variables == {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(locals_),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def test_variables_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a rank replace what its parent has. Without --world-size the parent's stay."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    names = ("RANK", "WORLD_SIZE", "ACCELERATOR_SIM_GPUS", "ACCELERATOR_SIM_WITHOUT_PEERS", "ACCELERATOR_SIM_PLOT")
    command = ["sh", "-c", "echo " + " ".join(f"${{{name}:-none}}" for name in names)]
    machine = "--name", "X1", "--memory", "1GiB", "--capability", "8.0"  # which says all that the name does not
    done = rehearse("--world-size", "2", *machine, command=command)
    assert (done.stdout, done.stderr.count("\n")) == ("0 2 1 1 none\n", 1)
    assert rehearse(command=command).stdout == "7 9 1 none none\n"


@pytest.mark.slow
def test_world_that_nobody_starts_names_torchrun(tmp_path: Path) -> None:
    _, text = figures(tmp_path, 'import torch.distributed as dist\ndist.init_process_group("nccl")', status=1)
    assert "RANK expected, but not set; start the ranks with torchrun, or rehearse one with --world-size and --rank" in text


@pytest.mark.slow
def test_ranks_of_torchrun_are_all_reported(tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "figures.json"
    program.write_text(WORLD, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = rehearse("--gpus", "2", "--json", str(file), command=launcher)
    assert done.returncode == 0, done.stderr
    entries = json.loads(file.read_text(encoding="utf-8"))["ranks"]
    assert [(entry["rank"], entry["device"]) for entry in entries] == [(0, 0), (1, 1)]


SPAWNED = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
def work(rank, world, folder):
    torch.cuda.set_device(rank % 2)
    if world == 2:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.empty((rank + 1) * 2**28, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_reserved() == (rank + 1) * 2**28
    if world == 2:
        objects = [None] * world
        dist.all_gather_object(objects, rank)
        assert objects == [0, 1]
        free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        assert free[0] - free[1] > 2**27, free  # of the memory that the other rank uses, too
        dist.barrier()
        if rank == 1 and "dies" in sys.argv:
            report = Path(os.environ["ACCELERATOR_SIM_REHEARSE"], f"{os.getpid()}.json")
            while str(2**29) not in report.read_text():
                time.sleep(0.1)
            os.kill(os.getpid(), 9)
if __name__ == "__main__":
    method, world, folder = sys.argv[1:4]
    torch.cuda.init()
    context = mp.start_processes(work, (int(world), folder), int(world), start_method=method)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "world", "dies"),
    [("spawn", 2, False), ("spawn", 2, True), ("forkserver", 2, False), ("forkserver", 1, False)],
)
def test_workers_that_a_program_starts_are_ranks(method: str, world: int, dies: bool, tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "figures.json"
    program.write_text(SPAWNED, encoding="utf-8")
    words = [method, str(world), str(tmp_path), *(["dies"] if dies else [])]
    done = rehearse("--gpus", "2", "--json", str(file), command=[sys.executable, str(program), *words])
    assert done.returncode == int(dies), done.stderr
    entries = json.loads(file.read_text(encoding="utf-8"))["ranks"]
    expected = [(rank, rank, rank + 1) for rank in range(world)]
    assert [(entry["rank"], entry["device"], entry["peak_reserved"] // 2**28) for entry in entries] == expected
    assert ("rank 1 was ended by a signal" in done.stderr) == dies
    assert entries[-1]["exit_status"] == (None if dies else 0)


def test_the_status_is_that_of_the_first_rank_that_fails() -> None:
    done = rehearse("--world-size", "4", "--rank", "0,2,1", command=["sh", "-c", "exit $RANK"])
    assert done.returncode == 2, done.stderr


@pytest.mark.slow
def test_each_process_has_its_exit_status(tmp_path: Path) -> None:
    entries, text = figures(
        tmp_path,
        """
        import os, signal, sys, time, torch
        from pathlib import Path
        def end(rank):
            if rank == 0:
                sys.exit(3)
            if rank == 1:
                raise SystemExit(4)
            if rank == 2:
                raise SystemExit("a message")
            if rank == 3:
                raise ValueError
            if rank == 4:
                os._exit(5)
            if rank == 5:
                report = Path(os.environ["ACCELERATOR_SIM_REHEARSE"], f"{os.getpid()}.json")
                while not report.exists() or "reserved" not in report.read_text():
                    time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 7:
                os._exit(-1)
        for rank in range(8):
            if os.fork() == 0:
                os.environ["RANK"] = str(rank)
                torch.ones(1, device="cuda")
                end(rank)
                break
            os.wait()
        """,
    )
    assert [(entry["rank"], entry["exit_status"]) for entry in entries] == [*enumerate([3, 4, 1, 1, 5, None, 0, 255])]
    assert "rank 4 ended with status 5: its figures are those until then" in text
    assert "rank 5 was ended by a signal: its figures may lack the last second" in text
    assert "rank 6 " not in text


# A program whose worker goes on until nobody reads its record any more, and then writes what it writes at its end.
OUTLIVED = """
import os, sys, time, torch
from pathlib import Path
if os.fork() == 0:
    errors = os.open({errors!r}, os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    torch.ones(1, device="cuda")
    Path({ready!r}).touch()
    while Path(os.environ["ACCELERATOR_SIM_REHEARSE"]).exists():
        time.sleep(0.01)
    sys.exit()
os.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_of_an_ended_rehearsal_print_no_errors(tmp_path: Path, number: signal.Signals) -> None:
    program, errors, ready = (tmp_path / name for name in ("program.py", "errors", "ready"))
    program.write_text(OUTLIVED.format(errors=str(errors), ready=str(ready)), encoding="utf-8")
    plot = "--plot", str(tmp_path / "memory.svg")
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerator", "rehearse", *plot, "--", sys.executable, program],
        cwd=support.ROOT,
        env=support.plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    until = time.monotonic() + DEADLINE
    while not ready.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert ready.exists()
    process.send_signal(number)
    process.communicate(timeout=DEADLINE)  # until the worker has ended, too
    assert errors.read_text() == ""


# A program that begins with this keeps what the plot is drawn from.
KEEP_CURVE = """
        import glob, shutil, torch
        from _accelerator_simulation._inside.rehearsal import history
        end = history.end
        def end_and_keep(folder):
            end(folder)
            [written] = glob.glob(folder + "/*.curve")
            shutil.copy(written, {})
        history.end = end_and_keep
"""


@pytest.mark.slow
def test_snapshot_and_plot(tmp_path: Path) -> None:
    picture, folder = tmp_path / "memory.svg", tmp_path / "snapshots"
    folder.mkdir()
    file = tmp_path / "curve.json"
    figures(
        tmp_path,
        KEEP_CURVE.format(repr(str(file)))
        + """
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.empty(8192, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        *("--plot", str(picture), "--snapshot", str(folder)),
    )
    text = "".join(ElementTree.fromstring(picture.read_text(encoding="utf-8")).itertext())
    for word in ("parameters", "gradients", "optimizer state", "activations", "reserved", "the GPU: 8.0 GiB"):
        assert word in text
    curve = json.loads(file.read_text(encoding="utf-8"))
    most = dict(zip(CATEGORIES, map(max, zip(*curve["points"], strict=True)), strict=False))
    weights = 4 * 2**26 + 4 * 2**14
    assert (most["parameters"], most["gradients"]) == (weights, weights)
    assert most["optimizer state"] >= 2 * weights
    assert most["activations"] >= 3 * 2**27  # what the first three layers return
    with open(folder / "rank0.pickle", "rb") as stream:
        assert any(event["action"] == "alloc" for event in pickle.load(stream)["device_traces"][0])


@pytest.mark.slow
def test_picture_and_table_agree_on_what_holds_the_peak(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    entries, _ = figures(
        tmp_path,
        KEEP_CURVE.format(repr(str(file)))
        + """
        class Sum(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})
            def step(self):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        self.state[parameter].setdefault("sum", torch.empty_like(parameter)).add_(parameter.grad)
        frozen = torch.nn.Linear(4096, 4096, bias=False).requires_grad_(False)
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(3)), frozen).cuda()
        optimizer = Sum(model[:3].parameters())
        for _ in range(2):
            model(torch.empty(2**12, 4096, device="cuda")).sum().backward()
            optimizer.step()
        result = model(torch.empty(2**15, 4096, device="cuda"))
        """,
        *("--plot", str(tmp_path / "memory.svg")),
    )
    points = [point[: len(CATEGORIES)] for point in json.loads(file.read_text(encoding="utf-8"))["points"]]
    held = entries[0]["peak"]["held"]
    assert dict(zip(CATEGORIES, max(points, key=sum), strict=True)) == held
    weights = 3 * 2**26
    assert (held["parameters"], held["gradients"], held["optimizer state"]) == (weights + 2**26, weights, weights)
    assert held["activations"] >= 2**31  # what the four layers return


@pytest.mark.slow
def test_plot_of_a_program_that_runs_out_of_memory_in_a_step(tmp_path: Path) -> None:
    picture, file = tmp_path / "memory.svg", tmp_path / "curve.json"
    figures(
        tmp_path,
        KEEP_CURVE.format(repr(str(file)))
        + """
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(24))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.empty(1024, 4096, device="cuda")).sum().backward()
        optimizer.step()
        """,
        *("--memory", "5GiB", "--plot", str(picture)),
    )
    curve = json.loads(file.read_text(encoding="utf-8"))
    held = dict(zip(CATEGORIES, curve["points"][-1], strict=False))
    assert held["parameters"] == held["gradients"] == 24 * 2**26
    assert held["optimizer state"] > GIB
    assert held["other"] < 2**28


@pytest.mark.slow
def test_progress_on_a_terminal(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # The program runs until the progress has shown its memory.
    program.write_text(
        "import os, time, torch\n"
        "x = torch.empty(2**30, dtype=torch.uint8, device='cuda')\n"
        "end = time.monotonic() + 60\n"
        f"while not os.path.exists({str(tmp_path / 'shown')!r}) and time.monotonic() < end:\n"
        "    time.sleep(0.1)\n",
        encoding="utf-8",
    )
    ours, theirs = os.openpty()
    options = ["--world-size", "2", "--rank", "1", "--gpus", "2"]
    command = [sys.executable, "-m", "accelerator", "rehearse", *options, "--", sys.executable, str(program)]
    process = subprocess.Popen(command, cwd=support.ROOT, env=support.plain_environment(), stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal's output
        while part := os.read(ours, 4096):
            text += part
            if b"rank 1: " in text and b" s, 1.00 GiB reserved so far" in text:
                (tmp_path / "shown").touch()
    os.close(ours)
    assert process.wait(DEADLINE) == 0
    assert (tmp_path / "shown").exists(), text
    assert b"\r\x1b[Krank  device" in text, "the table replaces the progress"


def test_command_that_cannot_be_started() -> None:
    done = rehearse(command=["no-such-command"])
    assert done.returncode == 127
    assert done.stderr.startswith("python -m accelerator rehearse: no-such-command: command not found\n")


@pytest.mark.slow
@pytest.mark.parametrize("is_mig", [False, True])
def test_machines_are_those_of_simulate(is_mig: bool, tmp_path: Path) -> None:
    """A process uses one MIG instance, whose memory it has."""
    options = ["--mig", "7"] if is_mig else ["--nvlink", "all", "--numa", "0", "--numa", "1"]
    entries, _ = figures(
        tmp_path,
        f"""
        import subprocess
        import torch
        import accelerator as acc
        torch.empty(1, device="cuda")
        assert torch.cuda.device_count() == {1 if is_mig else 2}
        assert [acc.numa_node(device) for device in range(torch.cuda.device_count())] == {[0] if is_mig else [0, 1]}
        topology = subprocess.check_output(["nvidia-smi", "topo", "-m"], text=True)
        assert ("NV1" in topology) is {not is_mig}
        """,
        *("--gpus", "1" if is_mig else "2", "--memory", "80GiB", *options),
    )
    [entry] = entries
    assert entry["total"] == (10 if is_mig else 80) * GIB


def test_program_without_cuda(tmp_path: Path) -> None:
    done = rehearse(command=["true"])
    assert (done.returncode, done.stderr) == (0, "rehearsal: no process initialized CUDA or a process group\n")


def test_command_that_does_not_start() -> None:
    done = rehearse(command=["no-such-command"])
    assert done.returncode == 127
    assert done.stderr.startswith("python -m accelerator rehearse: no-such-command: command not found\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "200"], "gpus must be between 0 and 120, not 200"),
        (["--rank", "1"], "--rank needs --world-size"),
        (["--world-size", "4", "--rank", "4"], "rank 4 is not in a world of 4"),
        (["--world-size", "4", "--rank", "x"], "--rank must be numbers separated by commas, not 'x'"),
        (["--world-size", "4", "--rank", "1,1"], "--rank names a rank twice: 1,1"),
        (["--name", "A100 80GB"], "no GPU named 'A100 80GB' is known: give --memory, or one of the names T4, "),
        (["--memory", "much"], "memory must be bytes or a size"),
    ],
)
def test_wrong_usage(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _rehearse.main([*options, "--", "true"]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"python -m accelerator rehearse: {message}")
    assert errors.count("\n") == 1


def test_exit_status_of_wrong_usage() -> None:
    done = rehearse("--memory", "much", command=["true"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m accelerator rehearse: memory must be bytes or a size")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "4", "--rank", "0,-1", "--", "true"], "rank -1 is not in a world of 4"),
        (["--world-size", "4", "--gpus", "0", "--", "true"], "a rank needs a GPU: --gpus must be at least 1"),
        (["--world-size", "0", "--", "true"], "argument --world-size: world_size must be between 1 and 2147483647, not 0"),
        ([], "no command: give one after --"),
        (["--gpus", "1", "--", ""], "no command: give one after --"),
    ],
)
def test_usage_that_is_refused_before_anything_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _rehearse.main(options) == 2
    assert capsys.readouterr() == ("", f"python -m accelerator rehearse: {message} (--help explains)\n")


def test_progress_receives_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is waited for by its signals, which another thread must not receive."""
    blocked: list[set[int]] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(_rehearse._Progress, "_show", lambda _: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with _rehearse._Progress(None, tmp_path):
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert blocked[0] >= {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def record(rank: int | None = 0, started: float = 0.0, reserved: int = GIB, ooms: int = 0) -> ProcessRecord:
    return ProcessRecord(rank, started, 5, [DeviceRecord(0, Statistics(reserved=reserved, ooms=ooms), GIB, None)], [])


def write(folder: Path, pid: int, written: ProcessRecord, status: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the record of a process, and its exit status if it is known."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    rehearsal_record.write_record(str(folder), written)
    if status is not None:
        Path(rehearsal_record.status_file(str(folder))).write_text(status, encoding="ascii")


def test_records_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = OutOfMemory(requested=5, free=3, op="aten::mm", where=None)
    peak = Peak("a.py:9 in f", 15, [1, 2, 3, 4, 5], [["a.py:9 in f", 14], ["a backward", 1]])
    devices = [DeviceRecord(0, Statistics(1, 2, 3, 4), GIB, failure, peak), DeviceRecord(2, Statistics(), 7, None)]
    written = record(3)._replace(devices=devices, values=[MissingValue("aten::nonzero", "a.py:8 in f", 2)])
    write(tmp_path, 1, written, None, monkeypatch)
    assert rehearsal_record.read_ranks(tmp_path) == [Rank(3, written, None, [], None)]
    write(tmp_path, 1, written, "", monkeypatch)  # the process is writing its status
    for device in (1, 0):
        rehearsal_record.write_curve(str(tmp_path), Curve(device, [[1, 2], [3, 4]]))
    curves = [Curve(device, [[1, 2], [3, 4]]) for device in (0, 1)]
    assert rehearsal_record.read_ranks(tmp_path) == [Rank(3, written, None, curves, None)]
    snapshot = Path(rehearsal_record.snapshot_file(str(tmp_path)))
    snapshot.touch()
    write(tmp_path, 1, written._replace(rank=None), "7", monkeypatch)
    assert rehearsal_record.read_ranks(tmp_path) == [Rank(0, written._replace(rank=None), 7, curves, snapshot)]


def test_curve_that_a_process_could_not_write_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any, file: Any) -> None:
        file.write('{"device": 0')
        file.flush()
        read.append(rehearsal_record.read_ranks(tmp_path))
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, 1, record(), None, monkeypatch)
    read: list[list[Rank]] = []
    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="No space"):
        rehearsal_record.write_curve(str(tmp_path), Curve(0, [[1, 2]]))
    read.append(rehearsal_record.read_ranks(tmp_path))
    assert read == [[Rank(0, record(), None, [], None)]] * 2


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        # A process without memory beside one of its rank compiles for it; rank 1 has one process, which uses none.
        ([record(0, reserved=0), record(0), record(1, reserved=0)], [(0, GIB, 2), (1, 0, 3)]),
        # The process that starts the others has no rank.
        ([record(None, 1, 0), record(1, 2), record(0, 3)], [(0, GIB, 3), (1, GIB, 2)]),
        # Nothing gives the processes ranks.
        ([record(None, 2, 30), record(None, 1, 20), record(1, 3, 10)], [(0, 20, 2), (1, 10, 3), (2, 30, 1)]),
        # A process tried to use memory.
        ([record(None, 2, 0, ooms=1), record(None, 1, 20)], [(0, 20, 2), (1, 0, 1)]),
        # Nobody uses memory. The command ends as its only rank does.
        ([record(None, reserved=0)], [(0, 0, 9)]),
    ],
)
def test_which_processes_are_ranks(
    records: list[ProcessRecord], expected: list[tuple[int, int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, written in enumerate(records, 1):
        write(tmp_path, pid, written, str(pid), monkeypatch)
    entries = rehearse_report.entries_of(rehearsal_record.read_ranks(tmp_path), 9)
    assert [(entry.rank, entry.peak_reserved, entry.exit_status) for entry in entries] == expected


def test_entries_have_the_figures_of_their_records() -> None:
    failure = OutOfMemory(requested=5, free=3, op="aten::mm", where="a.py:8 in f")
    peak = Peak("a.py:9 in f", 15, [1, 2, 3, 4, 5], [["a.py:9 in f", 15]])
    devices = [
        DeviceRecord(2, Statistics(11, 12, 13, 1), 14, None),
        DeviceRecord(0, Statistics(21, 22, 23, 0), 24, failure, peak),
        DeviceRecord(1, Statistics(31, 32, 33, 0), 34, None),
    ]
    records = [ProcessRecord(number, 0.0, host, devices, []) for number, host in ((0, 41), (1, 42))]
    ranks = [Rank(0, records[0], 3, [], None), Rank(1, records[1], None, [], None)]
    assert rehearse_report.entries_of(ranks, 9) == [
        rehearse_report.Entry(rank, device, allocated, reserved, total, host, retries, fits, reason, status, ran_out, held)
        for rank, host, status in ((0, 41, 3), (1, 42, None))
        for device, allocated, reserved, total, retries, fits, reason, ran_out, held in (
            (0, 21, 22, 24, 23, False, failure, False, peak),  # it went on
            (1, 31, 32, 34, 33, True, None, False, None),
            (2, 11, 12, 14, 13, False, None, True, None),
        )
    ]


def test_values_of_ranks_are_counted_together() -> None:
    first = [MissingValue("aten::item", "a.py:8 in f", 2), MissingValue("numpy", None, 1)]
    second = [MissingValue("aten::item", "a.py:9 in f", 3), MissingValue("aten::item", "a.py:8 in f", 5)]
    ranks = [Rank(0, record()._replace(values=values), 0, [], None) for values in (first, second)]
    assert rehearse_report.values_of(ranks) == [
        MissingValue("aten::item", "a.py:8 in f", 7),
        MissingValue("numpy", None, 1),
        MissingValue("aten::item", "a.py:9 in f", 3),
    ]


def test_table_word_by_word() -> None:
    fits = rehearse_report.Entry(0, 0, GIB, 3 * GIB // 2, 80 * GIB, GIB // 4, 0, True, None, 0)
    failure = OutOfMemory(2 * GIB, GIB // 4, "aten::mm", "a.py:8 in f")
    peak = Peak("a.py:9 in f", 100 * GIB, [60 * GIB, 0, 0, 40 * GIB, 0], [["a.py:9 in f", 99 * GIB], ["a backward", GIB]])
    fails = fits._replace(fits=False, out_of_memory=failure, peak=peak._replace(held=[0, 0, 0, 100 * GIB, 0], lines=[]))
    entries = [
        fits,
        fits._replace(rank=1, device=10, retries=12, fits=False, out_of_memory=failure, exit_status=1),
        fits._replace(rank=2, fits=False, out_of_memory=failure._replace(where=None), exit_status=0),
        fits._replace(rank=3, exit_status=7),
        fits._replace(rank=3, device=1, exit_status=7),
        fits._replace(rank=4, exit_status=None),
        fails._replace(rank=5, peak_allocated=100 * GIB, peak_reserved=120 * GIB, peak=peak),
        fits._replace(rank=6, peak_reserved=640 * GIB, fits=False, out_of_memory=failure, ran_out=True),
        fails._replace(rank=7, peak_allocated=105 * GIB, peak_reserved=300 * GIB),
        fits._replace(rank=8, peak_reserved=79 * GIB),
        fits._replace(rank=9, peak_reserved=79 * GIB + 1),
        fits._replace(rank=10, peak_reserved=15 * GIB // 16, total=GIB),
        fits._replace(rank=11, peak_reserved=15 * GIB // 16 + 1, total=GIB),
        fails._replace(rank=12, peak_allocated=100 * GIB, peak_reserved=100 * GIB, peak=peak._replace(where=None)),
    ]
    places = ("aten::item", "a.py:1 in f"), ("aten::nonzero", None), ("numpy", "b.py:2 in g"), ("aten::equal", "b.py:3 in g")
    values = [MissingValue(op, where, 5) for op, where in places]
    assert rehearse_report.format_table(entries, values).splitlines() == [
        "rank   device  peak allocated  peak reserved         of  peak host  retries  fits",
        "   0   cuda:0        1.00 GiB       1.50 GiB  80.00 GiB   0.25 GiB        0   yes",
        "   1  cuda:10        1.00 GiB       1.50 GiB  80.00 GiB   0.25 GiB       12    no",
        "   2   cuda:0        1.00 GiB       1.50 GiB  80.00 GiB   0.25 GiB        0    no",
        "   3   cuda:0        1.00 GiB       1.50 GiB  80.00 GiB   0.25 GiB        0   yes",
        "   3   cuda:1        1.00 GiB       1.50 GiB  80.00 GiB   0.25 GiB        0   yes",
        "   4   cuda:0        1.00 GiB       1.50 GiB  80.00 GiB   0.25 GiB        0   yes",
        "   5   cuda:0      100.00 GiB     120.00 GiB  80.00 GiB   0.25 GiB        0    no",
        "   6   cuda:0        1.00 GiB     640.00 GiB  80.00 GiB   0.25 GiB        0    no",
        "   7   cuda:0      105.00 GiB     300.00 GiB  80.00 GiB   0.25 GiB        0    no",
        "   8   cuda:0        1.00 GiB      79.00 GiB  80.00 GiB   0.25 GiB        0   yes",
        "   9   cuda:0        1.00 GiB      79.00 GiB  80.00 GiB   0.25 GiB        0   yes",
        "  10   cuda:0        1.00 GiB       0.94 GiB   1.00 GiB   0.25 GiB        0   yes",
        "  11   cuda:0        1.00 GiB       0.94 GiB   1.00 GiB   0.25 GiB        0   yes",
        "  12   cuda:0      100.00 GiB     100.00 GiB  80.00 GiB   0.25 GiB        0    no",
        "rank 1, cuda:10 is out of memory: aten::mm at a.py:8 in f",
        "  asked for 2.00 GiB, and 0.25 GiB were free",
        "rank 2, cuda:0 is out of memory: aten::mm",
        "  asked for 2.00 GiB, and 0.25 GiB were free",
        "rank 5, cuda:0 is out of memory: aten::mm at a.py:8 in f",
        "  asked for 2.00 GiB, and 0.25 GiB were free",
        "  it went on and needs 100.00 to 120.00 GiB: the smallest known GPU with that is H200",
        "  at the peak, at a.py:9 in f, it held",
        "     60.00 GiB  parameters",
        "     40.00 GiB  activations",
        "  of which most comes from",
        "     99.00 GiB  a.py:9 in f",
        "      1.00 GiB  a backward",
        "rank 6, cuda:0 is out of memory: aten::mm at a.py:8 in f",
        "  asked for 2.00 GiB, and 0.25 GiB were free",
        "  it went on and needs more than 640.00 GiB",
        "rank 7, cuda:0 is out of memory: aten::mm at a.py:8 in f",
        "  asked for 2.00 GiB, and 0.25 GiB were free",
        "  it went on and needs 105.00 to 300.00 GiB: no known GPU has that",
        "  near the peak, with 100.00 GiB, at a.py:9 in f, it held",
        "    100.00 GiB  activations",
        "  of which most comes from",
        "rank 12, cuda:0 is out of memory: aten::mm at a.py:8 in f",
        "  asked for 2.00 GiB, and 0.25 GiB were free",
        "  it went on and needs 100.00 GiB: the smallest known GPU with that is H200",
        "  at the peak, it held",
        "     60.00 GiB  parameters",
        "     40.00 GiB  activations",
        "  of which most comes from",
        "     99.00 GiB  a.py:9 in f",
        "      1.00 GiB  a backward",
        "rank 9, cuda:0 leaves 1.00 GiB: the CUDA context, nccl and cuDNN take 1 to 2 GiB on a GPU",
        "rank 11, cuda:0 leaves 0.06 GiB: the CUDA context, nccl and cuDNN take 1 to 2 GiB on a GPU",
        "rank 3 ended with status 7: its figures are those until then",
        "rank 4 was ended by a signal: its figures may lack the last second",
        "values that were not computed decided at 4 places what follows, or may have: aten::item at a.py:1 in f, "
        "aten::nonzero at an unknown line, numpy at b.py:2 in g and 1 more",
    ]
    assert rehearse_report.format_table(entries[:1], values[:1]).splitlines()[2:] == [
        "values that were not computed decided at 1 place what follows, or may have: aten::item at a.py:1 in f"
    ]
    assert rehearse_report.format_table([], []) == "rehearsal: no process initialized CUDA or a process group\n"


def test_json_of_a_failure() -> None:
    entry = rehearse_report.Entry(1, 0, 2, 3, 4, 9, 5, False, OutOfMemory(6, 7, "aten::mm", "a.py:8 in f"), None, True)
    entry = entry._replace(peak=Peak("a.py:9 in f", 15, [1, 2, 3, 4, 5], [["a.py:9 in f", 15]]))
    values = [MissingValue("aten::nonzero", "a.py:8 in f", 2)]
    document = json.loads(rehearse_report.format_json([entry, entry._replace(out_of_memory=None)], values))
    names = ("rank", "device", "peak_allocated", "peak_reserved", "total", "peak_host", "retries", "fits")
    expected = dict(zip(names, (1, 0, 2, 3, 4, 9, 5, False), strict=True))
    failure = {"requested": 6, "free": 7, "op": "aten::mm", "where": "a.py:8 in f"}
    held = {"parameters": 1, "gradients": 2, "optimizer state": 3, "activations": 4, "other": 5}
    expected["peak"] = {"where": "a.py:9 in f", "allocated": 15, "held": held, "lines": [{"where": "a.py:9 in f", "bytes": 15}]}
    assert document == {
        "schema": 1,
        "ranks": [{**expected, "out_of_memory": each, "exit_status": None, "smallest_gpu": None} for each in (failure, None)],
        "values": [{"op": "aten::nonzero", "where": "a.py:8 in f", "count": 2}],
    }


@pytest.mark.slow
def test_one_allocation_beyond_the_memory_of_another_gpu_goes_on(tmp_path: Path) -> None:
    [entry], text = figures(
        tmp_path,
        """
        import torch
        small = torch.empty(2**28, dtype=torch.uint8, device="cuda:1")
        large = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:1")
        for _ in range(2):
            int(small.float().sum())
        """,
        *("--memory", "1GiB", "--gpus", "2"),
    )
    line = f"{tmp_path}/program.py:{{}} in <module>".format
    for name in ("peak_host", "smallest_gpu"):
        del entry[name]
    lines = [{"where": line(4), "bytes": 3 * GIB}, {"where": line(6), "bytes": GIB}, {"where": line(3), "bytes": GIB // 4}]
    held = {**dict.fromkeys(CATEGORIES, 0), "other": 17 * GIB // 4}
    assert entry == {
        "rank": 0,
        "device": 1,
        "peak_allocated": 17 * GIB // 4 + 512,  # the sum has a block of the smallest size
        "peak_reserved": 17 * GIB // 4 + 2**21,  # and is in a segment of small blocks
        "total": GIB,
        "retries": 1,
        "fits": False,
        "exit_status": 0,
        "out_of_memory": {
            "requested": 3 * GIB,
            "free": 3 * GIB // 4,
            "op": "aten::empty.memory_format",
            "where": line(4),
        },
        "peak": {"where": line(6), "allocated": 17 * GIB // 4, "held": held, "lines": lines},
    }
    values = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["values"]
    assert values == [{"op": "aten::item", "where": line(6), "count": 2}]
    assert "  it went on and needs 4.25 GiB: the smallest known GPU with that is T4\n" in text
    assert text.endswith(f"decided at 1 place what follows, or may have: aten::item at {line(6)}\n")


def test_as_many_missing_values_as_are_named() -> None:
    values = [MissingValue("item", f"program.py:{line}", 1) for line in range(4)]
    assert rehearse_report._format_values(values[:3]).endswith("program.py:2")
    assert rehearse_report._format_values(values).endswith("program.py:2 and 1 more")
