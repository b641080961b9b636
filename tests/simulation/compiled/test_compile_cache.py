"""Inductor's cache on simulated machines: a second process compiles nothing, and all files are in the cache folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerator.simulation._build import cache
from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

PROGRAM = """
import torch
import torch._inductor.config

if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
    torch._inductor.config.cpp_cache_precompile_headers = False  # compiling them takes longer than they save here
x = torch.ones(5, device="cuda", requires_grad=True)
result = torch.compile(lambda x: (x.sin() * 2).softmax(0).square().sum())(x)
result.backward()
print(round(result.item(), 4), x.device, round(float(x.grad.abs().sum()), 4))
"""


def test_second_process_uses_the_compile_cache(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("home", "temporary", "work", "cache")}
    for folder in folders.values():
        folder.mkdir()
    env = simulated_environment(
        {
            "HOME": str(folders["home"]),
            "TMPDIR": str(folders["temporary"]),
            "TORCHINDUCTOR_CACHE_DIR": str(folders["cache"]),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",  # otherwise Triton 3.9 warns that this default will change
            "TRITON_CACHE_DIR": str(folders["cache"] / "triton"),
            # The engine of this machine, which may not be in the new HOME.
            "XDG_CACHE_HOME": str(cache.cache_roots()[0]),
        }
    )

    def compiled_files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folders["cache"].rglob("*.so")}

    def printed() -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=folders["work"], capture_output=True, text=True)
        return done.stdout, done.stderr

    first = printed()
    files = compiled_files()
    assert files, first
    assert first == printed() == ("0.2 cuda:0 0.0\n", "")
    assert compiled_files() == files
    for name in ("home", "temporary", "work"):
        assert list(folders[name].rglob("*")) == []
