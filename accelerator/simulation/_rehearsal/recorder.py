"""Records what memory this process needed, and writes it to a file that ``python -m accelerator rehearse`` reads.

The peaks are those of the whole run: a reset of torch's statistics first adds them to the record. The file is written every
second, since a process may be killed, and a last time when the process ends. native/preload/exit writes the exit status, which
Python does not know of a ``SystemExit`` that the program raises.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .. import _settings
from .._kernels import bindings
from .._rehearsal_record import DeviceRecord, OutOfMemory, ProcessRecord, Statistics, status_file, write_record
from . import history

__all__ = ["install", "start"]

_INTERVAL_S = 1.0
_LIBRARIES = tuple(
    os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
)

_folder = _settings.read("rehearse") or ""
_is_started = False
_kept: dict[int, Statistics] = {}  # by device, what torch's statistics no longer contain
_out_of_memory: dict[int, OutOfMemory] = {}


def install() -> None:
    """Record this process once it initializes CUDA or a process group, if the command was started by ``rehearse``."""
    if not _folder:
        return
    bindings.replace("_cuda_init", lambda initialize: _after(initialize, start))
    for name in bindings.RESET_PEAKS:
        bindings.replace(name, lambda reset: _before(reset, _keep_peaks))
    for name in bindings.RESET_COUNTS:
        bindings.replace(name, lambda reset: _before(reset, _keep_counts))
    leave: Any = _before(os._exit, _end)
    os._exit = leave
    os.register_at_fork(after_in_child=_forget)


def start() -> None:
    """Start to record: this process is a rank."""
    global _is_started
    if not _folder or _is_started:
        return
    _is_started = True
    bindings.observe_out_of_memory(_note_out_of_memory)
    history.start()
    atexit.register(_end)
    ctypes.CDLL(None).accelerator_simulation_report_exit(os.fsencode(status_file(_folder)))
    threading.Thread(target=_write_regularly, name="rehearsal", daemon=True).start()


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
    global _is_started
    _is_started = False
    _kept.clear()
    _out_of_memory.clear()


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


def _keep_counts(device: Any = None, *arguments: Any) -> None:
    """Keep the counts of a device before torch resets them."""
    if _is_initialized():
        index = device if isinstance(device, int) else torch.cuda.current_device()
        now, kept = _statistics(index), _kept.get(index, Statistics())
        _kept[index] = kept._replace(retries=now.retries, ooms=now.ooms)


def _is_initialized() -> bool:
    cuda: Any = torch.cuda
    return cuda.is_initialized()


def _note_out_of_memory(device: int, requested: int, allocated: int, free: int) -> None:
    if device not in _out_of_memory:
        _out_of_memory[device] = OutOfMemory(requested, free, *_place())
        history.note_out_of_memory()


def _place() -> tuple[str, str | None]:
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
    return op or "an allocation", line


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
        Path(status_file(_folder)).write_text(str(code & 0xFF), encoding="ascii")
    history.end(_rank(), _folder)
    _is_started = False


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


_write_lock = threading.Lock()


def _write() -> None:
    statistics = {device: _statistics(device) for device in range(torch.cuda.device_count() if _is_initialized() else 0)}
    current = [torch.cuda.current_device()] if statistics else []
    used = [device for device in statistics if statistics[device].has_use] or current
    devices = [DeviceRecord(device, statistics[device], _total_memory(device), _out_of_memory.get(device)) for device in used]
    with _write_lock:
        write_record(_folder, ProcessRecord(_rank(), devices))


@functools.cache
def _total_memory(device: int) -> int:
    return torch.cuda.get_device_properties(device).total_memory
