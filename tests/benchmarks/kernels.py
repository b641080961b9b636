"""``python -m tests.benchmarks.kernels [--gate] [--json FILE] [--many COUNT]``: the cost of CUDA kernels of others than torch.

Run it on a simulated machine: ``python -m accelerator simulate --gpus 1 -- python -m tests.benchmarks.kernels``. Kernels of
``kernels.ptx`` take turns with the same loops in C, compiled with -O2, both on one thread; a row is the ratio of their times.
Then processes with an empty cache launch a kernel of 1,000 instructions, and others launch it again. ``--many`` launches so
many different kernels, and says what this takes and what the cache holds. With ``--gate`` the exit status is 1 if a minimum
exceeds its budget by over 5 % and by over the spread of its rounds.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accelerator.simulation import _settings, is_simulated
from tests.ptx.driver import DriverKernel

from .simulation import Row, fastest, make_parser, report

if TYPE_CHECKING:
    import torch

ROUNDS = 5
ELEMENTS, WIDTH = 2**22, 256
_KERNELS = Path(__file__).with_suffix(".ptx")
_LOOPS = """
void scale(const float *x, float *y, int n) { for (int i = 0; i < n; i++) y[i] = x[i] * 2.0f + 1.0f; }

void block_sum(const float *x, float *y, int n)
{
    for (int block = 0; block < n / 256; block++) {
        float sum = 0;
        for (int i = 0; i < 256; i++) sum += x[256 * block + i];
        y[block] = sum;
    }
}

void product(const float *a, const float *b, float *c, int n)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int k = 0; k < n; k++) sum += a[i * n + k] * b[k * n + j];
            c[i * n + j] = sum;
        }
}
"""
_LAUNCH = """
import sys, time
from pathlib import Path
import numpy as np
from tests.ptx.driver import DriverKernel
text = Path(sys.argv[1]).read_text()
begin = time.perf_counter()
DriverKernel([text], "main").run(1, 1, np.zeros(1, np.float32))
print(time.perf_counter() - begin)
"""


def compiled_loops(folder: Path) -> ctypes.CDLL:
    """Compile the loops in C, as a user's program would be."""
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(_LOOPS, encoding="utf-8")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def second_launches(folder: Path) -> Iterator[Row]:
    """Yield the ratio of a kernel's launch, not its first one, to the loop in C; their results are compared."""
    import torch

    loops = compiled_loops(folder)
    torch.manual_seed(0)
    x, square = torch.randn(ELEMENTS), torch.randn(WIDTH, WIDTH)
    cases: list[tuple[str, list[torch.Tensor], torch.Tensor, Any, Any, int, float]] = [
        # The aims are 4 and 10. The rest is room for processors whose caches hold the arrays: only the loop in C is vectorized.
        ("scale", [x], torch.empty_like(x), ELEMENTS // 256, 256, ELEMENTS, 8),
        ("block_sum", [x], torch.empty(ELEMENTS // 256), ELEMENTS // 256, 256, ELEMENTS, 13),
        ("product", [square, square.T.contiguous()], torch.empty_like(square), (WIDTH // 16,) * 2, (16, 16), WIDTH, 4),
    ]
    for name, inputs, output, grid, block, size, budget in cases:
        kernel = DriverKernel([_KERNELS.read_text(encoding="utf-8")], name)
        on_gpu = [tensor.cuda() for tensor in (*inputs, output)]
        launch = partial(kernel.launch, grid, block, *(np.uint64(tensor.data_ptr()) for tensor in on_gpu), np.uint32(size))
        loop = partial(loops[name], *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*inputs, output)), size)
        launch()
        loop()
        torch.testing.assert_close(on_gpu[-1].cpu(), output, atol=1e-3, rtol=1e-4)
        rounds = [on_kernel / in_c for in_c, on_kernel in (fastest((timer(loop), timer(launch)), 5) for _ in range(ROUNDS))]
        yield Row(f"{name} over its loop in C, ratio", "", rounds, budget)


def timer(call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls another one and returns the processor time that this takes."""

    def seconds() -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    return seconds


def long_kernel(number: int, instructions: int = 1000) -> str:
    """Return a kernel of so many instructions. Each number makes another one."""
    arithmetic = [f"fma.rn.f32 %x{i % 7}, %x{(i + 1) % 7}, 0f3F800000, %x{(i + number) % 7};" for i in range(instructions - 9)]
    start = [f"mov.b32 %x{i}, {number + i};" for i in range(7)]
    lines = ["ld.param.u64 %at, [at];", *start, *arithmetic, "st.global.f32 [%at], %x0;"]
    return "\n".join(
        [
            ".version 7.0\n.target sm_80\n.address_size 64",
            ".visible .entry main(.param .u64 at) { .reg .b64 %at; .reg .f32 %x<7>;",
            *lines,
            "ret; }",
        ]
    )


def run_with_cache(cache: Path, program: str, argument: object) -> str:
    """Run a program in a new process with this cache of kernels, and return what it prints."""
    command = [sys.executable, "-c", program, str(argument)]
    environment = {**os.environ, _settings.variable("kernel_cache"): str(cache)}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def first_launches(folder: Path) -> Iterator[Row]:
    """Yield the time of a process's first launch of a kernel: without a cache, and with that of another process."""
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        text, cache = folder / f"{number}.ptx", folder / f"cache {number}"
        text.write_text(long_kernel(number), encoding="utf-8")
        cache.mkdir()
        cold, warm = (float(run_with_cache(cache, _LAUNCH, text)) for _ in range(2))
        rounds.append((cold, warm))
    yield Row("first launch of 1,000 instructions", "s", [cold for cold, _ in rounds], 2)
    yield Row("the same, kept by another process", "ms", [1e3 * warm for _, warm in rounds], 20)


def many_kernels(count: int, folder: Path) -> str:
    """Launch different kernels in one process, and return what it took and what the cache holds."""
    cache = folder / "cache of many"
    cache.mkdir()
    program = (
        "import sys, numpy as np\nfrom tests.ptx.driver import DriverKernel\nfrom tests.benchmarks.kernels import long_kernel\n"
        'for i in range(int(sys.argv[1])): DriverKernel([long_kernel(i, 100)], "main").run(1, 1, np.zeros(1, np.float32))'
    )
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        run_with_cache(cache, program, count)
        seconds.append(time.perf_counter() - begin)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    times = f"{seconds[0]:.1f} s, then {seconds[1]:.1f} s"
    return f"{count} kernels of 100 instructions: {times}; the cache holds {size / 2**20:.1f} MiB"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--many", type=int, metavar="COUNT", help="launch so many different kernels, too")
    options = parser.parse_args()
    if not is_simulated():
        parser.error("run it under 'python -m accelerator simulate --gpus 1 --'")
    os.environ["OMP_NUM_THREADS"] = "1"  # of blocks: the time of several depends on what else the machine does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = (second_launches, first_launches)
        status = report("CUDA kernels on simulated GPUs", (row for part in parts for row in part(folder)), options)
        if options.many:
            print(many_kernels(options.many, folder))
    return status


if __name__ == "__main__":
    sys.exit(main())
