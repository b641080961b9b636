"""The simulated NCCL between processes: correct results, no hang if a rank fails, no files left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("nccl")]

GPUS = 16
TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "e4m3", "e5m2")
SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 2, 3, 4, 5, 6
SAMPLE = {(2, "uint64"), (2, "e5m2"), (4, "float32")}
COUNTS_AND_TYPES = [
    pytest.param(count, code, id=f"{count}-{name}", marks=[] if (count, name) in SAMPLE else [pytest.mark.slow])
    for count in (2, 3, 4)
    for code, name in enumerate(TYPES)
]
"""Every type with every number of ranks. Without the slow tests, a sample."""
RANKS = [sys.executable, "-m", "tests.simulation.nccl.ranks"]
LATE_TEXTS = Path(__file__).with_name("late_texts.c")
LATE_UNLOCK = Path(__file__).with_name("late_unlock.c")
TWO_AND_FOUR = pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
NAN_CHECK = {"TORCH_NCCL_NAN_CHECK": "1", "TORCH_DIST_NAN_CHECK": "1"}
"""The second one is for torch's default process group from 2.15 on."""


class Ranks:
    """A process with torch and 16 simulated GPUs that forks the ranks of each case."""

    def __init__(self, command: list[str], **variables: str) -> None:
        environment = simulated_environment({"OMP_NUM_THREADS": "1", **variables}, gpus=GPUS, memory="1GiB")
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def reports(self, case: str, ranks: int, variables: dict[str, str] | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """Return each rank's report: its value, or NCCL's error, a traceback or an exit status; and the seconds."""
        assert self.process.stdin
        assert self.process.stdout
        order = {"case": case, "ranks": ranks, "arguments": arguments, "variables": variables or {}}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, case: str, ranks: int, variables: dict[str, str] | None = None, **arguments: Any) -> list[Any]:
        """Return the value of each rank. Fail the test if a rank has none."""
        reports = self.reports(case, ranks, variables, **arguments)
        assert all("value" in report for report in reports), reports
        return [report["value"] for report in reports]

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(timeout=30) == 0


def find_abandoned_files() -> set[str]:
    """Return this user's files of communicators that no process uses."""
    places = {Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/tmp")}
    return {str(path) for place in places for path in place.glob("accelerator-nccl-*") if is_abandoned(path)}


def is_abandoned(path: Path) -> bool:
    try:
        if path.stat().st_uid != os.geteuid():
            return False
        with path.open("rb+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path.exists()
    except (FileNotFoundError, BlockingIOError):
        return False


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(RANKS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["default", pytest.param("legacy", marks=pytest.mark.slow)])
def torch_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks with torch's default "nccl" process group, and with the one that was the default before torch 2.15."""
    if request.param == "default":
        yield request.getfixturevalue("ranks")
    else:
        made = Ranks(RANKS, TORCH_DIST_USE_NCCL2="0")
        yield made
        made.close()


@pytest.fixture(autouse=True)
def abandoned_before() -> Iterator[set[str]]:
    """Check that a test leaves no files behind. Other runs may leave some, and remove them at their next communicator."""
    before = find_abandoned_files()
    yield before
    deadline = time.monotonic() + 5
    while (remaining := find_abandoned_files() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not remaining


class TestResults:
    @pytest.mark.parametrize(("count", "type_code"), COUNTS_AND_TYPES)
    def test_reductions(self, ranks: Ranks, count: int, type_code: int) -> None:
        assert ranks.run("collective.reductions", count, type_code=type_code) == [5 * 13] * count

    @pytest.mark.parametrize(("count", "type_code"), COUNTS_AND_TYPES)
    def test_movements(self, ranks: Ranks, count: int, type_code: int) -> None:
        assert ranks.run("collective.movements", count, type_code=type_code) == [5 * (4 * count + 3)] * count

    @pytest.mark.parametrize("count", [1, pytest.param(16, marks=pytest.mark.slow)])
    def test_results_with_one_and_sixteen_ranks(self, ranks: Ranks, count: int) -> None:
        assert ranks.run("collective.reductions", count, type_code=7) == [5 * 13] * count
        assert ranks.run("collective.movements", count, type_code=7) == [5 * (4 * count + 3)] * count

    def test_edge_values(self, ranks: Ranks) -> None:
        first, second = ranks.run("collective.edge_values", 2)
        assert first == second
        # A key is a type and an operation. Types 6, 7, 9, 10, 11 are float16, float32, bfloat16, e4m3, e5m2.
        # Operation 0 adds each value to itself, 2 takes the larger of it and 2.
        assert first["7 0"][:7] == ["nan", "inf", "-inf", "1.199999957179898e-07", "-0.0", "880.0", "120000.0"]
        assert first["6 0"][:6] == ["nan", "inf", "-inf", "1.1920928955078125e-07", "-0.0", "880.0"]
        assert first["6 0"][6:] == ["inf", "inf"]
        assert first["9 0"][:3] == ["nan", "inf", "-inf"]
        assert first["10 0"][4:6] == ["-0.0", "448.0"], "what is too large for eight bits becomes the largest finite value"
        assert first["11 0"][6] == "57344.0"
        assert first["7 2"] == ["2.0", "inf", "2.0", "2.0", "2.0", "440.0", "60000.0", "9.999999680285692e+37"]
        assert first["6 2"][0] == first["9 2"][0] == first["10 2"][0] == "2.0", "a value wins over NaN"
        # The same for float64, type 8, whose NaN and infinities the comparison must not lose either.
        assert first["8 0"][:3] == ["nan", "inf", "-inf"]
        assert first["8 2"][:3] == ["2.0", "inf", "2.0"]
        assert first["8 3"][:3] == ["2.0", "2.0", "-inf"]
        # Operation 3 takes the smaller of them. Here the other rank brings the twos.
        assert first["7 3"][:5] == ["2.0", "2.0", "-inf", "5.99999978589949e-08", "-0.0"]
        assert first["6 3"][0] == first["9 3"][0] == first["10 3"][0] == "2.0"

    @pytest.mark.parametrize("count", [2, 3, 4])
    def test_a_number_wins_over_nan_of_any_rank(self, ranks: Ranks, count: int) -> None:
        # A rank brings one number, at its own position; the others bring NaN there. All bring NaN at the last position.
        expected = [*(str(float(rank)) for rank in range(count)), "nan"]
        for reports in ranks.run("collective.nan_elsewhere", count):
            assert len(reports) == 12
            assert all(report == expected for report in reports.values()), reports

    def test_reductions_of_every_half(self, ranks: Ranks) -> None:
        assert ranks.run("collective.halves", 2) == [True, True]

    @pytest.mark.parametrize("count", [2, 3])
    def test_sums_with_scaling_factors(self, ranks: Ranks, count: int) -> None:
        assert ranks.run("collective.factors", count) == [14] * count

    @pytest.mark.parametrize(
        ("count", "rounds"),
        [(2, 400), pytest.param(4, 200, marks=pytest.mark.slow), pytest.param(16, 100, marks=pytest.mark.slow)],
    )
    def test_repeated_all_reduces_are_correct_and_fast(self, ranks: Ranks, count: int, rounds: int) -> None:
        seconds = ranks.run("collective.iterate", count, count=rounds)
        # A wait without a wakeup lasts 100 ms. Each rank waits in most rounds, because the last to arrive varies.
        assert count > 4 or max(seconds) < 0.05, "sixteen ranks wait for a processor as well"


class TestMessages:
    @pytest.mark.parametrize(
        ("count", "size"),
        [
            pytest.param(2, 2_000_001, marks=pytest.mark.slow),
            (3, 500_000),
            (2, 1),
            pytest.param(16, 100_000, marks=pytest.mark.slow),
        ],
    )
    def test_ring(self, ranks: Ranks, count: int, size: int) -> None:
        assert ranks.run("collective.ring", count, size=size, rounds=3) == [True] * count

    @pytest.mark.parametrize(("count", "size"), [(1, 300_000), (2, 300_000), (4, 100_000)])
    def test_simultaneous_all_to_all_messages(self, ranks: Ranks, count: int, size: int) -> None:
        assert ranks.run("collective.cross", count, size=size) == [True] * count

    @pytest.mark.parametrize("count", [2, 3])
    def test_group_of_collectives_and_messages(self, ranks: Ranks, count: int) -> None:
        assert ranks.run("collective.mixed_group", count) == [True] * count

    def test_message_of_a_rank_that_has_exited(self, ranks: Ranks) -> None:
        assert ranks.run("collective.eager", 2) == [0, 4950]

    @pytest.mark.parametrize("threads", [False, True])
    def test_several_communicators_in_one_process(self, ranks: Ranks, threads: bool) -> None:
        assert ranks.run("collective.one_process", 1, threads=threads) == [True]


class TestCommunicators:
    def test_splits(self, ranks: Ranks) -> None:
        # Each half has its ranks in reverse order. Its first rank gets no pair.
        assert ranks.run("communicator.families", 4) == [
            [1, 2, 2, 0, 6],
            [1, 2, 4, 1, 6],
            [0, 2, 2, None, 6],
            [0, 2, 4, None, 6],
        ]

    def test_init_with_several_unique_ids(self, ranks: Ranks) -> None:
        assert ranks.run("communicator.scalable", 3) == [3] * 3

    def test_many_communicators(self, ranks: Ranks) -> None:
        assert ranks.run("communicator.many", 2, count=60) == [2 * sum(range(60)) + 2 * 15] * 2

    @pytest.mark.parametrize("flags", [0, 1])
    def test_shrinking_a_live_communicator(self, ranks: Ranks, flags: int) -> None:
        reports = ranks.reports("communicator.shrink", 3, flags=flags)
        code = REMOTE_ERROR if flags else 0
        assert [report.get("value") for report in reports] == [[code, 0, 2, 2], [code, 1, 2, 2], None]

    @pytest.mark.parametrize("kinds", [("shrink", "shrink"), ("split", "split"), ("split", "shrink", "split", "shrink")])
    def test_several_communicators_of_one_parent(self, ranks: Ranks, kinds: tuple[str, ...]) -> None:
        totals = [2 * 10**number for number in range(len(kinds))]
        assert ranks.run("communicator.siblings", 3, kinds=kinds) == [[*totals, *totals[:-1]]] * 2 + [[]]

    def test_growing(self, ranks: Ranks) -> None:
        assert ranks.run("communicator.grow", 3) == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]

    def test_communicator_lifecycle(self, ranks: Ranks) -> None:
        expected = [INVALID_USAGE, 1, 2, INVALID_USAGE, 2, INVALID_USAGE, INVALID_ARGUMENT, INVALID_ARGUMENT, 0, 0, 2]
        assert ranks.run("communicator.life", 2) == [expected] * 2

    def test_revoke_ends_waits_of_other_ranks(self, ranks: Ranks) -> None:
        _, (code, text) = ranks.run("communicator.revoke_ends_waits", 2)
        assert code == REMOTE_ERROR
        assert "rank 0 has revoked" in text

    def test_memory(self, ranks: Ranks) -> None:
        assert ranks.run("communicator.memory", 2) == [True, True]

    def test_a_forked_child(self, ranks: Ranks) -> None:
        assert ranks.run("communicator.forked_child", 2) == [[INVALID_ARGUMENT, 0, 0, 2]] * 2


# The calls of rank 0 and rank 1, in the cases of communicator.mismatch.
MISMATCHES = [
    ("ncclAllReduce of 100000 float32, sum", "ncclAllReduce of 100001 float32, sum"),
    ("ncclAllReduce of 10 float32, sum", "ncclAllReduce of 10 float32, prod"),
    ("ncclAllReduce of 10 float32, sum", "ncclAllReduce of 10 int32, sum"),
    ("ncclBroadcast of 3 float32, root 0", "ncclBroadcast of 3 float32, root 1"),
    ("ncclAllGather of 3 float32", "ncclAllReduce of 3 float32, sum"),
    ("ncclAllReduce of 20 float32, sum", "ncclAllReduce of 10 float32, sum"),
]


@pytest.mark.parametrize(("xid", "code"), [(94, 214), pytest.param(74, 220, marks=pytest.mark.slow)])
def test_a_communicator_of_a_broken_context_has_no_error_of_its_own(ranks: Ranks, xid: int, code: int) -> None:
    assert ranks.run("communicator.broken_context", 2, xid=xid) == [None, [code, SUCCESS]]


class TestMisuse:
    def test_mismatched_calls_are_an_error_on_every_rank(self, ranks: Ranks) -> None:
        of_ranks = ranks.run("communicator.mismatch", 2)
        for *reports, total in of_ranks:
            assert all(code == later == again == INVALID_USAGE for code, _, later, again in reports), reports
            assert total == 2
        for number, calls in enumerate(MISMATCHES):
            # A rank that the other one has told of the mismatch names no calls.
            texts = [reports[number][1] for reports in of_ranks if "do not make" in reports[number][1]]
            expected = sorted(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            assert [sorted(re.findall(r"rank \d calls [^;]+", text)) for text in texts] == [expected] * len(texts) != []
        assert "rank 0 sends 800000 bytes to rank 1, which receives 40" in of_ranks[1][6][1]

    def test_wrong_arguments(self, ranks: Ranks) -> None:
        wrong = INVALID_ARGUMENT
        expected = [*[wrong] * 6, INVALID_USAGE, *[wrong] * 5, 1]
        assert ranks.run("communicator.misuse", 1) == [expected]

    @pytest.mark.parametrize(
        ("devices", "pair"), [([0, 0], "0 and 1"), ([1, 0, 1], "0 and 2"), ([0, 1, 1], "1 and 2"), ([2, 0, 1, 0], "1 and 3")]
    )
    def test_two_ranks_on_one_gpu(self, ranks: Ranks, devices: list[int], pair: str) -> None:
        for report in ranks.reports("communicator.same_gpu", len(devices), devices=devices):
            assert report["code"] == INVALID_USAGE
            assert re.match(rf"two ranks, {pair}, on GPU-[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}};", report["text"])

    @pytest.mark.slow
    def test_two_ranks_on_one_mig_instance(self) -> None:
        ranks = Ranks(RANKS, ACCELERATOR_SIM_MIG="2")
        for report in ranks.reports("communicator.same_gpu", 2, devices=[0, 0]):
            assert report["text"].startswith("two ranks, 0 and 1, on MIG-"), report
        ranks.close()

    def test_equal_gpus_of_two_machines(self, ranks: Ranks) -> None:
        # Ranks 0 and 2 use GPU 0 of two machines, ranks 1 and 3 GPU 1.
        assert ranks.run("communicator.two_machines", 4, devices=[0, 1, 0, 1]) == [4] * 4
        for report in ranks.reports("communicator.two_machines", 4, devices=[0, 0, 1, 1]):
            assert report["text"].startswith("two ranks, 0 and 1, on GPU-"), report

    def test_mismatched_world_sizes_are_an_error(self, ranks: Ranks) -> None:
        reports = ranks.reports("communicator.different_counts", 2, {"ACCELERATOR_SIM_NCCL_TIMEOUT": "1"})
        assert reports[1]["code"] == INVALID_USAGE
        assert "rank 1 says that there are 3 ranks, rank 0 says 2" in reports[1]["text"]


@pytest.mark.slow
def test_errors_are_reported_with_their_texts(tmp_path: Path) -> None:
    """Another thread sets an error that a rank polls. The rank reads the text as soon as there is an error."""
    library = compiled(LATE_TEXTS.read_text(), tmp_path / "late_texts.so", "-shared", "-fPIC")
    ranks = Ranks(RANKS, LD_PRELOAD=f"{library}:{simulated_environment()['LD_PRELOAD']}")
    *waiting, _ = ranks.run("communicator.never_comes", 3, late="collective")
    assert all("rank 2" in text for _, text in waiting), waiting
    _, reports = ranks.run("communicator.mismatch", 2)
    assert "rank 0 sends 800000 bytes to rank 1, which receives 40" in reports[6][1]
    *living, _ = ranks.reports("communicator.killed", 3, during="collective")
    assert all("the process of rank 2 is gone" in report["value"][1] for report in living), living
    ranks.close()


@pytest.mark.slow
def test_abort_beside_revoke(tmp_path: Path) -> None:
    library = compiled(LATE_UNLOCK.read_text(), tmp_path / "late_unlock.so", "-shared", "-fPIC")
    ranks = Ranks(RANKS, LD_PRELOAD=f"{library}:{simulated_environment()['LD_PRELOAD']}")
    assert ranks.run("communicator.abort_beside_revoke", 1) == [[SUCCESS, SUCCESS]]
    ranks.close()


class TestRankFailures:
    """Ranks check every 100 ms that the others live. Without this check a rank would wait until its alarm kills it."""

    @pytest.mark.parametrize("during", ["idle", "collective", "send", "receive"])
    def test_a_killed_rank_ends_the_waits(self, ranks: Ranks, during: str) -> None:
        *living, dead = ranks.reports("communicator.killed", 3, during=during)
        assert dead == {"exit": -9}
        for report in living:
            assert "value" in report, report
            code, text, asynchronous, again = report["value"]
            assert code == asynchronous == again == REMOTE_ERROR
            assert "the process of rank 2 is gone" in text

    def test_rank_killed_during_initialization(self, ranks: Ranks) -> None:
        # Rank 2 joins after rank 0 has given up, and finds no other rank.
        waiting, dead, late = ranks.reports("communicator.killed_at_the_start", 3)
        assert waiting["value"][0] == late["value"][0] == REMOTE_ERROR
        assert "the process of rank 1 is gone" in waiting["value"][1]
        assert dead == {"exit": -9}
        assert "rank 0 did not start" in late["value"][1]

    @pytest.mark.parametrize(
        ("end", "rank"),
        [(end, rank) for end in ("reaped", "zombie", "reused_pid") for rank in (0, 1)] + [("killed_rank", 1)],
    )
    def test_unique_id_of_a_process_that_has_ended(self, ranks: Ranks, end: str, rank: int) -> None:
        variables = {"ACCELERATOR_SIM_NCCL_TIMEOUT": "5"}
        ((code, text),) = ranks.run("communicator.dead_creator", 1, variables, end=end, rank=rank)
        assert code == REMOTE_ERROR
        assert f"rank {rank}: the creator of this id is gone (process " in text

    def test_unique_id_of_another_pid_namespace(self, ranks: Ranks) -> None:
        # A process cannot see whether the creator lives, so it waits.
        variables = {"ACCELERATOR_SIM_NCCL_TIMEOUT": "0.5"}
        ((code, text),) = ranks.run("communicator.dead_creator", 1, variables, end="other_namespace", rank=1)
        assert code == REMOTE_ERROR
        assert "rank 0 did not start the communicator within 0.5 s" in text

    def test_exited_rank_fails_only_ranks_that_wait_for_it(self, ranks: Ranks) -> None:
        expected = [[REMOTE_ERROR, REMOTE_ERROR], [0, 0], []]
        assert ranks.run("communicator.leaves", 3) == expected

    @pytest.mark.parametrize(
        ("late", "what", "seconds"),
        [("start", "the communicator's start", "0.5"), pytest.param("collective", "AllReduce", "2", marks=pytest.mark.slow)],
    )
    def test_missing_rank_times_out(self, ranks: Ranks, late: str, what: str, seconds: str) -> None:
        *waiting, absent = ranks.reports("communicator.never_comes", 3, late=late)
        texts = [report["value"] for report in waiting]
        assert all(code == REMOTE_ERROR for code, _ in texts), texts
        assert any(f"rank 2 did not come to {what} within {seconds} s" in text for _, text in texts), texts
        assert all("rank 2" in text for _, text in texts)
        if late == "collective":
            code, text = absent["value"]
            assert code == REMOTE_ERROR
            assert "gave up waiting for rank 2" in text

    def test_aborting_from_another_thread(self, ranks: Ranks) -> None:
        (code, after), *others = ranks.run("communicator.abort", 3)
        assert (code, after) == (0, INVALID_ARGUMENT)
        for code, text in others:
            assert code == REMOTE_ERROR
            assert "rank 0 has aborted" in text or "rank 0 left" in text

    @pytest.mark.parametrize("count", [2, 3])
    def test_aborting_after_a_death_ends_waits_without_an_error(self, ranks: Ranks, count: int) -> None:
        *living, dead = ranks.reports("communicator.abort_after_death", count)
        assert dead == {"exit": -9}
        assert [report["value"] for report in living] == [[0, 0]] * (count - 1)

    def test_next_communicator_removes_abandoned_files(self, ranks: Ranks, abandoned_before: set[str]) -> None:
        report, name = ranks.reports("communicator.abandon", 2)
        assert report == {"exit": -9}
        assert [path for path in find_abandoned_files() - abandoned_before if name["value"] in path]
        ranks.run("communicator.scalable", 2)
        assert not [path for path in find_abandoned_files() if name["value"] in path]


class TestMemory:
    def test_exhausted_shared_memory_is_an_error(self, ranks: Ranks) -> None:
        reports = ranks.reports("communicator.short_of_memory", 2, {"ACCELERATOR_SIM_NCCL_TIMEOUT": "0.5"}, limit=65536)
        code, text = reports[0]["value"]
        assert code == SYSTEM_ERROR
        assert "cannot reserve" in text
        assert reports[1]["value"][0] == REMOTE_ERROR

    # 16 of 64 communicators are kept. They need more than 64 MiB, so some use another directory.
    @pytest.mark.parametrize(
        ("size", "directory", "communicators"),
        [("1m", "elsewhere", 8), ("64m", "/dev/shm", 64)],
    )
    @pytest.mark.slow
    def test_small_shared_memory(self, tmp_path: Path, size: str, directory: str, communicators: int) -> None:
        mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
        inside = ["unshare", "--mount", "--map-root-user", "sh", "-ec", f'{mount} && exec "$@"', "sh"]
        if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            pytest.skip("needs name spaces of its own to be allowed")
        ranks = Ranks([*inside, *RANKS], TMPDIR=str(tmp_path))
        expected = str(tmp_path) if directory == "elsewhere" else directory
        try:
            assert all(path.startswith(expected) for path in ranks.run("communicator.where", 2))
            assert ranks.run("collective.ring", 2, size=2_000_001, rounds=1) == [True, True]
            total = 4 * sum(range(communicators)) + 4 * (communicators // 4)
            assert ranks.run("communicator.many", 4, count=communicators) == [total] * 4
        finally:
            ranks.close()
        assert os.listdir(tmp_path) == []


class TestTorch:
    @pytest.mark.parametrize("count", [2, 4])
    def test_collectives(self, ranks: Ranks, count: int) -> None:
        assert ranks.run("torch.collectives", count) == [True] * count

    def test_process_group_of_one_process(self, ranks: Ranks) -> None:
        assert ranks.run("torch.one_process", 1) == [True]

    def test_objects(self, ranks: Ranks) -> None:
        reports = ranks.run("torch.objects", 2)
        if None in reports:
            pytest.skip("simulated kernels compute nothing here")
        assert reports == [True, True]

    @pytest.mark.parametrize("count", [2, 3])
    def test_messages(self, ranks: Ranks, count: int) -> None:
        assert ranks.run("torch.messages", count) == [True] * count

    def test_groups(self, ranks: Ranks) -> None:
        assert ranks.run("torch.groups", 4) == [True] * 4

    def test_buckets(self, ranks: Ranks) -> None:
        assert ranks.run("torch.buckets", 2) == [True] * 2

    def test_graphs(self, ranks: Ranks) -> None:
        # The eager call reduces, the capture does not, and each of two replays does.
        assert ranks.run("torch.graph", 2) == [[2.0, 0.0, 6.0, 10.0]] * 2

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
    def test_nan_check(self, torch_ranks: Ranks, dtype: str) -> None:
        (reports,) = torch_ranks.run("torch.nan_check", 1, NAN_CHECK, dtype=dtype)
        assert reports[0] == "sent"
        assert "device-side assert triggered" in reports[-1]
        if dtype != "float8_e4m3fn":  # it has no infinity, so the conversion makes a NaN
            assert reports[1:3] == ["sent"] * 2

    def test_version(self, ranks: Ranks) -> None:
        ((of_torch, of_accelerator, of_library),) = ranks.run("torch.version", 1)
        assert of_torch == of_accelerator
        assert of_library == 23007


class TestPendingWork:
    """A collective returns at once. Its streams and events are pending until every rank has called it."""

    @TWO_AND_FOUR
    def test_message_beside_pending_work(self, torch_ranks: Ranks, count: int) -> None:
        assert torch_ranks.run("pending.message_beside_work", count) == [True] * count

    @TWO_AND_FOUR
    def test_queries(self, torch_ranks: Ranks, count: int) -> None:
        assert torch_ranks.run("pending.pending", count) == [True] * count

    def test_access_to_pending_memory_waits(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.waits", 2) == [[], []]

    def test_copies_wait_beside_the_host(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.copies", 2) == [True] * 2

    @pytest.mark.slow
    def test_compiled_code_waits(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.compiled", 2) == [True] * 2

    def test_a_collective_waits_for_its_stream(self, torch_ranks: Ranks) -> None:
        assert all(seconds >= 0.15 for seconds in torch_ranks.run("pending.busy_stream", 2))

    @TWO_AND_FOUR
    def test_two_communicators_at_once(self, torch_ranks: Ranks, count: int) -> None:
        assert torch_ranks.run("pending.overlap", count) == [True] * count

    def test_collective_on_the_result_of_another_communicator(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.chain", 2) == [True] * 2

    def test_a_stream_destroyed_with_pending_work(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.destroyed_stream", 2) == [True] * 2

    def test_a_flipped_bit_of_a_copy(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.flipped_copy", 2) == [True] * 2

    @pytest.mark.parametrize("count", [2, 3])
    def test_works_block_a_stream(self, torch_ranks: Ranks, count: int) -> None:
        reports = torch_ranks.run("pending.block_current_stream", count)
        if None in reports:
            pytest.skip("torch 2.9 is the first with Work.block_current_stream")
        assert reports == [True] * count

    def test_messages_beside_collectives(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.messages_beside_collectives", 2) == [True] * 2

    @pytest.mark.slow
    def test_graphs(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.graphs", 2) == [True] * 2

    def test_fork_during_a_collective(self, torch_ranks: Ranks) -> None:
        assert torch_ranks.run("pending.fork_beside_work", 2) == [True] * 2


@pytest.mark.slow
def test_elastic_restarts() -> None:
    """torchrun starts the ranks again after each death, and the last attempt ends with the right weights."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *torchrun, "-m", "tests.simulation.cluster.elastic_rank"]
    environment = simulated_environment({"OMP_NUM_THREADS": "1"}, gpus=2)
    child = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert child.returncode == 0, child.stderr[-6000:]
    expected = 1.0
    for step in range(4):
        expected -= 0.25 * ((1 + step) + (2 + step))
    assert child.stdout.splitlines() == [json.dumps({"restarts": 2, "weights": [expected] * 4})]


QUICKLY = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


class TestWatchdog:
    """torch's watchdog ends hanging work, as on real GPUs."""

    @TWO_AND_FOUR
    @pytest.mark.parametrize("wait", ["synchronize", "kernel", "to_host"])
    def test_aborting_the_process_group_ends_waits(self, torch_ranks: Ranks, wait: str, count: int) -> None:
        events, *_ = torch_ranks.run("pending.abort", count, wait=wait)
        assert events == ["abort", "end of the wait"]

    @pytest.mark.slow
    @TWO_AND_FOUR
    def test_the_timeout_of_a_process_group(self, torch_ranks: Ranks, count: int) -> None:
        *timed_out, last = torch_ranks.reports("pending.timeout", count, QUICKLY, collective="all_reduce")
        assert timed_out == [{"exit": -signal.SIGABRT}] * (count - 1)
        assert last["value"] is None

    @pytest.mark.slow
    def test_the_timeout_of_a_collective_that_copies_its_results(self, torch_ranks: Ranks) -> None:
        timed_out, last = torch_ranks.reports("pending.timeout", 2, QUICKLY, collective="all_gather")
        assert timed_out == {"exit": -signal.SIGABRT}
        assert last["value"] is None

    @pytest.mark.slow
    @TWO_AND_FOUR
    def test_async_error_handling_disabled(self, torch_ranks: Ranks, count: int) -> None:
        variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        assert torch_ranks.run("pending.no_handling", count, variables) == [True] * count

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [2, 4])
    def test_blocking_wait(self, torch_ranks: Ranks, count: int) -> None:
        *waiting, _ = torch_ranks.run("pending.blocking_wait", count, {"TORCH_NCCL_BLOCKING_WAIT": "1"})
        for text, seconds in waiting:
            assert "timeout" in text
            assert seconds > 0.9

    @TWO_AND_FOUR
    def test_a_killed_rank(self, torch_ranks: Ranks, count: int) -> None:
        *alive, dead = torch_ranks.reports("pending.killed", count, QUICKLY)
        assert dead == {"exit": -signal.SIGKILL}
        assert alive == [{"exit": -signal.SIGABRT}] * (count - 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [2, 4])
    def test_a_killed_rank_with_blocking_wait(self, torch_ranks: Ranks, count: int) -> None:
        *alive, dead = torch_ranks.reports("pending.killed_blocking", count, {"TORCH_NCCL_BLOCKING_WAIT": "1"})
        assert dead == {"exit": -signal.SIGKILL}
        for report in alive:
            text = report["value"]
            assert "timeout" in text or "remote process" in text, "which of the two differs between versions of torch"

    @pytest.mark.parametrize("wait", ["kernel", "to_host"])
    def test_keyboard_interrupt_ends_waits(self, torch_ranks: Ranks, wait: str) -> None:
        assert torch_ranks.run("pending.interrupted", 2, wait=wait) == [True] * 2
