"""``python -m accelerator check`` as torchrun starts it: several ranks, and rank 0 prints one table."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

import accelerator
from accelerator._command import cluster_check
from accelerator._command.check import Checked, Result
from tests.support import module, plain_environment, simulated_environment
from tests.support.discovery import on_simulated_gpus

pytestmark = pytest.mark.xdist_group("cluster")

RANKS = 3


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


# Ranks that run this program wait 2 seconds after their deadline, instead of 10.
GRACE_S = 2.0
SHORT_GRACE = f"from accelerator._command import cluster_check; cluster_check._GRACE_S = {GRACE_S}"


def start(
    environment: dict[str, str],
    size: int,
    ranks: list[int],
    *arguments: str,
    prelude: str = "",
    late: float = 0.0,
    **changed: dict[int, str],
) -> Any:
    """Start ranks as a launcher does. The first rank starts ``late`` seconds after the others.

    Return the output of the first rank, the error output of each rank, and the exit statuses.
    """
    port = str(free_port())

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        if rank == ranks[0]:
            time.sleep(late)
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {name: values[rank] for name, values in changed.items() if rank in values}
        return module("accelerator", {**environment, **variables}, "check", *arguments, prelude=prelude)

    with ThreadPoolExecutor(len(ranks)) as threads:
        done = list(threads.map(run, ranks))
    assert [each.stdout for each in done[1:]] == [""] * (len(ranks) - 1)
    return done[0].stdout, [each.stderr for each in done], [each.returncode for each in done]


def rows(table: str) -> dict[int, list[str]]:
    return {int(line.split()[0]): re.split(r"  +", line.strip()) for line in table.splitlines() if re.match(r" +\d+  ", line)}


class Passed(NamedTuple):
    """The results of a run of two ranks that both pass, and its duration."""

    printed: str
    errors: list[str]
    statuses: list[int]
    seconds: float


@pytest.fixture(scope="module")
def two_ranks() -> Passed:
    begin = time.monotonic()
    printed, errors, statuses = start(plain_environment(ACCELERATOR_BACKEND="cpu"), 2, [0, 1], "--timeout", "200")
    return Passed(printed, errors, statuses, time.monotonic() - begin)


@pytest.mark.slow
@on_simulated_gpus
def test_torchrun_with_every_rank_passing() -> None:
    environment = {**simulated_environment(gpus=RANKS, memory="1GiB"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-port", str(free_port()), "-m", "accelerator", "check", "--timeout", "200"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == f"{RANKS} ranks on 1 host: {RANKS} passed, 0 failed, 0 missing"
    table = rows(done.stdout)
    assert [table[rank][2] for rank in range(RANKS)] == [f"cuda:{rank}" for rank in range(RANKS)]
    assert len({table[rank][3] for rank in range(RANKS)}) == RANKS
    assert done.stdout.splitlines()[-1] == f"✓ all-reduce: {RANKS} ranks over nccl"
    assert "differs" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
@on_simulated_gpus
def test_nodes_of_a_simulated_cluster() -> None:
    command = [sys.executable, "-m", "accelerator", "simulate", "--nodes", "2", "--gpus", "1", "--memory", "1GiB", "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "-m", "accelerator", "check", "--timeout", "200"]
    environment = {**plain_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[node 0] ") for line in done.stdout.splitlines()]
    assert lines[0] == "2 ranks on 2 hosts: 2 passed, 0 failed, 0 missing"
    assert [row[1] for row in rows("\n".join(lines)).values()] == ["node0", "node1"]
    assert lines[-1] == "✓ all-reduce: 2 ranks over nccl"
    assert "differs" not in done.stdout


@pytest.mark.slow
@on_simulated_gpus
def test_a_dead_device_and_a_rank_that_never_starts(two_ranks: Passed) -> None:
    environment = simulated_environment(gpus=RANKS, memory="1GiB", errors={"cuMemAlloc*@1": 2})
    missing = RANKS - 1
    timeout = 3 * two_ranks.seconds * missing / 2
    begin = time.monotonic()
    printed, errors, statuses = start(environment, RANKS, list(range(missing)), "--timeout", str(timeout))
    assert time.monotonic() - begin >= timeout
    assert statuses == [1] * missing
    # torch 2.14 and newer warn of memory that the driver refuses.
    assert [line for error in errors for line in error.splitlines() if "CUDACachingAllocator.cpp" not in line] == []
    lines = printed.splitlines()
    assert lines[0] == f"{RANKS} ranks on 1 host: {missing - 1} passed, 1 failed, 1 missing"
    table = rows(printed)
    assert table[missing] == [str(missing), "missing"]
    assert table[1][-1].endswith(" failed")
    assert all(table[rank][-1].endswith(" passed") for rank in range(missing) if rank != 1)
    assert [line for line in lines if line.startswith("✗ rank 1: ")]
    assert f"✗ rank {missing}: no answer by the deadline" in lines
    assert lines[-1] == "no all-reduce: it needs every rank, and none may have failed"
    assert max(map(len, lines)) <= 80


def test_on_the_cpu(two_ranks: Passed) -> None:
    assert (two_ranks.statuses, two_ranks.errors) == ([0, 0], ["", ""])
    assert two_ranks.printed.splitlines()[-1] == "✓ all-reduce: 2 ranks over gloo"


@pytest.mark.slow
def test_every_rank_fails_with_the_all_reduce(two_ranks: Passed) -> None:
    environment = plain_environment(ACCELERATOR_BACKEND="cpu")
    timeout = str(3 * two_ranks.seconds)
    printed, _, statuses = start(environment, 2, [0, 1], "--timeout", timeout, GLOO_SOCKET_IFNAME={1: "missing"})
    assert statuses == [1, 1]
    lines = printed.splitlines()
    assert lines[0] == "2 ranks on 1 host: 2 passed, 0 failed, 0 missing"
    assert lines[-1].startswith("✗ all-reduce: rank ")


@pytest.mark.slow
def test_json_document(two_ranks: Passed) -> None:
    environment = plain_environment(ACCELERATOR_BACKEND="cpu")
    printed, _, statuses = start(environment, 3, [0, 2], "--json", "--timeout", str(4 * two_ranks.seconds))
    assert statuses == [1, 1]
    document = json.loads(printed)
    assert list(document) == ["schema", "passed", "missing", "failed", "all_reduce", "differences", "ranks"]
    assert (document["passed"], document["missing"], document["failed"], document["all_reduce"]) == (False, [1], [], None)
    assert document["ranks"][1] == {"rank": 1, "passed": False, "missing": True}
    assert [document["ranks"][rank]["passed"] for rank in (0, 2)] == [True, True]


@pytest.mark.slow
def test_ranks_wait_for_a_late_rank_0(two_ranks: Passed) -> None:
    # Rank 0 waits for rank 1, which is missing. So it answers rank 2 only at its own deadline.
    environment, late = plain_environment(ACCELERATOR_BACKEND="cpu"), 2 * GRACE_S
    # Rank 2 gives up if rank 0's store is not there by the deadline, so a slow machine needs much more than the delay.
    timeout = late + 10 + 3 * two_ranks.seconds
    printed, errors, statuses = start(environment, 3, [0, 2], "--timeout", str(timeout), prelude=SHORT_GRACE, late=late)
    assert errors == ["", ""]
    assert statuses == [1, 1]
    assert printed.splitlines()[0] == "3 ranks on 1 host: 2 passed, 0 failed, 1 missing"


@pytest.mark.slow
def test_rank_0_that_does_not_respond_is_reported() -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    # Imitates a rank 0 that hangs: its store exists and stays empty.
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment = plain_environment(ACCELERATOR_BACKEND="cpu", **variables)
    done = module("accelerator", environment, "check", "--timeout", "5", prelude=SHORT_GRACE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "python -m accelerator check: rank 1: rank 0 did not answer by the deadline\n"


@on_simulated_gpus
def test_differences_between_ranks() -> None:
    environment = simulated_environment(gpus=2)
    printed, _, statuses = start(
        environment,
        3,
        [0, 1, 2],
        "--timeout",
        "100",
        LOCAL_RANK={0: "0", 1: "0", 2: "5"},
        ACCELERATOR_SIM_DRIVER_VERSION={1: "1.2.3"},
        SLURMD_NODENAME={0: "node0", 1: "node0", 2: "node1"},
    )
    assert statuses == [1, 1, 1]
    assert printed.splitlines()[0] == "3 ranks on 2 hosts: 2 passed, 1 failed, 0 missing"
    assert [row[1] for row in rows(printed).values()] == ["node0", "node0", "node1"]
    assert "LOCAL_RANK is 5, and 2 devices are visible" in printed
    assert "differs: driver is 595.45.04 on ranks 0, 2, 1.2.3 on rank 1" in printed
    assert re.search(r"differs: ranks 0-1 share\s+GPU-\S+\s+on\s+node0", printed)


@pytest.mark.slow
def test_missing_rank_0_is_reported() -> None:
    printed, errors, statuses = start(plain_environment(ACCELERATOR_BACKEND="cpu"), 2, [1], "--timeout", "5")
    assert (printed, statuses) == ("", [1])
    assert "rank 1: nobody answers at 127.0.0.1:" in errors[0]
    assert errors[0].splitlines()[-1].startswith("python -m accelerator check: rank 1")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, as by torchrun, but MASTER_ADDR is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "the launcher's variables are invalid"),
    ],
)
def test_invalid_variables(variables: dict[str, str], message: str) -> None:
    command = [sys.executable, "-m", "accelerator", "check"]
    done = subprocess.run(command, env=plain_environment(**variables), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


# ---- Rank 0's table and document, from what the ranks have written to the store. ----


class FakeStore:
    """A store of which the others have written their part."""

    def __init__(self, **values: Any) -> None:
        self.values = {name: json.dumps(value).encode() for name, value in values.items()}

    def check(self, names: list[str]) -> bool:
        return all(name in self.values for name in names)

    def get(self, name: str) -> bytes:
        return self.values[name]

    def set(self, name: str, value: str) -> None:
        self.values[name] = value.encode()


def row(rank: int, *problems: str, **changed: Any) -> dict[str, Any]:
    """Return the result of a rank that has passed, or in which these areas failed."""
    return {
        "rank": rank,
        "host": f"host{rank // 2}",
        "device": f"cuda:{rank % 2}",
        "name": "X",
        "uuid": f"GPU-0123456789-{rank}",
        "driver": "580.1",
        "torch": "2.14.0",
        "python": "3.11.7",
        "accelerator": "1.0",
        "missing": False,
        "passed": not problems,
        "areas": [{"area": area, "problem": None} for area in ("discovery", "memory", "memory", "random")],
        "failed": [problem.partition(":")[0] for problem in problems],
        "problems": [f"cuda: {problem}" for problem in problems],
        **changed,
    }


RESULTS = [
    row(0, uuid=None, device="cpu"),
    row(1, "memory: full"),
    row(3, "memory: full", "random: wrong", torch="2.13.0", python="3.12.1"),
    row(4, driver=None, host="a-host-with-a-very-long-name"),
    row(5, host="a-host-with-a-very-long-name", uuid="GPU-0123456789-4", torch="2.13.0"),
    row(6),
]
TABLE = """
8 ranks on 4 hosts: 4 passed, 2 failed, 2 missing

rank  host            device  UUID          driver  torch   areas
   0  host0           cpu                   580.1   2.14.0  3 passed
   1  host0           cuda:1  GPU-01234567  580.1   2.14.0  memory failed
   2                                                        missing
   3  host1           cuda:1  GPU-01234567  580.1   2.13.0  2 failed
   4  a-host-…g-name  cuda:0  GPU-01234567          2.14.0  3 passed
   5  a-host-…g-name  cuda:1  GPU-01234567  580.1   2.13.0  3 passed
   6  host3           cuda:0  GPU-01234567  580.1   2.14.0  3 passed
   7                                                        missing
✗ ranks 1, 3: cuda: memory: full
✗ rank 3: cuda: random: wrong
✗ ranks 2, 7: no answer by the deadline
"""
DIFFERENCES = [
    "driver is 580.1 on ranks 0-1, 3, 5-6, unknown on rank 4",
    "torch is 2.14.0 on ranks 0-1, 4, 6, 2.13.0 on ranks 3, 5",
    "python is 3.11.7 on ranks 0-1, 4-6, 3.12.1 on rank 3",
    "ranks 4-5 share GPU-0123456789-4 on a-host-with-a-very-long-name",
]


def lead(store: FakeStore, size: int, monkeypatch: pytest.MonkeyPatch, *, as_json: bool, reduced: str | None = None) -> int:
    """Run rank 0, whose own result is the first one; nobody comes later."""
    monkeypatch.setattr(cluster_check, "_check", lambda launch: RESULTS[0])
    monkeypatch.setattr(cluster_check, "_all_reduce", lambda *_: reduced)
    monkeypatch.setattr(cluster_check, "_exit_status", lambda status: status)  # which may end a process with threads
    monkeypatch.setattr(accelerator, "communication_backend_name", lambda: "nccl")
    monkeypatch.setenv("NO_COLOR", "1")
    store.values |= {f"left/{rank}": b"null" for rank in range(size)}
    return cluster_check._lead(store, cluster_check._Launch(0, size, 0), 0.0, as_json)


def test_table_and_document_of_ranks_that_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    others = {f"checked/{result['rank']}": result for result in RESULTS[1:]}
    store = FakeStore(**others)
    assert lead(store, 8, monkeypatch, as_json=False) == 1
    assert store.values["next"] == b"done:1"
    last = "no all-reduce: it needs every rank, and none may have failed"
    expected = [*TABLE[1:].splitlines(), *(f"differs: {text}" for text in DIFFERENCES), last]
    assert capsys.readouterr().out.splitlines() == expected
    assert lead(FakeStore(**others), 8, monkeypatch, as_json=True) == 1
    by_rank = {result["rank"]: result for result in RESULTS}
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "passed": False,
        "missing": [2, 7],
        "failed": [1, 3],
        "all_reduce": None,
        "differences": DIFFERENCES,
        "ranks": [by_rank.get(rank, {"rank": rank, "passed": False, "missing": True}) for rank in range(8)],
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_a_missing_rank_is_a_failure(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FakeStore(**{"checked/2": row(2)})
    assert lead(store, 3, monkeypatch, as_json=as_json) == 1
    assert store.values["next"] == b"done:1"
    assert not as_json or not json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize(
    ("reduced", "problem"),
    [
        ((None, None, None), None),
        ((None, "the sum is 1, not 6", None), "rank 1: the sum is 1, not 6"),
        (("late", None, "later"), "rank 0: late; rank 2: later"),
        ((None,), "ranks 1-2: no answer"),
        ((None, None), "rank 2: no answer"),
    ],
)
def test_the_all_reduce_decides_too(
    reduced: tuple[str | None, ...], problem: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {f"checked/{rank}": row(rank) for rank in (1, 2)} | {
        f"reduced/{rank}": text for rank, text in enumerate(reduced) if rank
    }
    status, whole = int(problem is not None), "3 ranks over nccl"
    store = FakeStore(**values)
    assert lead(store, 3, monkeypatch, as_json=False, reduced=reduced[0]) == status
    assert store.values["next"] == f"done:{status}".encode()
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == (
        "3 ranks on 2 hosts: 3 passed, 0 failed, 0 missing",
        f"✗ all-reduce: {problem}" if problem else f"✓ all-reduce: {whole}",
    )
    assert lead(FakeStore(**values), 3, monkeypatch, as_json=True, reduced=reduced[0]) == status
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["missing"], document["failed"]) == (not status, [], [])
    assert document["all_reduce"] == {"saw": None if problem else whole, "problem": problem}


@pytest.mark.parametrize(("count", "local_rank", "index"), [(0, 0, 0), (1, 3, 0), (4, 3, 3), (2, 0, 0), (2, 2, None)])
def test_a_rank_checks_the_device_of_its_local_rank(
    count: int, local_rank: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may make one device visible to each rank."""
    empty = accelerator.VisibleDevice(*[None] * len(accelerator.VisibleDevice._fields))  # type: ignore[arg-type]
    devices = tuple(empty._replace(index=i, name=f"X{i}", uuid=f"GPU-{i}") for i in range(count))
    areas = (Result("memory", "cuda", None, "full"), Result("random", "cuda", "saw", None), Result("memory", "cuda", None, "x"))
    asked: list[int | None] = []

    def run(only: int | None = None) -> Checked:
        asked.append(only)
        return Checked("X", devices, areas, "it is dead")

    monkeypatch.setattr(cluster_check.check, "run", run)
    monkeypatch.setattr(accelerator, "visible_devices", lambda: devices)
    monkeypatch.setattr(accelerator, "device_count", lambda: count)
    monkeypatch.setattr(accelerator, "driver_version", lambda: "580.1")
    monkeypatch.setattr(accelerator, "device_name", lambda index=None: "cpu" if index is None else f"cuda:{index}")
    monkeypatch.setattr(cluster_check, "_host", lambda: "host")
    result = cluster_check._check(cluster_check._Launch(5, 8, local_rank))
    assert asked == ([] if index is None else [index])
    has_device, build = index is not None and count > 0, cluster_check.torch_build.read()
    assert result == {
        "rank": 5,
        "host": "host",
        "device": f"cuda:{index}" if has_device else "cpu" if asked else None,
        "name": f"X{index}" if has_device else None,
        "uuid": f"GPU-{index}" if has_device else None,
        "driver": "580.1",
        "torch": build and build.version,
        "python": ".".join(map(str, sys.version_info[:3])),
        "accelerator": accelerator.__version__,
        "missing": False,
        "passed": False,
        "areas": [area._asdict() for area in areas] if asked else [],
        "failed": ["devices", "memory"] if asked else ["devices"],
        "problems": ["it is dead", "cuda: memory: full", "cuda: memory: x"]
        if asked
        else ["LOCAL_RANK is 2, and 2 devices are visible"],
    }
