"""``python -m tests [pytest arguments]``: the whole suite, each part where it belongs.

With a CUDA build of torch on Linux: the tests of ``tests/simulated`` and all that need nothing particular on two simulated
GPUs, those of ``tests/cpu`` on the same build without any. With a CPU build: all but ``tests/simulated``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accelerator import _torch_build

TESTS = Path(__file__).parent


def main(arguments: list[str]) -> int:
    build = _torch_build.read()
    if build is None:
        print("torch is not installed in this Python")
        return 1
    workers = str(min(os.cpu_count() or 1, 4))
    pytest = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadgroup", *arguments]
    simulate = [sys.executable, "-m", "accelerator", "simulate"]
    if build.cuda:
        commands = [
            [*simulate, "--gpus", "2", "--", *pytest, f"--ignore={TESTS / 'cpu'}", str(TESTS)],
            [*simulate, "--gpus", "0", "--driver", "absent", "--nvml", "absent", "--", *pytest, str(TESTS / "cpu")],
        ]
    else:
        commands = [[*pytest, f"--ignore={TESTS / 'simulated'}", str(TESTS)]]
    failed = False
    for command in commands:
        print("\n$", *command, flush=True)
        failed |= subprocess.run(command, cwd=TESTS.parent, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
