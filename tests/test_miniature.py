"""A small library's tests need only the plug-in, with and without GPUs. Twenty tests on two machines take little CPU time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import plain_environment
from tests.support.discovery import on_simulated_gpus

MINIATURE = Path(__file__).parent / "miniature"
PLUGIN = ["-p", "accelerator.simulation.pytest_plugin", "-p", "no:cacheprovider"]


def run(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-rs", "-c", str(directory / "pytest.ini"), *arguments, str(directory)]
    done = subprocess.run(
        command, env=plain_environment(), cwd=directory, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counts(text: str) -> dict[str, int]:
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|failed|error)", text.splitlines()[-1])}


@pytest.mark.slow
@on_simulated_gpus
def test_a_library_on_two_simulated_gpus() -> None:
    assert counts(run(MINIATURE, "--simulate-gpus", "2")) == {"passed": 10}


@pytest.mark.slow
def test_a_library_without_a_gpu() -> None:
    from accelerator import simulation

    text = run(MINIATURE)
    if simulation.unavailable_reason() is None:
        assert counts(text) == {"passed": 7, "skipped": 3}
    else:
        assert counts(text) == {"passed": 2, "skipped": 8}
        assert str(simulation.unavailable_reason()) in text
    assert "needs 2 GPUs, none visible: " in text


@pytest.mark.slow
@on_simulated_gpus
def test_cpu_time_of_twenty_tests_on_two_machines(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("""
import pytest
import torch

ONE, TWO = (pytest.mark.simulated_machine(gpus=n) for n in (1, 2))

@pytest.mark.parametrize("_", range(10))
@pytest.mark.parametrize("n", [pytest.param(1, marks=ONE), pytest.param(2, marks=TWO)])
def test_it(_, n):
    assert torch.cuda.device_count() == n
    torch.empty(100, device=f"cuda:{n - 1}")
""")
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = run(tmp_path, "--durations=20")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, which does not depend on other processes on this machine.
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert counts(text) == {"passed": 20}
    print(f"20 tests on two machines: {took:.1f} s")
    assert took < 20


def test_miniature_library_has_no_conftest() -> None:
    assert not list(MINIATURE.rglob("conftest.py"))
