"""Forks, threads and exits of processes on simulated GPUs, many times.

    on_gpus="python -m accelerator simulate --gpus 2 --"
    $on_gpus python -m tests.simulation.native.stress [--runs 950] [--processes 50] [--device cuda]

There are three cases: two threads call their first ops at once; a child is forked while another thread calls ops; the
interpreter exits while a daemon thread calls ops. Of each case, ``--runs`` are forks of a process that has imported torch and
initialized nothing, and ``--processes`` are new processes. Prints the runs that crashed or did not end, and exits with status 1
if there are any. With ``--device cpu`` the same programs run on the CPU, for comparison.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import torch

DEADLINE_S = 120
SHOWN_RUNS = 100  # the figures are shown after so many runs
# Until Python 3.14, the exit unwinds daemon threads. In a C++ function that may not throw this aborts, on the CPU too.
STATUSES_OF_EXIT = (0,) if sys.version_info >= (3, 14) else (0, -signal.SIGABRT)


def first_ops_of_two_threads(device: str, run: int) -> None:
    results: list[float] = []

    def work() -> None:
        few = torch.arange(8.0, device=device)
        many = torch.ones(64, 256, device=device)
        for _ in range(3):
            many = many * 1.0
        results.append(((few + 1) * 2).sum().item() + many.sum().item())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [72.0 + 64 * 256] * 2, results


def fork_beside_ops(device: str, run: int) -> None:
    """Fork before, in or after the first op of the other thread. The child of an initialized process gets torch's error."""
    # The first call of each of torch's functions registers a destructor. The C library keeps its lock for that in the child of
    # a fork at that moment, so that the child's first call of a function would wait for ever, on the CPU too.
    (torch.ones(8, device="cpu") + 1).mul_(2).add_(1)
    x = torch.ones(8, device=device)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            (x + 1).mul_(2)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.001 * (run % 7))
    child = os.fork()
    if child == 0:
        try:
            x.add_(1)
        except RuntimeError:
            os._exit(0 if device == "cuda" else 1)
        os._exit(0 if device == "cpu" else 1)
    status = os.waitpid(child, 0)[1]
    stop.set()
    thread.join()
    assert status == 0, status
    assert x.sum().item() == 8


def exit_beside_ops(device: str, run: int) -> None:
    x = torch.ones(8, device=device, requires_grad=True)

    def work() -> None:
        while True:
            (torch.ones(64, 256, device=device).cos_() * x[0]).sum().backward()

    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.002 * (run % 5))


CASES: tuple[Callable[[str, int], None], ...] = (first_ops_of_two_threads, fork_beside_ops, exit_beside_ops)


def run_case(device: str, run: int) -> None:
    """Run one case in this process, which ends by a signal if it hangs."""
    signal.alarm(DEADLINE_S)
    CASES[run % len(CASES)](device, run)


def forked(device: str, run: int) -> int:
    """Run a case in a forked child, and return its status."""
    child = os.fork()
    if child == 0:
        try:
            run_case(device, run)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=950, help="forks of each case (default: 950)")
    parser.add_argument("--processes", type=int, default=50, help="new processes of each case (default: 50)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)  # what a new process runs
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        run_case(options.device, options.case)
        return 0
    command = [sys.executable, "-m", "tests.simulation.native.stress", "--device", options.device, "--case"]
    ended, failed, aborted = Counter[str](), Counter[str](), Counter[str]()
    rounds = options.runs + options.processes
    total = len(CASES) * rounds
    for run in range(total):
        # The new processes are spread evenly over the rounds.
        before, after = (count * options.processes // rounds for count in (run // len(CASES), run // len(CASES) + 1))
        if before == after:
            status = forked(options.device, run)
        else:
            status = subprocess.run([*command, str(run)], check=False).returncode
        case = CASES[run % len(CASES)]
        ended[case.__name__] += 1
        aborted[case.__name__] += status == -signal.SIGABRT
        if status not in (STATUSES_OF_EXIT if case is exit_beside_ops else (0,)):
            failed[case.__name__] += 1
            print(f"run {run}, {case.__name__}: status {status}", flush=True)
        if (run + 1) % SHOWN_RUNS == 0 or run + 1 == total:
            counts = (f"{name} {ended[name]} ({failed[name]} failed, {aborted[name]} aborted)" for name in ended)
            print(", ".join(counts), flush=True)
    return int(failed.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
