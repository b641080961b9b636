"""Images that a file system, a linker or an attacker has damaged: CUDA's errors, and no signal, wait, growth or held lock."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time

import pytest

from accelerator.simulation._ptx.errors import Refused
from accelerator.simulation._ptx.images import LZ4, PLAIN, ZSTD, decompress
from tests.simulation.extensions.damaged_images import KERNEL, damage
from tests.simulation.extensions.fat_binaries import compress_lz4, store_zstd
from tests.support import simulated_environment
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only

pytestmark = [linux_only, pytest.mark.xdist_group("extensions")]


def load(first: int, end: int, compute: bool = False) -> None:
    command = [sys.executable, "-m", "tests.simulation.extensions.damaged_images", str(first), str(end)]
    environment = simulated_environment(gpus=1, compute=compute)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, cwd=REPOSITORY)
    assert done.returncode == 0, (done.stdout[-200:], done.stderr[-2000:])
    assert done.stdout.splitlines()[-1] == "errors [0, 200, 218]"


def test_damaged_images_are_refused() -> None:
    load(0, 600)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_many_damaged_images_are_refused(part: int) -> None:
    load(2500 * part, 2500 * (part + 1))


@pytest.mark.slow
def test_damaged_images_are_refused_where_kernels_run() -> None:
    load(0, 60, compute=True)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_damaged_compressed_texts_are_refused(count: int) -> None:
    text = KERNEL.encode()
    whole = {LZ4: compress_lz4(text), ZSTD: store_zstd(text), PLAIN: text}
    for number in range(count):
        choose = random.Random(number)
        compression = choose.choice((LZ4, ZSTD))
        size = choose.choice((len(text), len(text), 0, 1, len(text) + 1, 1 << 28, 1 << 40, (1 << 64) - 1))
        begin = time.monotonic()
        with contextlib.suppress(Refused):
            assert len(decompress(damage(whole[compression], choose), size, compression)) == size
        assert time.monotonic() - begin < 10, number
