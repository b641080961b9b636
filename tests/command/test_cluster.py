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
    printed, _, statuses = start(environment, 3, [0, 2], "--json", "--timeout", str(2 * two_ranks.seconds))
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
