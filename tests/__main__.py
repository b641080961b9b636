"""``python -m tests [pytest arguments]``: the whole suite, each part where it belongs.

With a CUDA build of torch on Linux: the tests of ``tests/simulated`` and all that need nothing particular on two simulated
GPUs, those of ``tests/cpu`` on the same build without any. With a CPU build: all but ``tests/simulated``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accelerator import _torch_build, simulation

TESTS = Path(__file__).parent


def main(arguments: list[str]) -> int:
    build = _torch_build.read()
    if build is None:
        print("torch is not installed in this Python")
        return 1
    workers = str(min(os.cpu_count() or 1, 4))
    pytest = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadgroup", *arguments]
    if build.cuda:
        # Each worker is a machine of its own, with all of the memory to itself.
        runs = [
            ("on two simulated GPUs", simulation.environment(gpus=2), [f"--ignore={TESTS / 'cpu'}", str(TESTS)]),
            ("without a GPU", simulation.environment(gpus=0, driver="absent", nvml="absent"), [str(TESTS / "cpu")]),
        ]
    else:
        runs = [("on a CPU build", dict(os.environ), [f"--ignore={TESTS / 'simulated'}", str(TESTS)])]
    failed = False
    for where, environment, selection in runs:
        print(f"\n{where}: pytest", *pytest[3:], *selection, flush=True)
        failed |= subprocess.run([*pytest, *selection], cwd=TESTS.parent, env=environment, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
