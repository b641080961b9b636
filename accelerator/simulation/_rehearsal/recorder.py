"""Records what memory this process needed, and writes it to a file that ``python -m accelerator rehearse`` reads.

The peaks are those of the whole run: a reset of torch's statistics first adds them to the record. The file is written every
second, since a process may be killed, and a last time when the process ends. native/preload/exit writes the exit status, which
Python does not know of a ``SystemExit`` that the program raises.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from . import history

__all__ = ["install", "start"]

_INTERVAL_S = 1.0
_C: Any = torch._C
_LIBRARIES = tuple(
    os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
)

_folder = os.environ.get("ACCELERATOR_SIM_REHEARSE", "")
_is_started = False
_kept: dict[int, dict[str, int]] = {}  # by device, what torch's statistics no longer contain
_NOTHING = {"allocated": 0, "reserved": 0, "retries": 0, "ooms": 0}
_totals: dict[int, int] = {}
_out_of_memory: dict[int, dict[str, Any]] = {}


def install() -> None:
    """Record this process once it initializes CUDA or a process group, if the command was started by ``rehearse``."""
    if not _folder:
        return
    _after(_C, "_cuda_init", start)
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        _before(_C, name, _keep_peaks)
    for name in ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"):
        _before(_C, name, _keep_counts)
    _before(os, "_exit", _end)
    os.register_at_fork(after_in_child=_forget)


def start() -> None:
    """Start to record: this process is a rank."""
    global _is_started
    if not _folder or _is_started:
        return
    _is_started = True
    _C._cuda_attach_out_of_memory_observer(_note_out_of_memory)
    history.start()
    atexit.register(_end)
    ctypes.CDLL(None).accelerator_simulation_report_exit(os.fsencode(_path(".status")))
    threading.Thread(target=_write_regularly, name="rehearsal", daemon=True).start()


def _after(owner: Any, name: str, function: Callable[[], object]) -> None:
    original = getattr(owner, name)

    def run(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        function()
        return result

    setattr(owner, name, run)


def _before(owner: Any, name: str, function: Callable[..., object]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    def run(*arguments: Any, **options: Any) -> Any:
        function(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, run)


def _forget() -> None:
    """A forked child is a rank of its own if it initializes CUDA itself."""
    global _is_started
    _is_started = False
    _kept.clear()
    _out_of_memory.clear()


def _statistics(device: int) -> dict[str, int]:
    stats = _C._cuda_memoryStats(device)
    kept = _kept.get(device, _NOTHING)
    return {
        "allocated": max(stats["allocated_bytes"]["all"]["peak"], kept["allocated"]),
        "reserved": max(stats["reserved_bytes"]["all"]["peak"], kept["reserved"]),
        "retries": stats["num_alloc_retries"] + kept["retries"],
        "ooms": stats["num_ooms"] + kept["ooms"],
    }


def _keep_peaks(*arguments: Any) -> None:
    """Keep the peaks of every device before torch resets some of them."""
    for device in range(torch.cuda.device_count() if _is_initialized() else 0):
        now, kept = _statistics(device), _kept.get(device, _NOTHING)
        _kept[device] = {**kept, "allocated": now["allocated"], "reserved": now["reserved"]}


def _keep_counts(device: Any = None, *arguments: Any) -> None:
    """Keep the counts of a device before torch resets them."""
    if _is_initialized():
        index = device if isinstance(device, int) else torch.cuda.current_device()
        now, kept = _statistics(index), _kept.get(index, _NOTHING)
        _kept[index] = {**kept, "retries": now["retries"], "ooms": now["ooms"]}


def _is_initialized() -> bool:
    cuda: Any = torch.cuda
    return cuda.is_initialized()


def _note_out_of_memory(device: int, requested: int, allocated: int, free: int) -> None:
    if device not in _out_of_memory:
        _out_of_memory[device] = {"requested": requested, "free": free, **_place()}
        history.note_out_of_memory()


def _place() -> dict[str, str | None]:
    """Return the op that allocates and the line of the program that called it."""
    frames = list(_frames(sys._getframe(1)))
    op = next(
        (frame.f_locals["described"].name for frame in frames if "described" in frame.f_locals and _is_kernel(frame)), None
    )
    line = _program_line(frames)
    if line is None:
        # The op is of a backward, in a thread of torch: the program waits in its own.
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        line = _program_line(list(_frames(main)))
    return {"op": op or "an allocation", "where": line}


def _frames(frame: FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_kernel(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES[1])


def _program_line(frames: list[FrameType]) -> str | None:
    """Return the innermost line outside of torch and the simulation."""
    for frame in frames:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not name.startswith("<") and os.sep + "lib" + os.sep + "python" not in name:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
    for frame in frames:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and "<frozen" not in name and not name.endswith("threading.py"):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return None


def _write_regularly() -> None:
    while _is_started:
        _write()
        threading.Event().wait(_INTERVAL_S)


def _end(code: int | None = None, *others: Any) -> None:
    global _is_started
    if not _is_started:
        return
    _write()
    if code is not None:  # of os._exit, which libc's handlers do not see
        Path(_path(".status")).write_text(str(code & 0xFF), encoding="ascii")
    history.end(_rank())
    _is_started = False


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _path(suffix: str) -> str:
    return os.path.join(_folder, f"{os.getpid()}{suffix}")


_write_lock = threading.Lock()


def _write() -> None:
    devices: list[dict[str, Any]] = []
    for device in range(torch.cuda.device_count() if _is_initialized() else 0):
        now = _statistics(device)
        if device not in _totals and now["reserved"]:
            _totals[device] = torch.cuda.get_device_properties(device).total_memory
        devices.append({"device": device, **now, "total": _totals.get(device), "out_of_memory": _out_of_memory.get(device)})
    current = torch.cuda.current_device() if devices else 0
    used = [entry for entry in devices if entry["reserved"] or entry["ooms"]] or devices[current : current + 1]
    for entry in used:
        if entry["total"] is None:
            entry["total"] = torch.cuda.get_device_properties(entry["device"]).total_memory
    report = {"rank": _rank(), "devices": used}
    with _write_lock:
        path = _path(".json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(report, file)
        os.replace(f"{path}.new", path)
