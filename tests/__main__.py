"""``python -m tests [--slow] [pytest arguments]``: run the whole suite, each file in the process that it needs.

With a CUDA build of torch on Linux: ``test_*_cpu.py`` without a GPU, all other files on two simulated GPUs.
With a CPU build: all but ``test_*_simulated.py``. Without torch: the files marked ``torch_free``.
``--slow`` runs the tests marked ``slow`` instead of the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accelerator import simulation
from accelerator._machine import torch_build
from accelerator.simulation._build import engine

TESTS = Path(__file__).parent
COMPILE_ENGINE = """
import torch
from accelerator.simulation._build import engine
engine.ensure_built(engine.describe(torch), None)
"""


def main(arguments: list[str]) -> int:
    """Run pytest once for each kind of process, with at most four workers; return 1 if any of them failed."""
    speed = "slow" if "--slow" in arguments else "not slow"
    arguments = [argument for argument in arguments if argument != "--slow"]
    if "-m" in arguments:
        at = arguments.index("-m")
        speed = f"{speed} and ({arguments[at + 1]})"
        del arguments[at : at + 2]
    build = torch_build.read()
    # The tests start about a thousand processes. Without bytecode files, each would compile the package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Threads of two workers would wait for each other's turn in busy loops. The slow tests keep them.
    is_quick = speed.startswith("not slow")
    if is_quick:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Inductor would compile a program for each kind of vector instructions, to learn whether it runs.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # Inductor's pool of compilers would import torch once more for each program. One test has a pool of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # One worker more than cores, because tests on GPUs wait in a part of their time. Slow tests start several processes.
    cores = os.cpu_count() or 1
    many, few = (["-n", str(min(count, 4))] for count in (cores + is_quick, cores))
    pytest = [sys.executable, "-m", "pytest", "--dist", "loadscope", "-m", speed]
    if build is None:
        runs = [("without torch", dict(os.environ), [*many, *arguments, str(TESTS)])]
    elif build.cuda:
        compile_engine_on_a_new_machine()
        # Each worker has its own simulated GPUs, so the workers do not share the memory of a GPU.
        cpu_tests = [str(path) for path in sorted(TESTS.glob("*/test_*_cpu.py"))]
        with_two = simulation.environment(gpus=2)
        with_none = simulation.environment(gpus=0, driver="absent", nvml="absent")
        runs = [
            ("on two simulated GPUs", with_two, [*many, *arguments, "--ignore-glob=*_cpu.py", str(TESTS)]),
            ("without a GPU", with_none, [*few, *arguments, *cpu_tests]),
        ]
    else:
        runs = [("on a CPU build", dict(os.environ), [*many, *arguments, "--ignore-glob=*_simulated.py", str(TESTS)])]
    statuses: set[int] = set()
    for where, environment, selection in runs:
        print(f"\n{where}: pytest", *pytest[3:], *selection, flush=True)
        statuses.add(subprocess.run([*pytest, *selection], cwd=TESTS.parent, env=environment, check=False).returncode)
    no_tests = 5  # pytest's status if it selects no tests, as one of the runs may
    return 0 if statuses <= {0, no_tests} and statuses != {no_tests} else 1


def compile_engine_on_a_new_machine() -> None:
    """Start to compile the engine of simulated GPUs while the driver is compiled. All workers wait for it."""
    if not engine.is_any_built(None):
        subprocess.Popen([sys.executable, "-c", COMPILE_ENGINE])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
