"""The figures of a rehearsed process: resets of torch's statistics lose nothing, on whichever device."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import in_child

recorder: Any = importlib.import_module("_accelerator_simulation._inside.rehearsal.recorder")
missing_values: Any = importlib.import_module("_accelerator_simulation._inside.rehearsal.missing_values")
with_peers: Any = importlib.import_module("_accelerator_simulation._inside.rehearsal.with_peers")
record: Any = importlib.import_module("_accelerator_simulation._settings.rehearsal_record")
MIB = 2**20


def statistics() -> list[Any]:
    return [recorder._statistics(device) for device in range(2)]


@pytest.mark.parametrize("device", [0, 1])
def test_resets_of_a_device_lose_no_figure(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_kept", {})
    torch.cuda.init()
    for each in range(2):
        torch.cuda.reset_peak_memory_stats(each)
        torch.cuda.reset_accumulated_memory_stats(each)
        torch.empty((8 + each) * 10 * MIB, dtype=torch.uint8, device=f"cuda:{each}")
        with torch.cuda.device(each):
            torch.cuda.empty_cache()
        for _ in range(1 + each):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(2**40, dtype=torch.uint8, device=f"cuda:{each}")
    before = statistics()
    assert [figures.ooms for figures in before] == [1, 2]
    assert before[0].allocated >= 80 * MIB
    assert before[1].reserved >= before[1].allocated >= 90 * MIB

    recorder._keep_peaks(device)
    torch.cuda.reset_peak_memory_stats(device)
    assert torch.cuda.max_memory_reserved(device) < before[device].reserved
    assert statistics() == before

    recorder._keep_counts(device)
    torch.cuda.reset_accumulated_memory_stats(device)
    assert torch.cuda.memory_stats(device)["num_ooms"] == 0
    assert statistics() == before
    torch.empty(100 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
    assert recorder._statistics(device).allocated >= 100 * MIB, "a later peak is higher"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be recorded yet."""
    for name in ("_kept", "_out_of_memory", "_peaks"):
        monkeypatch.setattr(recorder, name, {})
    monkeypatch.setattr(recorder, "_rank_of_group", [])
    monkeypatch.setattr(recorder, "_started_at", [5.0])
    monkeypatch.setattr(missing_values, "_places", {})


@pytest.mark.usefixtures("fresh")
def test_a_record_has_the_figures_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()
    unused, first, second = record.Statistics(), record.Statistics(1, 2, 3, 4), record.Statistics(5, 6, 7, 8)
    failure, peak = record.OutOfMemory(9, 8, "aten::mm", "a.py:8 in f"), record.Peak("a.py:9 in f", 15, [15, 0, 0, 0, 0], [])
    statistics, written = [first, second], list[tuple[str, Any]]()
    monkeypatch.setattr(recorder, "_folder", "reports")
    monkeypatch.setattr(recorder, "_statistics", lambda device: statistics[device])
    monkeypatch.setattr(recorder, "_total_memory", lambda device: 100 + device)
    monkeypatch.setattr(recorder, "_peak_host", lambda: 77)
    monkeypatch.setattr(recorder, "write_record", lambda *arguments: written.append(arguments))
    recorder._out_of_memory[1], recorder._peaks[0] = failure, peak
    recorder._rank_of_group.append(3)
    missing_values._places["aten::item", "a.py:8 in f"] = 2
    devices = [record.DeviceRecord(0, first, 100, None, peak), record.DeviceRecord(1, second, 101, failure, None)]
    values = [record.MissingValue("aten::item", "a.py:8 in f", 2)]
    recorder._write()
    assert written.pop() == ("reports", record.ProcessRecord(3, 5.0, 77, devices, values))

    statistics[0] = unused
    recorder._write()
    assert written.pop()[1].devices == devices[1:]
    statistics[1] = unused  # then the current device is listed
    with torch.cuda.device(1):
        recorder._write()
    assert written.pop()[1].devices == [record.DeviceRecord(1, unused, 101, failure, None)]


@pytest.mark.parametrize(
    ("of_group", "variable", "expected"), [(1, "3", 1), (0, "3", 0), (None, "3", 3), (None, "x", None), (None, None, None)]
)
@pytest.mark.usefixtures("fresh")
def test_the_rank_is_that_of_the_group_then_that_of_the_variable(
    of_group: int | None, variable: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("RANK", variable)
    if of_group is not None:
        recorder._rank_of_group.append(of_group)
    assert recorder._rank() == expected


@pytest.mark.usefixtures("fresh")
def test_the_rank_of_the_first_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is recorded before its group comes up, which may wait for others, and again when it has a rank."""
    events, ranks = list[str](), [4, 2]
    module = types.SimpleNamespace(init_process_group=lambda backend: events.append(backend), get_rank=lambda: ranks.pop(0))
    monkeypatch.setattr(recorder, "start", lambda: events.append("start"))
    monkeypatch.setattr(recorder, "_write", lambda: events.append(f"write {recorder._rank()}"))
    recorder._record_groups(module)
    for backend in ("gloo", "nccl"):
        module.init_process_group(backend)
    assert events == ["start", "gloo", "write 4", "start", "nccl"]


@pytest.mark.usefixtures("fresh")
def test_the_first_allocation_that_fails_on_each_device_is_noted() -> None:
    recorder._note_out_of_memory(1, 5, 7, 3)
    line = f"{__file__}:{sys._getframe().f_lineno - 1} in test_the_first_allocation_that_fails_on_each_device_is_noted"
    recorder._note_out_of_memory(1, 50, 70, 30)
    recorder._note_out_of_memory(0, 6, 7, 2)
    failure = record.OutOfMemory(5, 3, "an allocation", line)
    assert recorder._out_of_memory[1] == failure
    assert recorder._out_of_memory[0][:3] == (6, 2, "an allocation")


@pytest.mark.usefixtures("fresh")
def test_what_holds_memory_is_looked_at_when_clearly_more_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth more than the last time, and beyond the memory of the GPU 3 % more."""
    torch.cuda.init()
    allocated, exceeded = [0, 0], dict[int, tuple[int, int]]()
    looked = list[tuple[int, str]]()

    def held_memory(device: int, where: str, known: object) -> Any:
        looked.append((device, where.rpartition(" in ")[2]))
        return record.Peak(where, allocated[device], [], [])

    monkeypatch.setattr(recorder, "held_memory", held_memory)
    monkeypatch.setattr(recorder, "known_addresses", dict)
    monkeypatch.setattr(recorder.memory_growth, "excess", exceeded.get)
    figures = lambda device: {"allocated_bytes": {"all": {"current": allocated[device]}}}  # noqa: E731
    monkeypatch.setattr(recorder.bindings, "memory_statistics", figures)

    def grow(device: int, percent: int) -> list[int]:
        allocated[device] = 2 * 2**26 * percent // 100
        recorder._note_growth("aten::mm")
        found = [where for where, _ in looked]
        looked.clear()
        return found

    assert [grow(1, percent) for percent in (50, 100, 105, 109, 111, 121, 123)] == [[], [1], [], [], [1], [], [1]]
    assert grow(0, 100) == [0]
    assert recorder._out_of_memory == {}
    exceeded[1] = (9, 4)
    assert [grow(1, percent) for percent in (125, 127, 130, 132, 100)] == [[], [1], [], [1], []]
    assert grow(0, 105) == []
    exceeded[1] = (90, 40)
    recorder._note_growth("aten::add")
    [(device, failure)] = recorder._out_of_memory.items()
    assert (device, *failure[:3]) == (1, 9, 4, "aten::mm")
    assert failure.where.endswith("in grow")


@pytest.mark.usefixtures("fresh")
def test_a_forked_child_begins_without_what_its_parent_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_is_started", True)
    states = recorder._kept, recorder._out_of_memory, recorder._peaks, missing_values._places
    for state in states:
        state["of the parent"] = "a figure"
    recorder._rank_of_group.append(3)
    recorder._forget()
    assert ([*states], recorder._rank_of_group, recorder._started_at, recorder._is_started) == ([{}] * 4, [], [], False)


@pytest.mark.parametrize(("code", "text"), [(7, "7"), (-1, "255"), (256, "0"), (None, None)])
@pytest.mark.usefixtures("fresh")
def test_the_end_of_a_process(code: int | None, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``os._exit`` has a status, and other ends do not say theirs. A second end changes nothing."""
    ended = list[str]()
    monkeypatch.setattr(recorder, "_folder", str(tmp_path))
    monkeypatch.setattr(recorder, "_is_started", True)
    monkeypatch.setattr(recorder, "_write", lambda: ended.append("record"))
    monkeypatch.setattr(recorder.history, "end", ended.append)
    for _ in range(2):
        recorder._end(*(() if code is None else (code,)))
    assert ended == ["record", str(tmp_path)]
    file = Path(record.status_file(str(tmp_path)))
    assert (file.read_text() if file.exists() else None) == text


def test_the_peak_of_host_memory_is_that_of_the_whole_run() -> None:
    held = b"x" * (64 * MIB)
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    del held
    slack = 8 * MIB  # the kernel counts pages in batches
    assert resident - slack <= recorder._peak_host() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + slack


def test_an_op_that_takes_memory_is_the_one_that_the_program_called(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, count, seen = recorder.memory_growth, ctypes.c_uint64(5), list[str]()
    monkeypatch.setattr(growth, "_observers", [seen.append])
    monkeypatch.setattr(growth, "_count", count)
    monkeypatch.setattr(growth, "_seen", 5)

    def allocate(size: int) -> int:
        count.value += size
        return size

    inner = growth.watched("aten::empty", allocate)
    outer = growth.watched("aten::mm", lambda size: inner(size))
    assert [outer(0), outer(1), outer(0), inner(1), inner(0)] == [0, 1, 0, 1, 0]
    assert seen == ["aten::mm", "aten::empty"]


def frame(filename: str, line: int, name: str) -> Any:
    return types.SimpleNamespace(f_code=types.SimpleNamespace(co_filename=filename, co_name=name), f_lineno=line)


def test_the_line_of_the_program() -> None:
    """The innermost line outside of installed packages; if there is none, outside of torch and the simulation."""
    of_torch = frame(f"{torch.__path__[0]}/functional.py", 1, "split")
    of_simulation = frame(str(Path(missing_values.__file__).parents[2] / "_pytest/server.py"), 2, "run")
    of_package = frame("/venv/lib/python3.12/site-packages/transformers/trainer.py", 3, "train")
    of_python = frame("<frozen runpy>", 4, "run_path")
    inner, outer = frame("/program/model.py", 5, "forward"), frame("/program/train.py", 6, "main")
    line = missing_values.program_line
    assert line([of_simulation, of_torch, of_package, inner, outer, of_python]) == "/program/model.py:5 in forward"
    assert line([of_simulation, of_torch, of_package, of_torch, of_python]) == f"{of_package.f_code.co_filename}:3 in train"
    assert line([of_simulation, of_torch, of_python]) is None


def test_the_line_of_a_backward_is_that_of_the_main_thread() -> None:
    found = list[str | None]()
    thread = threading.Thread(target=lambda: found.append(missing_values.program_line([])))
    thread.start()
    thread.join()
    assert found[0] is not None
    assert found[0].endswith(" in test_the_line_of_a_backward_is_that_of_the_main_thread")


def test_the_advice_to_a_world_that_nobody_starts() -> None:
    def init_process_group(message: str) -> None:
        raise ValueError(message)

    init = with_peers._with_advice(init_process_group)
    advice = "start the ranks with torchrun, or rehearse one with --world-size and --rank"
    for message in ("environment variable RANK expected, but not set", "another problem"):
        with pytest.raises(ValueError, match=message) as caught:
            init(message)
        assert str(caught.value) == (f"{message}; {advice}" if "variable" in message else message)


def test_a_child_writes_that_was_forked_during_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        recorder._forget()  # a rehearsed process calls it after a fork
        recorder._started_at.append(0.0)
        recorder._write()

    monkeypatch.setattr(recorder, "_folder", str(tmp_path))
    with recorder._write_lock:
        in_child(write)
    assert len(list(tmp_path.glob("*.json"))) == 1
