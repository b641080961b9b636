"""Programs in C that use kernels while other threads, limits of the system or forked processes disturb them."""

from __future__ import annotations

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
    return compiled(SOURCE, tmp_path_factory.mktemp("launches") / "launches", "-rdynamic", "-pthread")


def run(program: Path, *arguments: object, variables: dict[str, str] | None = None) -> None:
    command = [program, *map(str, arguments)]
    done = subprocess.run(
        command, env=simulated_environment(variables, gpus=1), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["register", "initialize"])
def test_the_constructor_of_a_library_calls_cuda(program: Path, tmp_path: Path, name: str) -> None:
    library = compiled(SOURCE, tmp_path / "library.so", "-DLIBRARY", "-shared", "-fPIC")
    run(program, name, library)
