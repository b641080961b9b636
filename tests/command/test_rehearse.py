"""``python -m accelerator rehearse``: what a program needs, on GPUs that compute nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from accelerator._command import rehearse_report
from accelerator.simulation import _rehearsal_record
from accelerator.simulation._rehearsal_record import CATEGORIES, Curve, DeviceRecord, OutOfMemory, ProcessRecord, Statistics
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
        del large
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
    common = {"rank": 0, "total": 81089 * 2**20, "retries": 0, "fits": True, "out_of_memory": None, "exit_status": 3}
    assert entries == [
        {**common, "device": 0, "peak_allocated": 4 * GIB, "peak_reserved": 4 * GIB},
        {**common, "device": 1, "peak_allocated": 2 * GIB, "peak_reserved": 2 * GIB},
    ]
    assert text.splitlines()[-4:] == [
        "rank  device  peak allocated  peak reserved         of  retries  fits",
        "   0  cuda:0        4.00 GiB       4.00 GiB  79.19 GiB        0   yes",
        "   0  cuda:1        2.00 GiB       2.00 GiB  79.19 GiB        0   yes",
        "rank 0 ended with status 3: its figures are those until then",
    ]


def test_out_of_memory_names_op_and_line_even_if_it_is_caught(tmp_path: Path) -> None:
    picture, folder = tmp_path / "memory.svg", tmp_path / "snapshots"
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
    assert (entry["fits"], entry["retries"], entry["exit_status"]) == (False, 1, 0)
    failure = entry["out_of_memory"]
    assert failure["requested"] == GIB
    assert 0 < failure["free"] < GIB
    assert failure["op"] == "aten::mm"
    assert failure["where"].endswith("program.py:4 in product")
    assert "is out of memory: aten::mm at " in text
    assert "asked for 1.00 GiB" in text
    assert "the GPU: 8.0 GiB" in "".join(ElementTree.fromstring(picture.read_text(encoding="utf-8")).itertext())
    with open(folder / "rank0.pickle", "rb") as stream:
        assert any(event["action"] == "oom" for event in pickle.load(stream)["device_traces"][0])


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
        status=1,
    )
    [entry] = entries
    assert entry["exit_status"] == 1
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
dist.all_reduce(x)
"""


@pytest.mark.parametrize("ranks", [(5,), pytest.param((5, 0), marks=pytest.mark.slow)])
def test_ranks_of_a_world_run_alone(ranks: tuple[int, ...], tmp_path: Path) -> None:
    entries, _ = figures(tmp_path, WORLD, "--gpus", "4", "--world-size", "6", "--rank", ",".join(map(str, ranks)))
    expected = [(rank, rank % 4, rank + 1) for rank in ranks]
    assert [(entry["rank"], entry["device"], entry["peak_allocated"] // 2**28) for entry in entries] == expected


@pytest.mark.slow
def test_world_that_nobody_starts_names_torchrun(tmp_path: Path) -> None:
    _, text = figures(tmp_path, 'import torch.distributed as dist\ndist.init_process_group("nccl")', status=1)
    assert "RANK expected, but not set: start the ranks with torchrun, or name one with --world-size and --rank" in text


@pytest.mark.slow
def test_ranks_of_torchrun_are_all_reported(tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "figures.json"
    program.write_text(WORLD, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = rehearse("--gpus", "2", "--json", str(file), command=launcher)
    assert done.returncode == 0, done.stderr
    entries = json.loads(file.read_text(encoding="utf-8"))["ranks"]
    assert [(entry["rank"], entry["device"]) for entry in entries] == [(0, 0), (1, 1)]


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
        for rank in range(7):
            if os.fork() == 0:
                os.environ["RANK"] = str(rank)
                torch.ones(1, device="cuda")
                end(rank)
                break
            os.wait()
        """,
    )
    assert [(entry["rank"], entry["exit_status"]) for entry in entries] == [*enumerate([3, 4, 1, 1, 5, None, 0])]
    assert "rank 4 ended with status 5: its figures are those until then" in text
    assert "rank 5 was ended by a signal: its figures are those until then" in text
    assert "rank 6 " not in text


# A program that begins with this keeps what the plot is drawn from.
KEEP_CURVE = """
        import glob, shutil, torch
        from _accelerator_simulation._rehearsal import history
        end = history.end
        def end_and_keep(rank, folder):
            end(rank, folder)
            [written] = glob.glob(folder + "/*.curve")
            shutil.copy(written, {})
        history.end = end_and_keep
"""


@pytest.mark.slow
def test_snapshot_and_plot(tmp_path: Path) -> None:
    picture, folder = tmp_path / "memory.svg", tmp_path / "snapshots"
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
        status=1,
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


def test_program_without_cuda(tmp_path: Path) -> None:
    done = rehearse(command=["true"])
    assert (done.returncode, done.stderr) == (0, "rehearsal: no process initialized CUDA or a process group\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "1"], "--rank needs --world-size"),
        (["--world-size", "4", "--rank", "4"], "rank 4 is not in a world of 4"),
        (["--world-size", "4", "--rank", "x"], "--rank must be numbers separated by commas, not 'x'"),
        (["--world-size", "4", "--rank", "1,1"], "--rank names a rank twice: 1,1"),
        (["--name", "A100 80GB"], "no GPU named 'A100 80GB' is known: give --memory, or one of the names T4, "),
        (["--memory", "much"], "memory must be bytes or a size"),
    ],
)
def test_wrong_usage(options: list[str], message: str) -> None:
    done = rehearse(*options, command=["true"])
    assert done.returncode == 2
    assert message in done.stderr


def write(folder: Path, pid: int, record: ProcessRecord, status: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the record of a process, and its exit status if it is known."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    _rehearsal_record.write_record(str(folder), record)
    if status is not None:
        Path(_rehearsal_record.status_file(str(folder))).write_text(status, encoding="ascii")


def test_records_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = OutOfMemory(requested=5, free=3, op="aten::mm", where=None)
    record = ProcessRecord(3, [DeviceRecord(0, Statistics(1, 2, 3, 4), GIB, failure), DeviceRecord(2, Statistics(), 7, None)])
    write(tmp_path, 1, record, None, monkeypatch)
    assert _rehearsal_record.read_records(tmp_path) == [(record, None)]
    write(tmp_path, 1, record._replace(rank=4), "", monkeypatch)  # the process is writing its status
    assert _rehearsal_record.read_records(tmp_path) == [(record._replace(rank=4), None)]
    write(tmp_path, 1, record, "7", monkeypatch)
    assert _rehearsal_record.read_records(tmp_path) == [(record, 7)]
    for device in (1, 0):
        _rehearsal_record.write_curve(str(tmp_path), Curve(0, device, [[1, 2], [3, 4]]))
    assert _rehearsal_record.read_curves(tmp_path) == [Curve(0, device, [[1, 2], [3, 4]]) for device in (0, 1)]
    assert len(_rehearsal_record.read_records(tmp_path)) == 1


def test_process_without_memory_is_no_rank_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 1 has one process, which uses none.
    for pid, rank, reserved in ((1, 0, 0), (2, 0, GIB), (3, 1, 0)):
        device = DeviceRecord(0, Statistics(reserved=reserved), GIB, None)
        write(tmp_path, pid, ProcessRecord(rank, [device]), "0", monkeypatch)
    assert [(entry.rank, entry.peak_reserved) for entry in rehearse_report.read(tmp_path, 0)] == [(0, GIB), (1, 0)]


def test_json_of_a_failure() -> None:
    entry = rehearse_report.Entry(1, 0, 2, 3, 4, 5, False, OutOfMemory(6, 7, "aten::mm", "a.py:8 in f"), None)
    document = json.loads(rehearse_report.format_json([entry, entry._replace(out_of_memory=None)]))
    names = ("rank", "device", "peak_allocated", "peak_reserved", "total", "retries", "fits")
    expected = dict(zip(names, (1, 0, 2, 3, 4, 5, False), strict=True))
    failure = {"requested": 6, "free": 7, "op": "aten::mm", "where": "a.py:8 in f"}
    assert document == {
        "schema": 1,
        "ranks": [{**expected, "out_of_memory": each, "exit_status": None} for each in (failure, None)],
    }
