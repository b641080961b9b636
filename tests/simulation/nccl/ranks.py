"""Runs the test cases of NCCL with each rank in a forked process, so that torch is imported only once.

Run ``python -m tests.simulation.nccl.ranks`` on simulated GPUs. Each line of its input is a JSON document that names a case,
its arguments and the number of ranks. For each it prints a line of JSON with a report of each rank: the returned value or
the failure, and the seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.simulation_driver import loaded_runtime

# An alarm kills a rank after this time.
MOST_SECONDS = 300

nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetLastError.restype = ctypes.c_char_p
nccl.ncclGetErrorString.restype = ctypes.c_char_p

NOT_READY, LAUNCH_FAILED = 600, 719  # CUDA's codes; the next are NCCL's
SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 2, 3, 4, 5, 6


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Error(Exception):
    """An error of an NCCL call."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


def check(code: int) -> None:
    if code != SUCCESS:
        raise Error(code, nccl.ncclGetLastError(None).decode())


def wait_for_file(path: Path) -> None:
    """Wait for a file that another rank creates. The rank's alarm limits the time."""
    while not path.exists():
        time.sleep(0.01)


def refused(function: Any, *arguments: Any) -> list[Any]:
    """Return the code and the text of a call's error, or code 0 if it succeeds."""
    try:
        function(*arguments)
    except Error as error:
        return [error.code, error.text]
    return [SUCCESS, ""]


def unique_id() -> UniqueId:
    made = UniqueId()
    check(nccl.ncclGetUniqueId(ctypes.byref(made)))
    return made


def pointer(tensor: Any, offset: int = 0) -> ctypes.c_void_p:
    """Return the address of a tensor's values. The simulated NCCL takes host memory too."""
    return ctypes.c_void_p(tensor.data_ptr() + offset * tensor.element_size())


class Comm:
    """A communicator. Its methods return when the work is done, and raise Error if NCCL reports one."""

    def __init__(self, handle: ctypes.c_void_p, rank: int, ranks: int) -> None:
        self.handle, self.rank, self.ranks = handle, rank, ranks

    @classmethod
    def of(cls, identifier: UniqueId, rank: int, ranks: int, device: int | None = None) -> Comm:
        check_cuda(loaded_runtime().cudaSetDevice(rank if device is None else device))
        handle = ctypes.c_void_p()
        check(nccl.ncclCommInitRank(ctypes.byref(handle), ranks, identifier, rank))
        return cls(handle, rank, ranks)

    @classmethod
    def adopt(cls, handle: ctypes.c_void_p) -> Comm:
        rank, ranks = ctypes.c_int(), ctypes.c_int()
        check(nccl.ncclCommUserRank(handle, ctypes.byref(rank)))
        check(nccl.ncclCommCount(handle, ctypes.byref(ranks)))
        return cls(handle, rank.value, ranks.value)

    @property
    def device(self) -> int:
        device = ctypes.c_int()
        check(nccl.ncclCommCuDevice(self.handle, ctypes.byref(device)))
        return device.value

    def submit(self, function: Any, *arguments: Any, stream: int | None = None) -> None:
        """Call NCCL and return before the work is done."""
        check(function(*arguments, self.handle, ctypes.c_void_p(stream)))

    def call(self, function: Any, *arguments: Any) -> None:
        self.submit(function, *arguments)
        if _groups:
            _groups[-1].append(self)
        else:
            self.finish()

    def finish(self) -> None:
        """Wait until the device's default stream is ready or NCCL reports an error: failed work never becomes ready."""
        device = ctypes.c_int()
        check_cuda(loaded_runtime().cudaGetDevice(ctypes.byref(device)))
        check_cuda(loaded_runtime().cudaSetDevice(self.device))
        error = 0
        while not error and (code := loaded_runtime().cudaStreamQuery(None)) == NOT_READY:
            error = self.asynchronous_error()
            time.sleep(0.0002)
        loaded_runtime().cudaGetLastError()
        check_cuda(loaded_runtime().cudaSetDevice(device))
        if error:
            raise Error(error, nccl.ncclGetLastError(None).decode())
        check_cuda(code)

    def all_reduce(self, source: Any, target: Any, type_code: int, op: int = 0, count: int | None = None) -> None:
        size = ctypes.c_size_t(source.numel() if count is None else count)
        self.call(nccl.ncclAllReduce, pointer(source), pointer(target), size, type_code, op)

    def send(self, tensor: Any, peer: int) -> None:
        size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
        self.call(nccl.ncclSend, pointer(tensor), size, 0, peer)

    def receive(self, tensor: Any, peer: int) -> None:
        size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
        self.call(nccl.ncclRecv, pointer(tensor), size, 0, peer)

    def total(self, value: int = 1) -> int:
        """Return the sum of a value over all ranks, which shows that the communicator works."""
        import torch

        tensor = torch.tensor([value], dtype=torch.int64)
        self.all_reduce(tensor, tensor, 4)
        return int(tensor.item())

    def split(self, color: int, key: int) -> Comm | None:
        handle = ctypes.c_void_p()
        check(nccl.ncclCommSplit(self.handle, color, key, ctypes.byref(handle), None))
        return Comm.adopt(handle) if handle else None

    def asynchronous_error(self) -> int:
        code = ctypes.c_int(-1)
        check(nccl.ncclCommGetAsyncError(self.handle, ctypes.byref(code)))
        return code.value

    def destroy(self) -> None:
        check(nccl.ncclCommDestroy(self.handle))

    def abort(self) -> None:
        check(nccl.ncclCommAbort(self.handle))


_groups: list[list[Comm]] = []


@contextlib.contextmanager
def group() -> Any:
    """Group calls. The outermost group ends when the work of all of its calls is done."""
    check(nccl.ncclGroupStart())
    _groups.append([])
    yield
    check(nccl.ncclGroupEnd())
    inner = _groups.pop()
    if _groups:
        _groups[-1].extend(inner)
    else:
        for comm in dict.fromkeys(inner):
            comm.finish()


def check_cuda(code: int) -> None:
    assert code == 0, f"CUDA error {code}"


class Place(NamedTuple):
    """A rank, and what it shares with the other ranks of its case."""

    rank: int
    ranks: int
    id: UniqueId
    store: str  # path of a file that the ranks share; it does not exist at first

    def comm(self) -> Comm:
        return Comm.of(self.id, self.rank, self.ranks)


def _run_rank(case: str, place: Place, arguments: dict[str, Any], variables: dict[str, str], writing: int) -> None:
    status = 1
    try:
        signal.alarm(MOST_SECONDS)
        os.environ.update(variables)
        module, _, function = case.rpartition(".")
        cases = importlib.import_module(f"tests.simulation.nccl.{module}_cases")

        begin = time.monotonic()
        try:
            report = {"value": getattr(cases, function)(place, **arguments)}
        except Error as error:
            report = {"code": error.code, "text": error.text}
        except BaseException:
            report = {"failure": traceback.format_exc()}
        report["seconds"] = time.monotonic() - begin
        with os.fdopen(writing, "w") as file:
            json.dump(report, file)
        status = 0
    finally:
        os._exit(status)


def _run(order: dict[str, Any]) -> list[dict[str, Any]]:
    ranks: int = order["ranks"]
    identifier = unique_id()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(ranks):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                place = Place(rank, ranks, identifier, str(Path(directory, "store")))
                _run_rank(order["case"], place, order["arguments"], order["variables"], writing)
            os.close(writing)
            children.append((pid, reading))
        reports = []
        for pid, reading in children:
            with os.fdopen(reading) as file:
                text = file.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            reports.append(json.loads(text) if text else {"exit": code})
    return reports


def main() -> None:
    # Import torch before any fork.
    for module in ("collective", "communicator", "pending", "torch"):
        importlib.import_module(f"tests.simulation.nccl.{module}_cases")

    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
    os._exit(0)  # finalizing torch would take a second


if __name__ == "__main__":
    # The cases import this module by its name. Run that copy of it, so that they use the same Error class.
    from tests.simulation.nccl import ranks

    ranks.main()
