"""Programs in C that use kernels while other threads, forks or limits of the system disturb them."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.xdist_group("extensions")]

SOURCE = Path(__file__).with_name("launches.c").read_text()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (runtime,) = (path for path in simulated_environment()["LD_PRELOAD"].split(":") if path.endswith("libcudart.so.13"))
    flags = ("-Wall", "-rdynamic", "-pthread", "-Wl,--no-as-needed", runtime)
    return compiled(SOURCE, tmp_path_factory.mktemp("launches") / "launches", *flags)


def run(program: Path, *arguments: str | Path, variables: dict[str, str] | None = None) -> None:
    environment = simulated_environment(variables, gpus=2)
    done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("use", ["a variable", pytest.param("initialization", marks=pytest.mark.slow)])
def test_the_constructor_of_a_library_calls_cuda(program: Path, tmp_path: Path, use: str) -> None:
    library = compiled(SOURCE, tmp_path / "library.so", "-DLIBRARY", "-shared", "-fPIC")
    run(program, f"{use} beside a constructor", library)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a deadline", marks=pytest.mark.slow),
        "the end of a capture",
        "a launch without files",
        "a variable without files",
        "a launch without memory",
        pytest.param("the end of a thread", marks=pytest.mark.slow),
        "cancelled threads",
        "signals",
    ],
)
def test_a_program(program: Path, name: str) -> None:
    run(program, name)


@pytest.mark.slow
def test_a_process_is_forked_while_the_translator_starts(program: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    run(program, "a fork", variables={"ACCELERATOR_SIM_KERNEL_CACHE": str(tmp_path / "cache")})


def test_a_signal_from_outside_ends_a_process_whose_kernel_runs(program: Path) -> None:
    environment = simulated_environment(gpus=2)
    done = subprocess.run([program, "a fatal signal"], env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, "")
