"""``python -m tests [pytest arguments]``: the whole suite, each part where it belongs.

With a CUDA build of torch on Linux: ``test_*_simulated.py`` and all that need nothing particular on two simulated GPUs,
``test_*_cpu.py`` on the same build without any. With a CPU build: all but ``test_*_simulated.py``. Without torch: what depends
on none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accelerator import simulation
from accelerator._machine import torch_build

TESTS = Path(__file__).parent


def main(arguments: list[str]) -> int:
    build = torch_build.read()
    workers = str(min(os.cpu_count() or 1, 4))
    pytest = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadscope", *arguments]
    if build is None:
        runs = [("without torch", dict(os.environ), [str(TESTS)])]
    elif build.cuda:
        # Each worker is a machine of its own, with all of the memory to itself.
        on_cpu = [str(path) for path in sorted(TESTS.glob("*/test_*_cpu.py"))]
        runs = [
            ("on two simulated GPUs", simulation.environment(gpus=2), ["--ignore-glob=*_cpu.py", str(TESTS)]),
            (
                "without a GPU",
                simulation.environment(gpus=0, driver="absent", nvml="absent"),
                on_cpu,
            ),
        ]
    else:
        runs = [("on a CPU build", dict(os.environ), ["--ignore-glob=*_simulated.py", str(TESTS)])]
    failed = False
    for where, environment, selection in runs:
        print(f"\n{where}: pytest", *pytest[3:], *selection, flush=True)
        failed |= subprocess.run([*pytest, *selection], cwd=TESTS.parent, env=environment, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
