"""``python -m accelerator check`` as torchrun starts it: several processes, one table."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest

from tests.support import plain_environment, simulated_environment
from tests.support.discovery import on_simulated_gpus

# A node's eight where everything is tested; three show the same in less time.
RANKS = 8 if os.environ.get("ACCELERATOR_TEST_ALL") == "1" else 3


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


# Followers that wait no longer than this beyond their deadline, in place of ten seconds.
GRACE_S = 2.0
HASTY = (
    "-c",
    "import sys; from accelerator import __main__; from accelerator._command import cluster_check; "
    f"cluster_check._GRACE_S = {GRACE_S}; sys.exit(__main__.main(sys.argv[1:]))",
)


def start(
    environment: dict[str, str],
    size: int,
    ranks: list[int],
    *arguments: str,
    program: tuple[str, ...] = ("-m", "accelerator"),
    late: float = 0.0,
    **changed: dict[int, str],
) -> Any:
    """Start ranks as a launcher does, the first so many seconds after the others.

    Gives what the first printed, what all of them had to complain of, and all exit statuses.
    """
    port, command = str(free_port()), [sys.executable, *program, "check", *arguments]
    processes: list[subprocess.Popen[str]] = []
    for rank in [*ranks[1:], ranks[0]] if late else ranks:
        if late and rank == ranks[0]:
            time.sleep(late)
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {name: values[rank] for name, values in changed.items() if rank in values}
        of_rank = {**environment, **variables}
        processes.append(subprocess.Popen(command, env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    if late:
        processes.insert(0, processes.pop())
    said = [process.communicate(timeout=240) for process in processes]
    assert [out for out, _ in said[1:]] == [""] * (len(ranks) - 1)
    return said[0][0], [error for _, error in said], [process.returncode for process in processes]


def rows(table: str) -> dict[int, list[str]]:
    return {int(line.split()[0]): re.split(r"  +", line.strip()) for line in table.splitlines() if re.match(r" +\d+  ", line)}


class Well(NamedTuple):
    """Two ranks that have nothing to complain of, and how long they took."""

    said: str
    errors: list[str]
    statuses: list[int]
    seconds: float


@pytest.fixture(scope="module")
def two_ranks() -> Well:
    begin = time.monotonic()
    said, errors, statuses = start(plain_environment(ACCELERATOR_BACKEND="cpu"), 2, [0, 1], "--timeout", "200")
    return Well(said, errors, statuses, time.monotonic() - begin)


@on_simulated_gpus
def test_torchrun_with_all_well() -> None:
    environment = {**simulated_environment(gpus=RANKS, memory="1GiB"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-port", str(free_port()), "-m", "accelerator", "check", "--timeout", "200"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == f"{RANKS} ranks on 1 host: {RANKS} well, 0 failed, 0 missing"
    table = rows(done.stdout)
    assert [table[rank][2] for rank in range(RANKS)] == [f"cuda:{rank}" for rank in range(RANKS)]
    assert len({table[rank][3] for rank in range(RANKS)}) == RANKS
    assert done.stdout.splitlines()[-1] == f"✓ all-reduce: {RANKS} ranks over nccl"
    assert "differs" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@on_simulated_gpus
def test_a_dead_device_and_a_rank_that_never_starts(two_ranks: Well) -> None:
    environment = simulated_environment(gpus=RANKS, memory="1GiB", errors={"cuMemAlloc*@1": 2})
    missing = RANKS - 1
    timeout = 3 * two_ranks.seconds * missing / 2
    begin = time.monotonic()
    said, errors, statuses = start(environment, RANKS, list(range(missing)), "--timeout", str(timeout))
    assert timeout <= time.monotonic() - begin < 2 * timeout + 10
    assert statuses == [1] * missing
    assert errors == [""] * missing
    lines = said.splitlines()
    assert lines[0] == f"{RANKS} ranks on 1 host: {missing - 1} well, 1 failed, 1 missing"
    table = rows(said)
    assert table[missing] == [str(missing), "missing"]
    assert table[1][-1].endswith(" failed")
    assert all(table[rank][-1].endswith(" passed") for rank in range(missing) if rank != 1)
    assert [line for line in lines if line.startswith("✗ rank 1: ")]
    assert f"✗ rank {missing}: no answer by the deadline" in lines
    assert lines[-1] == "no all-reduce, as not every rank is there and well"
    assert max(map(len, lines)) <= 80


def test_on_the_cpu(two_ranks: Well) -> None:
    assert (two_ranks.statuses, two_ranks.errors) == ([0, 0], ["", ""])
    assert two_ranks.said.splitlines()[-1] == "✓ all-reduce: 2 ranks over gloo"


def test_document(two_ranks: Well) -> None:
    environment = plain_environment(ACCELERATOR_BACKEND="cpu")
    said, _, statuses = start(environment, 3, [0, 2], "--json", "--timeout", str(2 * two_ranks.seconds))
    assert statuses == [1, 1]
    told = json.loads(said)
    assert list(told) == ["schema", "passed", "missing", "failed", "all_reduce", "differences", "ranks"]
    assert (told["passed"], told["missing"], told["failed"], told["all_reduce"]) == (False, [1], [], None)
    assert told["ranks"][1] == {"rank": 1, "passed": False, "missing": True}
    assert [told["ranks"][rank]["passed"] for rank in (0, 2)] == [True, True]


def test_a_late_rank_0_is_waited_for_as_long_as_it_waits_itself(two_ranks: Well) -> None:
    # As rank 1 is missing, rank 0 has its word for rank 2 only at its own deadline.
    environment, timeout, late = plain_environment(ACCELERATOR_BACKEND="cpu"), two_ranks.seconds, 2 * GRACE_S
    said, errors, statuses = start(environment, 3, [0, 2], "--timeout", str(timeout + late), program=HASTY, late=late)
    assert errors == ["", ""]
    assert statuses == [1, 1]
    assert said.splitlines()[0] == "3 ranks on 1 host: 2 well, 0 failed, 1 missing"


def test_a_rank_0_that_says_nothing() -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    # As when rank 0 hangs: its store is there, and not a word in it.
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    command = [sys.executable, *HASTY, "check", "--timeout", "5"]
    environment = plain_environment(ACCELERATOR_BACKEND="cpu", **variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "python -m accelerator check: rank 1: no word from rank 0 by the deadline\n"


@on_simulated_gpus
def test_what_ranks_have_not_in_common() -> None:
    environment = simulated_environment(gpus=2)
    said, _, statuses = start(
        environment,
        3,
        [0, 1, 2],
        "--timeout",
        "100",
        LOCAL_RANK={0: "0", 1: "0", 2: "5"},
        ACCELERATOR_SIM_DRIVER_VERSION={1: "1.2.3"},
    )
    assert statuses == [1, 1, 1]
    assert "LOCAL_RANK is 5, and 2 devices are visible" in said
    assert "differs: driver is 590.44.01 on ranks 0, 2, 1.2.3 on rank 1" in said
    assert re.search(r"differs: ranks 0-1 share\s+GPU-", said)


def test_without_rank_0() -> None:
    said, errors, statuses = start(plain_environment(ACCELERATOR_BACKEND="cpu"), 2, [1], "--timeout", "5")
    assert (said, statuses) == ("", [1])
    assert "rank 1: nobody answers at 127.0.0.1:" in errors[0]
    assert errors[0].splitlines()[-1].startswith("python -m accelerator check: rank 1")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, as by torchrun, and MASTER_ADDR is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "the launcher's variables make no sense"),
    ],
)
def test_variables_that_make_no_sense(variables: dict[str, str], message: str) -> None:
    command = [sys.executable, "-m", "accelerator", "check"]
    done = subprocess.run(command, env=plain_environment(**variables), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
