"""Runs native tests on libraries that are compiled with address and undefined-behaviour sanitizers.

    python -m tests.simulation.native.sanitized

Needs gcc and g++. The builds take their compilers and flags from CC and CXX, so other programs can run on such libraries in the
same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = (
    *("test_memory_misuse.py", "test_memory_accounting.py", "test_device_memory.py", "test_shared_files.py", "test_misuse.py"),
    "test_visible_devices.py",
    "../nvml/test_nvml_memory.py",
    *("test_modules.py", "../runtime/test_memory_calls.py", "../extensions/test_damaged_images.py"),
)
SMOKE = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.rand(8, 3, 8, 8, device="cuda")
stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
for _ in range(3):
    with torch.cuda.stream(stream):
        model(data).square().mean().backward()
        event.record()
    event.synchronize()
    optimizer.step()
    optimizer.zero_grad()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = data * 2
graph.replay()
assert torch.equal(doubled.cpu(), data.cpu() * 2)
torch.cuda.empty_cache()
print("ok")
"""


def sanitized_environment(cache: str) -> dict[str, str]:
    """Return the environment of a process that builds and uses simulated libraries with sanitizers."""
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
    return {
        **os.environ,
        "CC": f"gcc {flags}",
        "CXX": f"g++ {flags} -fno-sanitize=vptr",  # torch's classes have no type information that it could check
        "XDG_CACHE_HOME": cache,
        "LD_PRELOAD": runtime,
        # Python leaks by design. Several simulated libraries define the same symbol, which marks a simulation.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main() -> int:
    folder = Path(__file__).parents[1] / "driver"
    with tempfile.TemporaryDirectory() as cache:
        environment = sanitized_environment(cache)
        smoke = [sys.executable, "-m", "accelerator", "simulate", "--", sys.executable, "-c", SMOKE]
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(folder / name) for name in TESTS)]
        commands = [smoke, tests]
        return max(subprocess.run(command, env=environment, check=False).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
