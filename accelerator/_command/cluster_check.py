"""``check`` under a launcher such as torchrun: each rank checks its own device, and rank 0 prints one table."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from .._machine import torch_build
from . import acc, all_reduce, check, report_text
from .terminal import has_color, styled, write

_USAGE = 2

# How much longer the other ranks wait than rank 0, which prints its table at the deadline.
_GRACE_S = 10.0
_POLL_S = 0.05
_DONE = "done"


class _Launch(NamedTuple):
    """This process among the ranks, from the launcher's variables."""

    rank: int
    size: int
    local_rank: int


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def main(*, as_json: bool, timeout: float) -> int:
    """Check this rank's device and report together with the other ranks.

    Args:
        as_json: whether rank 0 prints a JSON document instead of a table.
        timeout: how long rank 0 waits for the other ranks, in seconds, counted from its start.

    Returns:
        0 if every rank answered and all areas passed, 1 if not, 2 if the launcher's variables are invalid.
    """
    deadline = time.monotonic() + timeout
    check.silence_numpy_warning()
    try:
        launch = _Launch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not 0 <= launch.rank < launch.size:
            raise ValueError(f"RANK is {launch.rank} and WORLD_SIZE {launch.size}")
    except KeyError as error:
        return _fail(f"RANK and WORLD_SIZE are set, as by torchrun, but {error.args[0]} is not", _USAGE)
    except ValueError as error:
        return _fail(f"the launcher's variables are invalid: {error}", _USAGE)
    # This command reports lost stores and connections itself; torch's C++ would log them too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        store = _store(address, port, launch, timeout)
    except Exception as error:  # the store may be the launcher's, which may raise anything
        return _fail(f"rank {launch.rank}: nobody answers at {address}:{port}: {all_reduce.in_one_line(error)}", 1)
    try:
        if launch.rank == 0:
            return _lead(store, launch, deadline, as_json)
        # The time counts from when the store answered: rank 0 may have opened it long after this rank started.
        return _follow(store, launch, time.monotonic() + timeout)
    except Exception as error:  # the store went away meanwhile
        return _fail(f"rank {launch.rank}: the store at {address}:{port} was lost: {all_reduce.in_one_line(error)}", 1)


def _store(address: str, port: int, launch: _Launch, timeout: float) -> Any:
    import torch.distributed

    dist: Any = torch.distributed
    # torchrun's agent already runs a store at this address; each attempt uses a prefix of its own.
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_host = launch.rank == 0 and not has_agent_store
    # Do not wait for all ranks to join: this check reports those that do not.
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, launch.size, is_master=is_host, timeout=limit, wait_for_workers=False)
    return dist.PrefixStore(f"accelerator/check/{attempt}", store)


def _lead(store: Any, launch: _Launch, deadline: float, as_json: bool) -> int:
    """Run rank 0: gather the results, print them, run the all-reduce if all ranks passed, and let the others exit."""
    results = {0: _check(launch), **_gather(store, "checked", launch, deadline)}
    missing = [rank for rank in range(launch.size) if rank not in results]
    failed = [rank for rank in sorted(results) if not results[rank]["passed"]]
    if not as_json:
        write(_table(results, launch, missing, failed))
    reduced: str | None = None
    problem: str | None = None
    if not missing and not failed:
        store.set("next", "reduce")
        problems = {0: _all_reduce(store, launch, deadline), **_gather(store, "reduced", launch, deadline)}
        silent = [rank for rank in range(launch.size) if rank not in problems]
        wrong = {f"rank {rank}: {problems[rank]}" for rank in sorted(problems) if problems[rank]}
        wrong |= {f"{_ranks(silent)}: no answer"} if silent else set()
        reduced = f"{launch.size} ranks over {acc.communication_backend_name()}"
        problem = "; ".join(sorted(wrong)) or None
    status = int(bool(missing or failed or problem))
    if as_json:
        everyone = [results.get(rank, {"rank": rank, "passed": False, "missing": True}) for rank in range(launch.size)]
        collective = None if reduced is None else {"saw": None if problem else reduced, "problem": problem}
        document = {"schema": 1, "passed": not status, "missing": missing, "failed": failed, "all_reduce": collective}
        write(json.dumps({**document, "differences": _differences(results), "ranks": everyone}, indent=2) + "\n")
    elif reduced is None:
        write("no all-reduce: it needs every rank, and none may have failed\n")
    else:
        write(_marked(problem is None, f"all-reduce: {problem or reduced}") + "\n")
    store.set("next", f"{_DONE}:{status}")
    _await_leaving(store, launch, [rank for rank in results if rank])
    return _exit_status(status)


def _follow(store: Any, launch: _Launch, deadline: float) -> int:
    """Run another rank: publish the result, join the all-reduce if rank 0 starts it, and exit when rank 0 ends the check."""
    store.set(f"checked/{launch.rank}", json.dumps(_check(launch)))
    has_reduced = False
    while time.monotonic() < deadline + _GRACE_S:
        command = store.get("next").decode() if store.check(["next"]) else ""
        if command == "reduce" and not has_reduced:
            has_reduced = True
            store.set(f"reduced/{launch.rank}", json.dumps(_all_reduce(store, launch, deadline)))
        elif command.startswith(_DONE):
            store.set(f"left/{launch.rank}", "null")
            return _exit_status(int(command.partition(":")[2]))
        time.sleep(_POLL_S)
    return _exit_status(_fail(f"rank {launch.rank}: rank 0 did not answer by the deadline", 1))


def _gather(store: Any, what: str, launch: _Launch, deadline: float) -> dict[int, Any]:
    """Read the other ranks' values from the store, until all are there or the deadline comes."""
    values: dict[int, Any] = {}
    while True:
        for rank in range(1, launch.size):
            if rank not in values and store.check([f"{what}/{rank}"]):
                values[rank] = json.loads(store.get(f"{what}/{rank}"))
        if len(values) == launch.size - 1 or time.monotonic() >= deadline:
            return values
        time.sleep(_POLL_S)


def _await_leaving(store: Any, launch: _Launch, ranks: list[int]) -> None:
    """Wait until the others have read that the check is over: the store may end with this process."""
    until = time.monotonic() + _GRACE_S
    while ranks and time.monotonic() < until:
        ranks = [rank for rank in ranks if not store.check([f"left/{rank}"])]
        time.sleep(_POLL_S / 5)


def _check(launch: _Launch) -> dict[str, Any]:
    """Check this rank's device; the result is this rank's row of the table."""
    count, build = acc.device_count(), torch_build.read()
    index = 0 if count == 1 else launch.local_rank  # a launcher may make only its own device visible to each rank
    result: dict[str, Any] = {
        "rank": launch.rank,
        "host": _host(),
        "device": None,
        "name": None,
        "uuid": None,
        "driver": acc.driver_version(),
        "torch": build and build.version,
        "python": platform.python_version(),
        "accelerator": acc.__version__,
        "missing": False,
    }
    if count and index >= count:
        problem = f"LOCAL_RANK is {launch.local_rank}, and {count} devices are visible"
        return {**result, "passed": False, "areas": [], "failed": ["devices"], "problems": [problem]}
    device = acc.visible_devices()[index] if count else None
    result.update(device=acc.device_name(index if count else None))
    if device is not None:
        result.update(name=device.name, uuid=device.uuid)
    checked = check.run(index)
    return {
        **result,
        "passed": checked.passed,
        "areas": [area._asdict() for area in checked.results],
        "failed": list(
            dict.fromkeys([*(["devices"] if checked.dead else []), *(r.area for r in checked.results if r.problem)])
        ),
        "problems": check.causes(checked),
    }


def _host() -> str:
    """Return the name of this rank's machine: of a simulated one, that which Slurm would give its node."""
    node = os.environ.get("SLURMD_NODENAME") if acc.simulation.is_simulated() else None
    return node or socket.gethostname()


def _all_reduce(store: Any, launch: _Launch, deadline: float) -> str | None:
    """Take part in the all-reduce; return None if the sum was right, else the error in one line."""
    import torch.distributed

    dist: Any = torch.distributed
    seconds = max(deadline - time.monotonic(), 1.0)
    backend = acc.communication_backend_name()
    count = acc.device_count()
    index = 0 if count <= 1 else launch.local_rank
    inner = dist.PrefixStore("all-reduce", store)
    return _within(seconds, lambda: all_reduce.reduce(backend, inner, launch.rank, index, launch.size, seconds))


def _within(seconds: float, work: Callable[[], str | None]) -> str | None:
    """Return the result of a call, or an error if it does not return in time."""
    result: list[str | None] = [f"not finished within {seconds:.0f} s"]
    done = threading.Event()

    def call() -> None:
        result[0] = work()
        done.set()

    threading.Thread(target=call, daemon=True).start()
    done.wait(seconds)
    return result[0]


def _exit_status(status: int) -> int:
    """Return the status, or exit with it at once if a thread still waits for other ranks."""
    if threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _table(results: dict[int, dict[str, Any]], launch: _Launch, missing: list[int], failed: list[int]) -> str:
    color = has_color()
    rows: list[tuple[str, ...]] = [("rank", "host", "device", "UUID", "driver", "torch", "areas")]
    for rank in range(launch.size):
        result = results.get(rank)
        if result is None:
            rows.append((str(rank), "", "", "", "", "", "missing"))
            continue
        failing = result["failed"]
        passed = len({area["area"] for area in result["areas"]})
        areas = f"{failing[0] if len(failing) == 1 else len(failing)} failed" if failing else f"{passed} passed"
        uuid = (result["uuid"] or "")[:12]
        rows.append(
            (str(rank), result["host"], result["device"] or "", uuid, result["driver"] or "", result["torch"] or "", areas)
        )
    hosts = len({result["host"] for result in results.values()})
    passed_count = launch.size - len(missing) - len(failed)
    where = f"{launch.size} ranks on {hosts} {'host' if hosts == 1 else 'hosts'}"
    lines = report_text.wrapped(f"{where}: {passed_count} passed, {len(failed)} failed, {len(missing)} missing")
    lines += ["", *report_text.table(_narrowed(rows), "><<<<<<", color)]
    lines += _causes(results, missing)
    return "\n".join(lines) + "\n"


def _narrowed(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Shorten long cells so that the rows fit the width."""
    widths = (4, 14, 8, 12, 11, 13, 60)
    return [tuple(report_text.shortened(cell, width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _causes(results: dict[int, dict[str, Any]], missing: list[int]) -> list[str]:
    """The problems, each once, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(results):
        for problem in results[rank]["problems"]:
            ranks_of.setdefault(problem, []).append(rank)
    lines = [_marked(False, f"{_ranks(ranks)}: {problem}") for problem, ranks in ranks_of.items()]
    if missing:
        lines.append(_marked(False, f"{_ranks(missing)}: no answer by the deadline"))
    lines += [f"differs: {text}" for text in _differences(results)]
    return [line for text in lines for line in report_text.wrapped(text)]


def _differences(results: dict[int, dict[str, Any]]) -> list[str]:
    """Versions that differ between ranks, and ranks that share a device."""
    lines: list[str] = []
    for what in ("driver", "torch", "python", "accelerator"):
        ranks_of: dict[Any, list[int]] = {}
        for rank in sorted(results):
            ranks_of.setdefault(results[rank][what], []).append(rank)
        if len(ranks_of) > 1:
            lines.append(
                f"{what} is " + ", ".join(f"{value or 'unknown'} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            )
    sharing: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(results):
        if results[rank]["uuid"]:
            sharing.setdefault((results[rank]["host"], results[rank]["uuid"]), []).append(rank)
    lines += [f"{_ranks(ranks)} share {uuid} on {host}" for (host, uuid), ranks in sharing.items() if len(ranks) > 1]
    return lines


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    """Ranks with consecutive ones joined, as in "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _marked(good: bool, text: str) -> str:
    return f"{styled('✓' if good else '✗', 'green' if good else 'red', has_color())} {text}"


def _fail(message: str, status: int) -> int:
    print(f"python -m accelerator check: {message}", file=sys.stderr)
    return status
