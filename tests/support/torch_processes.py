"""Run programs that begin with ``import torch`` in forks of a process that has only imported torch.

The import takes longer than the rest of most programs.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Variables that are read only after the import of torch. Processes with different values can have the same parent.
# The simulated libraries read their variables at their first call, and the import of torch calls none of them.
_READ_LATER = re.compile(
    r"ACCELERATOR_SIM_(?!(COMPILE|COMPUTE|OWN_KERNELS|TRITON)$)|ACCELERATOR_BACKEND$|(CUDA|HIP|ROCR)_VISIBLE_DEVICES$"
    r"|CUDA_DEVICE_ORDER$|PYTEST_CURRENT_TEST$|PYTORCH_NVML_BASED_CUDA_CHECK$"
)
# A limit, because each parent that waits for the next program occupies memory.
_MAX_PARENTS = 3
_INT = struct.Struct("i")


class _Parent:
    """A process that imports torch and then forks a child for each program."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The parent gets this module as text, because importing it would import the package under test.
        command = [sys.executable, "-c", Path(__file__).read_text(encoding="utf-8") + "\n_serve()\n"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )

    def run(self, request: dict[str, Any], timeout: float) -> int:
        """Run a program in a fork and return its status."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        child = self._read(300)  # torch may have to be read from a slow disk
        try:
            return self._read(timeout)
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise

    def _read(self, timeout: float) -> int:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.end()
            raise subprocess.TimeoutExpired(self._process.args, timeout)
        packed = self._process.stdout.read(_INT.size)
        if not packed:
            self._errors.seek(0)
            raise RuntimeError(f"the process that imports torch has ended: {self._errors.read()[-3000:]}")
        return int(_INT.unpack(packed)[0])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


_parents: dict[tuple[tuple[str, str], ...], _Parent] = {}


@atexit.register
def _end_parents() -> None:
    while _parents:
        _parents.popitem()[1].end()


def begins_with_torch(code: str) -> bool:
    """Return whether a program imports torch before it does anything else."""
    return re.match(r"\s*import [\w, ]*\btorch\b", code) is not None


def run(
    code: str, environment: Mapping[str, str], *arguments: str, timeout: float, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run Python code as ``python -c`` does, in a process that has imported torch in this environment."""
    key = tuple(sorted((name, value) for name, value in environment.items() if not _READ_LATER.match(name)))
    # The dict is in the order of use, the parent used last at its end.
    parent = _parents.pop(key, None) or _Parent(environment)
    while len(_parents) >= _MAX_PARENTS:
        _parents.pop(next(iter(_parents))).end()
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        request = {"code": code, "arguments": arguments, "environment": dict(environment), "cwd": str(cwd)}
        status = parent.run({**request, "output": str(output), "errors": str(errors)}, timeout)
        _parents[key] = parent
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in (output, errors))
        return subprocess.CompletedProcess([sys.executable, "-c", code, *arguments], status, *texts)


def _serve() -> None:
    """Run the parent: import torch, and fork a child for each line of standard input. Write the child's pid and its status."""
    results = os.dup(1)
    os.dup2(2, 1)  # torch may print
    importlib.import_module("torch")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(results)
            _run_child(json.loads(line))
            return
        os.write(results, _INT.pack(child))
        os.write(results, _INT.pack(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)  # finalizing torch would take seconds


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
