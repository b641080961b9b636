"""The engine is compiled once for a torch. Without a C++ compiler, ops run in Python, and one line says so."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from accelerator.simulation._build import cache, engine
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

COMPUTE = textwrap.dedent("""
    import torch
    x = torch.arange(6.0, device="cuda")
    print([(x + 1).sum().item() for _ in range(2)], "engine.so" in open("/proc/self/maps").read())
    """)


def compute(cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Compute in a process with an empty cache directory for the engine; the libraries are preloaded from the usual one."""
    environment = {**simulated_environment(gpus=1), "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache), **variables}
    command = [sys.executable, "-W", "ignore", "-c", COMPUTE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_no_compiler(tmp_path: Path) -> None:
    for run in range(2):
        done = compute(tmp_path, CXX="missing-compiler")
        assert done.stdout == "[21.0, 21.0] False\n", done.stderr
        lines = [line for line in done.stderr.splitlines() if "accelerator" in line]
        assert len(lines) == (1 if run == 0 else 0)
        if run == 0:
            assert re.fullmatch("accelerator: simulated GPUs compute slower.*CXX names 'missing-compiler'.*", lines[0])


@pytest.mark.slow
def test_failing_compiler(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    for run in range(2):
        done = compute(tmp_path, CXX=str(compiler))
        assert done.stdout == "[21.0, 21.0] False\n", done.stderr
        assert ("no such header" in done.stderr) is (run == 0)


def test_compiler_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk or a killed compiler is no reason to never compile again."""
    compiler, fails = tmp_path / "compiler", tmp_path / "fails"
    compiler.write_text(f'#!/bin/sh\ntest -e {fails} && exit 1\nwhile test "$1" != -o; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    fails.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in (("XDG_CACHE_HOME", tmp_path), ("CXX", compiler)):
        monkeypatch.setenv(name, str(value))
    torch = engine.Torch(str(tmp_path), "2.0", has_new_abi=True)

    def build() -> tuple[bool, str]:
        return engine.ensure_built(torch, None) is not None, capsys.readouterr().err

    def wait() -> None:
        (failure,) = tmp_path.rglob("engine-*-failed-*")
        past = time.time() - engine._RETRY_AFTER_S - 60
        os.utime(failure, (past, past))

    for _ in range(2):
        is_built, told = build()
        assert not is_built
        assert "compute slower, without their engine" in told
        assert build() == (False, "")
        wait()
    fails.unlink()
    assert build()[0]


def test_announcement_that_a_full_disk_cuts_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, *_: Any, **__: Any) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        cache.announce_once("accelerator/told", "told")
    for expected in ("accelerator: told\n" * 2, ""):
        cache.announce_once("accelerator/told", "told")
        assert capsys.readouterr().err == expected


def test_races_without_a_compiler_are_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "CXX": "missing-compiler"}
    command = [sys.executable, "-m", "accelerator", "simulate", "--races", "report", "--", sys.executable, "-c", COMPUTE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search("races are found by the engine .*C\\+\\+ compiler.*: CXX names 'missing-compiler'.*install g", done.stderr)


@pytest.mark.slow
def test_races_with_a_failing_compiler_are_refused(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    for _ in range(2):
        done = compute(tmp_path, CXX=str(compiler), ACCELERATOR_SIM_RACES="report")
        assert done.returncode != 0
        assert done.stdout == ""
        assert re.search("races are found by the engine .*C\\+\\+ compiler.*no such header", done.stderr)


@pytest.mark.slow
def test_build_for_another_cache(tmp_path: Path) -> None:
    """``simulate --build`` compiles the engine for the installed torch too, and a process without a compiler uses it."""
    folder = tmp_path / "libraries"
    command = [sys.executable, "-m", "accelerator", "simulate", "--build", str(folder)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert any(folder.glob("accelerator/engine-*/engine.so"))
    used = compute(tmp_path, CXX="missing-compiler", ACCELERATOR_SIM_LIBRARIES=str(folder))
    assert used.stdout == "[21.0, 21.0] True\n", used.stderr
    assert "accelerator" not in used.stderr
