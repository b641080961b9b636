"""Records what memory this process needed, and writes it to a file that ``python -m accelerator rehearse`` reads.

The peaks are those of the whole run: a reset of torch's statistics first adds them to the record. The file is written every
second, since a process may be killed, and a last time when the process ends. native/preload/exit writes the exit status, which
Python does not know of a ``SystemExit`` that the program raises.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ... import _settings
from ..._settings.rehearsal_record import (
    DeviceRecord,
    MissingValue,
    OutOfMemory,
    Peak,
    ProcessRecord,
    Statistics,
    status_file,
    write_record,
)
from ..import_hook import after_import
from ..ops import bindings
from . import history, memory_growth
from .distributed import replace
from .missing_values import forget_noted, frames_from, noted, program_line
from .peaks import held_memory, known_addresses

_INTERVAL_S = 1.0
# How much larger than the last one a peak must be for the memory to be looked at again, which takes up to a second.
_STEP, _STEP_BEYOND_MEMORY, _LEAST_PEAK = 1.1, 1.03, 2**26
_folder = _settings.read("rehearse") or ""
_is_started = False
_kept: dict[int, Statistics] = {}  # by device, what torch's statistics no longer contain
_out_of_memory: dict[int, OutOfMemory] = {}
_peaks: dict[int, Peak] = {}
_rank_of_group: list[int] = []  # the rank in the first process group of this process
_started_at: list[float] = []


def install() -> None:
    """Record this process once it initializes CUDA or a process group, if the command was started by ``rehearse``."""
    if not _folder:
        return
    bindings.replace("_cuda_init", lambda initialize: _after(initialize, _start_with_cuda))
    for name in bindings.RESET_PEAKS:
        bindings.replace(name, lambda reset: _before(reset, _keep_peaks))
    for name in bindings.RESET_COUNTS:
        bindings.replace(name, lambda reset: _before(reset, _keep_counts))
    after_import("torch.distributed.distributed_c10d", _record_groups)
    leave: Any = _before(os._exit, _end)
    os._exit = leave
    os.register_at_fork(after_in_child=_forget)


def start() -> None:
    """Start to record: this process is a rank."""
    global _is_started
    if not _folder or _is_started:
        return
    _is_started = True
    _started_at.append(time.time())
    atexit.register(_end)
    ctypes.CDLL(None).accelerator_simulation_report_exit(os.fsencode(status_file(_folder)))
    _write()  # the process may be killed before the thread runs
    threading.Thread(target=_write_regularly, name="rehearsal", daemon=True).start()


def _start_with_cuda() -> None:
    bindings.observe_out_of_memory(_note_out_of_memory)
    memory_growth.observe(_note_growth)
    history.start()
    start()


def _record_groups(c10d: ModuleType) -> None:
    """Record this process once it initializes a process group, which gives it a rank."""
    module: Any = c10d
    init_process_group: Any = module.init_process_group

    @functools.wraps(init_process_group)
    def init_and_record(*arguments: Any, **options: Any) -> Any:
        start()
        result = init_process_group(*arguments, **options)
        if not _rank_of_group:
            _rank_of_group.append(module.get_rank())
            _write()
        return result

    replace(c10d, "init_process_group", init_and_record)


def _after(original: Callable[..., Any], function: Callable[[], object]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        function()
        return result

    return run


def _before(original: Callable[..., Any], function: Callable[..., object]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        function(*arguments)
        return original(*arguments, **options)

    return run


def _forget() -> None:
    """A forked child is a rank of its own if it initializes CUDA itself."""
    global _is_started, _write_lock
    _is_started, _write_lock = False, threading.Lock()  # a thread of the parent may have held the lock
    for of_parent in (_kept, _out_of_memory, _peaks, _rank_of_group, _started_at):
        of_parent.clear()
    forget_noted()


def _statistics(device: int) -> Statistics:
    stats = bindings.memory_statistics(device)
    kept = _kept.get(device, Statistics())
    return Statistics(
        allocated=max(stats["allocated_bytes"]["all"]["peak"], kept.allocated),
        reserved=max(stats["reserved_bytes"]["all"]["peak"], kept.reserved),
        retries=stats["num_alloc_retries"] + kept.retries,
        ooms=stats["num_ooms"] + kept.ooms,
    )


def _keep_peaks(*arguments: Any) -> None:
    """Keep the peaks of every device before torch resets some of them."""
    for device in range(torch.cuda.device_count() if _is_initialized() else 0):
        now, kept = _statistics(device), _kept.get(device, Statistics())
        _kept[device] = kept._replace(allocated=now.allocated, reserved=now.reserved)


def _keep_counts(device: int) -> None:
    """Keep the counts of a device before torch resets them."""
    if _is_initialized():
        now, kept = _statistics(device), _kept.get(device, Statistics())
        _kept[device] = kept._replace(retries=now.retries, ooms=now.ooms)


def _is_initialized() -> bool:
    cuda: Any = torch.cuda
    return cuda.is_initialized()


def _note_out_of_memory(device: int, requested: int, allocated: int, free: int) -> None:
    if device not in _out_of_memory:
        _out_of_memory[device] = OutOfMemory(requested, free, *_place())
        history.note_out_of_memory()


def _note_growth(op: str) -> None:
    """Note where a device's memory was exceeded, and what holds it when clearly more is allocated than ever."""
    for device in range(torch.cuda.device_count()):
        line: Any = None
        exceeded = memory_growth.excess(device)
        if exceeded is not None and device not in _out_of_memory:
            line = program_line(frames_from(sys._getframe(1)))
            _out_of_memory[device] = OutOfMemory(*exceeded, op, line)
        allocated = bindings.memory_statistics(device)["allocated_bytes"]["all"]["current"]
        step = _STEP if exceeded is None else _STEP_BEYOND_MEMORY
        if allocated > step * (_peaks[device].allocated if device in _peaks else _LEAST_PEAK):
            line = line or program_line(frames_from(sys._getframe(1)))
            known = known_addresses()
            history.mark(known)
            _peaks[device] = held_memory(device, line, known)


def _place() -> tuple[str, str | None]:
    """Return the op that allocates and the line of the program that called it."""
    frames = frames_from(sys._getframe(1))
    op = next((frame.f_locals["described"].name for frame in frames if "described" in frame.f_locals), None)
    return op or "an allocation", program_line(frames)


def _write_regularly() -> None:
    while _is_started:
        _write()
        threading.Event().wait(_INTERVAL_S)


@contextlib.contextmanager
def _while_somebody_reads() -> Generator[None]:
    """Write nothing if the folder is gone: the rehearsal has ended, and this process goes on."""
    try:
        yield
    except FileNotFoundError:
        if os.path.exists(_folder):
            raise


def _end(code: int | None = None, *others: Any) -> None:
    global _is_started
    if not _is_started:
        return
    with _while_somebody_reads():
        _write()
        if code is not None:  # of os._exit, which libc's handlers do not see
            Path(status_file(_folder)).write_text(str(code & 0xFF), encoding="ascii")
        history.end(_folder)
    _is_started = False


def _rank() -> int | None:
    """Return the rank in the process group, else that of the environment, if there is one."""
    rank = os.environ.get("RANK", "")
    return _rank_of_group[0] if _rank_of_group else int(rank) if rank.isdecimal() else None


def _peak_host() -> int:
    """Return the peak of this process's resident host memory in bytes. That of getrusage includes what ran before ``exec``."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        [kibibytes] = [line.split()[1] for line in file if line.startswith("VmHWM:")]
    return int(kibibytes) * 1024


_write_lock = threading.Lock()


def _write() -> None:
    with _while_somebody_reads(), _write_lock:  # whoever writes last has the newest figures
        devices = range(torch.cuda.device_count() if _is_initialized() else 0)
        statistics = {device: _statistics(device) for device in devices}
        used = [device for device in devices if statistics[device].has_use] or (
            [torch.cuda.current_device()] if devices else []
        )
        records = [
            DeviceRecord(device, statistics[device], _total_memory(device), _out_of_memory.get(device), _peaks.get(device))
            for device in used
        ]
        values = [MissingValue(*place) for place in noted()]
        write_record(_folder, ProcessRecord(_rank(), _started_at[0], _peak_host(), records, values))


@functools.cache
def _total_memory(device: int) -> int:
    return torch.cuda.get_device_properties(device).total_memory
