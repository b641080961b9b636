"""Run programs in forks of a process that has only imported torch, as ``python -c`` would run them.

The import takes longer than the rest of most programs. One parent serves each environment, for all workers of pytest. A program
that begins with the import of ``torch._dynamo`` runs in a fork of a process that has imported that too.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Variables of others that are read only after the import of torch, which reads the name of its allocator early and the
# allocator's other settings later.
_READ_LATER = (
    r"(ACCELERATOR_BACKEND|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|CUDA_DEVICE_ORDER|PYTORCH_NVML_BASED_CUDA_CHECK|HOSTACC_SWITCHES|PYTEST_\w+|SLURMD?_\w+|TORCHINDUCTOR_CACHE_DIR"
    r"|TRITON_CACHE_DIR|GLOO_SOCKET_IFNAME|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CC|CUDA_LAUNCH_BLOCKING"
    # Inductor sets a variable of this prefix in the process of pytest, to an address.
    r"|_TORCHINDUCTOR_\w+)="
    r"|PYTORCH_(CUDA_)?ALLOC_CONF=(?!.*backend)"
)
# A parent ends after this time without a program, because each occupies memory.
_IDLE_S = 180.0
_IMPORT_S = 300.0  # torch may have to be read from a slow disk
_INT = struct.Struct("i")

# The sockets of the parents. The workers of one run share them: the process that started the workers is their parent.
_run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
_FOLDER = Path(tempfile.gettempdir(), f"accelerator-tests-{os.getuid() if sys.platform != 'win32' else 0}-{_run}")

_started: list[subprocess.Popen[bytes]] = []


def begins_with_torch(code: str) -> bool:
    """Return whether a program imports torch before it does anything else."""
    return re.match(r"\s*import [\w, ]*\btorch\b", code) is not None


def run(
    code: str, environment: Mapping[str, str], *arguments: str, timeout: float, cwd: Path, prepare: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python code as ``python -c`` does, in a process that has imported torch in this environment.

    Args:
        prepare: a program that the parent runs after the import of torch.
    """
    command = [sys.executable, "-c", code, *arguments]
    if re.match(r"\s*import torch\._dynamo\b", code):
        prepare = f"import torch._dynamo\n{prepare}"
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        request = {"code": code, "arguments": arguments, "environment": dict(environment), "cwd": str(cwd)}
        try:
            status = _request({**request, "output": str(output), "errors": str(errors)}, environment, prepare, timeout)
        except TimeoutError:
            status = None
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (output, errors)]
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(command, status, *texts)


@functools.cache
def _read_later() -> re.Pattern[str]:
    """Match variables that are read after the import of torch: processes with different values can have the same parent."""
    from accelerator.simulation._settings import SETTINGS, variable  # here, because a parent must not import the package

    ours = "|".join(variable(each.name) for each in SETTINGS if each.variable and not each.is_read_early)
    return re.compile(f"({ours})=|{_READ_LATER}")


def _request(request: dict[str, Any], environment: Mapping[str, str], prepare: str, timeout: float) -> int:
    """Send a program to the parent of its environment, start the parent if there is none, and return the program's status."""
    key = sorted((name, value) for name, value in environment.items() if not _read_later().match(f"{name}={value}"))
    address = _FOLDER / hashlib.sha256(repr((prepare, key)).encode()).hexdigest()[:16]
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            if connection.connect_ex(str(address)):
                _start_parent(address, environment, prepare)
                continue
            connection.settimeout(timeout)
            connection.sendall(json.dumps(request).encode() + b"\n")
            packed = connection.recv(_INT.size)
            if not packed:
                continue  # the parent ended before it read the request
            child: int = _INT.unpack(packed)[0]
            try:
                packed = connection.recv(_INT.size)
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                raise
            assert packed, "the process that imported torch has ended"
            return int(_INT.unpack(packed)[0])


def _start_parent(address: Path, environment: Mapping[str, str], prepare: str) -> None:
    """Start a parent and wait until it listens, unless another worker has started it."""
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    with open(address.with_suffix(".lock"), "w") as lock, socket.socket(socket.AF_UNIX) as trial:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if trial.connect_ex(str(address)) == 0:
            return
        # The parent gets this module as text, because importing it would import the package under test.
        program = f"{Path(__file__).read_text(encoding='utf-8')}\n_serve({str(address)!r}, {prepare!r})\n"
        with tempfile.TemporaryFile("w+") as errors:
            parent = subprocess.Popen(
                [sys.executable, "-c", program],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
            assert parent.stdout
            listens = select.select([parent.stdout], [], [], _IMPORT_S)[0] and parent.stdout.read(1)
            parent.stdout.close()
            if not listens:
                parent.kill()
                parent.wait()
                errors.seek(0)
                raise RuntimeError(f"no process that has imported torch: {errors.read()[-3000:]}")
    _started.append(parent)


@atexit.register
def _end_parents() -> None:
    for parent in _started:
        assert parent.stdin
        parent.stdin.close()  # the parent ends after its last program
    for parent in _started:
        parent.wait()
    if _started:
        shutil.rmtree(_FOLDER, ignore_errors=True)


def _serve(address: str, prepare: str) -> None:
    """Run the parent: import torch and fork a child for each connection. Write the child's pid, then its status."""
    results = os.dup(1)
    os.dup2(2, 1)  # torch may print
    importlib.import_module("torch")
    exec(prepare, {"__name__": "prepare"})
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's take longer than most programs
    Path(address).unlink(missing_ok=True)  # left by a parent that was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    os.write(results, b"\n")
    os.close(results)
    running: dict[int, tuple[int, socket.socket]] = {}  # by a file descriptor that is readable when the child has ended
    listening: list[Any] = [listener, 0]
    while listening or running:
        ready = select.select([*listening, *running], [], [], None if running else _IDLE_S)[0]
        if not ready or 0 in ready:  # the process that started this one has ended
            listening = []
            Path(address).unlink(missing_ok=True)
            listener.close()
            continue
        for each in ready:
            if each is listener:
                connection, _ = listener.accept()
                line = connection.makefile("rb").readline()
                if not line:
                    connection.close()  # another worker that tried whether this process listens
                    continue
                child = os.fork()
                if child == 0:
                    for other in (listener, connection, *(connection for _, connection in running.values())):
                        other.close()
                    for descriptor in running:
                        os.close(descriptor)
                    _run_child(json.loads(line))
                connection.sendall(_INT.pack(child))
                running[os.pidfd_open(child)] = child, connection
            else:
                os.close(each)
                child, connection = running.pop(each)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                try:
                    connection.sendall(_INT.pack(status))
                except BrokenPipeError:
                    pass  # the program's deadline has passed
                connection.close()
    os._exit(0)  # finalizing torch would take a second


def _run_child(request: dict[str, Any]) -> None:
    """Run the child: set the streams, arguments and environment, and run the program as the module ``__main__``."""
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, request["output"], 0), (2, request["errors"], 0)):
        opened = os.open(path, flags or os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = ["-c", *request["arguments"]]
    warnings.filterwarnings("error", category=UserWarning, module=r"accelerator\Z")
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    status = _execute(request["code"], main)
    # Ends as an interpreter does, but without finalizing torch, which takes longer than most programs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _execute(code: str, main: types.ModuleType) -> int:
    """Run a program and return the status of its process."""
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
