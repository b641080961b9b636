"""``check`` under a launcher: each process checks its own device, and the first one prints one table of all."""

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

# How much longer than rank 0 the others wait, for it prints its table at the deadline.
_GRACE_S = 10.0
_POLL_S = 0.05
_DONE = "done"


class _Place(NamedTuple):
    """This process among the others."""

    rank: int
    size: int
    local_rank: int


def is_one() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def main(*, as_json: bool, timeout: float) -> int:
    """Check this process's device, and say with the others what is wrong where.

    Args:
        as_json: whether rank 0 prints a document in place of a table.
        timeout: how long rank 0 waits for the others, in seconds, from its start on.

    Returns:
        0 if every rank is there and all of its areas passed, 1 if not, 2 where the launcher's variables make no sense.
    """
    deadline = time.monotonic() + timeout
    check.keep_numpy_quiet()
    try:
        place = _Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not 0 <= place.rank < place.size:
            raise ValueError(f"RANK is {place.rank} and WORLD_SIZE {place.size}")
    except KeyError as error:
        return _complain(f"RANK and WORLD_SIZE are set, as by torchrun, and {error.args[0]} is not", _USAGE)
    except ValueError as error:
        return _complain(f"the launcher's variables make no sense: {error}", _USAGE)
    # What torch's C++ has to say of stores and connections that end is said here in words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        store = _store(address, port, place, timeout)
    except Exception as error:  # the store of rank 0 or of the launcher, which may be anything
        return _complain(f"rank {place.rank}: nobody answers at {address}:{port}: {all_reduce.in_one_line(error)}", 1)
    try:
        if place.rank == 0:
            return _lead(store, place, deadline, as_json)
        # Counted from when the store was there, which rank 0 may have come to open long after this one was started.
        return _follow(store, place, time.monotonic() + timeout)
    except Exception as error:  # it went away in the middle
        return _complain(f"rank {place.rank}: the store at {address}:{port} was lost: {all_reduce.in_one_line(error)}", 1)


def _store(address: str, port: int, place: _Place, timeout: float) -> Any:
    import torch.distributed

    dist: Any = torch.distributed
    # torchrun's agent has a store at this place already, and a new one for each attempt.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosted = place.rank == 0 and not of_agent
    # Without waiting for all to join, as who does not is what this is to find out.
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, place.size, is_master=hosted, timeout=limit, wait_for_workers=False)
    return dist.PrefixStore(f"accelerator/check/{attempt}", store)


def _lead(store: Any, place: _Place, deadline: float, as_json: bool) -> int:
    """Be rank 0."""
    own = _checked(place)
    told = {0: own, **_gathered(store, "checked", place, deadline)}
    missing = [rank for rank in range(place.size) if rank not in told]
    failed = [rank for rank in sorted(told) if not told[rank]["passed"]]
    if not as_json:
        write(_table(told, place, missing, failed))
    reduced: str | None = None
    problem: str | None = None
    if not missing and not failed:
        store.set("next", "reduce")
        problems = {0: _reduced(store, place, deadline), **_gathered(store, "reduced", place, deadline)}
        silent = [rank for rank in range(place.size) if rank not in problems]
        wrong = {f"rank {rank}: {problems[rank]}" for rank in sorted(problems) if problems[rank]}
        wrong |= {f"ranks {_listed(silent)}: no answer"} if silent else set()
        reduced = f"{place.size} ranks over {acc.communication_backend_name()}"
        problem = "; ".join(sorted(wrong)) or None
    status = int(bool(missing or failed or problem))
    if as_json:
        everyone = [told.get(rank, {"rank": rank, "passed": False, "missing": True}) for rank in range(place.size)]
        all_reduce = None if reduced is None else {"saw": None if problem else reduced, "problem": problem}
        document = {"schema": 1, "passed": not status, "missing": missing, "failed": failed, "all_reduce": all_reduce}
        write(json.dumps({**document, "differences": _differences(told), "ranks": everyone}, indent=2) + "\n")
    elif reduced is None:
        write("no all-reduce, as not every rank is there and well\n")
    else:
        write(_marked(problem is None, f"all-reduce: {problem or reduced}") + "\n")
    store.set("next", f"{_DONE}:{status}")
    _await_leaving(store, place, [rank for rank in told if rank])
    return _left(status)


def _follow(store: Any, place: _Place, deadline: float) -> int:
    """Be one of the other ranks."""
    store.set(f"checked/{place.rank}", json.dumps(_checked(place)))
    last = deadline + _GRACE_S
    reduced = False
    while time.monotonic() < last:
        word = store.get("next").decode() if store.check(["next"]) else ""
        if word == "reduce" and not reduced:
            reduced = True
            store.set(f"reduced/{place.rank}", json.dumps(_reduced(store, place, deadline)))
        elif word.startswith(_DONE):
            store.set(f"left/{place.rank}", "null")
            return _left(int(word.partition(":")[2]))
        time.sleep(_POLL_S)
    return _left(_complain(f"rank {place.rank}: no word from rank 0 by the deadline", 1))


def _gathered(store: Any, what: str, place: _Place, deadline: float) -> dict[int, Any]:
    """What the other ranks put into the store under keys of their own, until all have or the deadline comes."""
    told: dict[int, Any] = {}
    while True:
        for rank in range(1, place.size):
            if rank not in told and store.check([f"{what}/{rank}"]):
                told[rank] = json.loads(store.get(f"{what}/{rank}"))
        if len(told) == place.size - 1 or time.monotonic() >= deadline:
            return told
        time.sleep(_POLL_S)


def _await_leaving(store: Any, place: _Place, ranks: list[int]) -> None:
    """Stay until the others have read that it is over, as the store may end with this process."""
    until = time.monotonic() + _GRACE_S
    while ranks and time.monotonic() < until:
        ranks = [rank for rank in ranks if not store.check([f"left/{rank}"])]
        time.sleep(_POLL_S / 5)


def _checked(place: _Place) -> dict[str, Any]:
    """What this rank found, for the table."""
    count, build = acc.device_count(), torch_build.read()
    index = 0 if count == 1 else place.local_rank  # a launcher may show each process its own device alone
    result: dict[str, Any] = {
        "rank": place.rank,
        "host": socket.gethostname(),
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
        problem = f"LOCAL_RANK is {place.local_rank}, and {count} devices are visible"
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


def _reduced(store: Any, place: _Place, deadline: float) -> str | None:
    """Take part in the all-reduce: None if the sum was right."""
    import torch.distributed

    dist: Any = torch.distributed
    seconds = max(deadline - time.monotonic(), 1.0)
    backend = acc.communication_backend_name()
    count = acc.device_count()
    index = 0 if count <= 1 else place.local_rank
    inner = dist.PrefixStore("all-reduce", store)
    return _within(seconds, lambda: all_reduce.reduce(backend, inner, place.rank, index, place.size, seconds))


def _within(seconds: float, work: Callable[[], str | None]) -> str | None:
    """What something gives that may never come back."""
    answer: list[str | None] = [f"no end within {seconds:.0f} s"]
    done = threading.Event()

    def be_done() -> None:
        answer[0] = work()
        done.set()

    threading.Thread(target=be_done, daemon=True).start()
    done.wait(seconds)
    return answer[0]


def _left(status: int) -> int:
    """The status; a thread that still waits for other ranks is not to keep this process from its end."""
    if threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _table(told: dict[int, dict[str, Any]], place: _Place, missing: list[int], failed: list[int]) -> str:
    color = has_color()
    rows: list[tuple[str, ...]] = [("rank", "host", "device", "UUID", "driver", "torch", "areas")]
    for rank in range(place.size):
        one = told.get(rank)
        if one is None:
            rows.append((str(rank), "", "", "", "", "", "missing"))
            continue
        failing = one["failed"]
        passed = len({area["area"] for area in one["areas"]})
        areas = f"{failing[0] if len(failing) == 1 else len(failing)} failed" if failing else f"{passed} passed"
        uuid = (one["uuid"] or "")[:12]
        rows.append((str(rank), one["host"], one["device"] or "", uuid, one["driver"] or "", one["torch"] or "", areas))
    hosts = len({one["host"] for one in told.values()})
    well = place.size - len(missing) - len(failed)
    where = f"{place.size} ranks on {hosts} {'host' if hosts == 1 else 'hosts'}"
    lines = report_text.wrapped(f"{where}: {well} well, {len(failed)} failed, {len(missing)} missing")
    lines += ["", *report_text.table(_narrowed(rows), "><<<<<<", color)]
    lines += _causes(told, missing)
    return "\n".join(lines) + "\n"


def _narrowed(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows with long names cut, so that they fit the width."""
    widths = (4, 14, 8, 12, 11, 13, 60)
    return [tuple(report_text.shortened(cell, width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _causes(told: dict[int, dict[str, Any]], missing: list[int]) -> list[str]:
    """What is wrong, each once, with the ranks that it is wrong on."""
    found: dict[str, list[int]] = {}
    for rank in sorted(told):
        for problem in told[rank]["problems"]:
            found.setdefault(problem, []).append(rank)
    lines = [_marked(False, f"{_ranks(ranks)}: {problem}") for problem, ranks in found.items()]
    if missing:
        lines.append(_marked(False, f"{_ranks(missing)}: no answer by the deadline"))
    lines += [f"differs: {text}" for text in _differences(told)]
    return [line for text in lines for line in report_text.wrapped(text)]


def _differences(told: dict[int, dict[str, Any]]) -> list[str]:
    """What is not the same on all hosts, and who shares a device."""
    lines: list[str] = []
    for what in ("driver", "torch", "python", "accelerator"):
        ranks_of: dict[Any, list[int]] = {}
        for rank in sorted(told):
            ranks_of.setdefault(told[rank][what], []).append(rank)
        if len(ranks_of) > 1:
            lines.append(
                f"{what} is " + ", ".join(f"{value or 'unknown'} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            )
    sharing: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(told):
        if told[rank]["uuid"]:
            sharing.setdefault((told[rank]["host"], told[rank]["uuid"]), []).append(rank)
    lines += [f"{_ranks(ranks)} share {uuid} on {host}" for (host, uuid), ranks in sharing.items() if len(ranks) > 1]
    return lines


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    """Ranks with runs of them taken together, as in "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _marked(good: bool, text: str) -> str:
    return f"{styled('✓' if good else '✗', 'green' if good else 'red', has_color())} {text}"


def _complain(message: str, status: int) -> int:
    print(f"python -m accelerator check: {message}", file=sys.stderr)
    return status
