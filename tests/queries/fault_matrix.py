"""Call every query on one machine of the fault matrix, and write the results into a file.

The queries run in the main process, in a thread, in a forked child, in a forked child of a process that initialized the driver,
and in a fresh process. A forked child that does nothing else calls the driver, for comparison.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerator as acc
from accelerator._machine.limits import RETRY_AFTER_S

DEADLINE_S = 60
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the text of its error: "ESCAPED ..." for any error but RuntimeError."""
    try:
        return call()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    except BaseException as error:
        return f"ESCAPED {type(error).__name__}: {error}"


def call_queries() -> dict[str, Any]:
    """Return the results of every kind of query."""
    first = outcome(acc.device_count)
    devices = acc.visible_devices()
    return {
        "count": [first, len(devices), outcome(acc.device_count)],
        "devices": [[d.uuid, d.total_memory, d.compute_capability] for d in devices],
        "available": outcome(acc.is_available),
        "reason": outcome(acc.unavailable_reason),
        "bad fork": outcome(acc.is_in_bad_fork),
        "memory": outcome(lambda: acc.get_memory_info()[1]),
        "total": outcome(acc.total_memory),
        "capability": outcome(acc.compute_capability),
        "utilization": outcome(acc.utilization),
        "telemetry": outcome(acc.telemetry),
        "physical": outcome(lambda: len(acc.physical_devices())),
        "others": [outcome(lambda: acc.get_device_name()), outcome(acc.numa_node), outcome(acc.driver_version)],
        "torch": "torch" in sys.modules,
        "pid": os.getpid(),
    }


def in_child(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a forked child, or "HANG" after the deadline."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(DEADLINE_S)
        with os.fdopen(write, "w") as pipe:
            json.dump(outcome(function), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return "HANG"
    return json.loads(text) if status == 0 else f"ESCAPED status {status}"


def in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a thread, or "HANG" after the deadline."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(outcome(function)), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return results[0] if results else "HANG"


def driver() -> list[str] | int:
    """Return the UUIDs of the devices that the driver enumerates, the error code of cuInit, or -1 without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return -1
    count, handle, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    code = library.cuInit(0)
    if code:
        return [] if code == 100 else code
    library.cuDeviceGetCount(ctypes.byref(count))
    uuids: list[str] = []
    for ordinal in range(count.value):
        library.cuDeviceGet(ctypes.byref(handle), ordinal)
        library.cuDeviceGetUuid_v2(ctypes.byref(uuid), handle)
        uuids.append(bytes(uuid).hex())
    return uuids


def after_initialization() -> Any:
    """Return whether the driver initialized here, and the results in a child forked afterwards."""
    enumerated = driver()  # empty if cuInit returned "no device", which initializes nothing
    return [isinstance(enumerated, list) and bool(enumerated), in_child(call_queries)]


def put(environment: dict[str, str]) -> None:
    """Set the variables of this process, and remove those that the environment does not contain."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)


def has_children() -> bool:
    """Return whether this process has a child, running or dead."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def main(task: Path) -> None:
    """Run the queries in each environment of a task, and write the results into a file beside it."""
    options = json.loads(task.read_text())
    rows: list[dict[str, Any]] = []
    early = None
    if options["late"]:
        early = outcome(acc.device_count)
        os.symlink(options["late"], Path(options["folder"]) / "libcuda.so.1")
        time.sleep(RETRY_AFTER_S + 0.1)  # the failure is cached so long
    for environment in options["environments"]:
        put(environment)
        results = {"truth": in_child(driver), "main": outcome(call_queries)}
        if not options["spawned"]:
            results["thread"] = in_thread(call_queries)
            results["forked"] = in_child(call_queries)
            results["forked after initialization"] = in_child(after_initialization)
        rows.append({**results, "left": has_children()})
    put({})
    spawned = None
    if not options["spawned"]:
        other = task.with_suffix(".spawned")
        other.write_text(json.dumps({**options, "spawned": True, "late": None}))
        subprocess.run(
            [sys.executable, "-m", "tests.queries.fault_matrix", other], check=True, timeout=300, stdout=subprocess.DEVNULL
        )
        spawned = json.loads(other.with_suffix(".results").read_text())["output"]
    task.with_suffix(".results").write_text(
        json.dumps({"output": rows, "early": early, "spawned": spawned, "pid": os.getpid()})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
