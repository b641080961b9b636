"""Programs and libraries that nvcc has linked with the static CUDA runtime, which is not simulated."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support import python, simulated_environment
from tests.support.simulation import linux_only

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = linux_only

# What the static runtime of CUDA 12 and 13 does first, in a program that ignores its error and writes to memory it did not get.
SOURCE = """
#include <dlfcn.h>
#include <stdio.h>

int start(void)
{
    static const unsigned char id[] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                       0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
    const void *table = &table;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*get_table)(const void **, const void *) = (int (*)(const void **, const void *))dlsym(driver, "cuGetExportTable");
    printf("begin\\n");
    int error = get_table(&table, id);
    return table ? -1 : error;
}

int main(void)
{
    int *volatile memory = 0;
    start();
    *memory = 1;
    return 0;
}
"""
LINE = "{} is linked with the static CUDA runtime, which is not simulated, so its calls fail: {}\n"
LINK = "link it with -cudart shared"


def build(folder: Path, *flags: str, name: str = "program") -> str:
    source, output = folder / "program.c", folder / name
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O0", *flags, os.fspath(source), "-o", os.fspath(output), "-ldl"], check=True)
    return os.fspath(output)


@pytest.mark.parametrize("flags", [["-pie", "-fPIE"], ["-no-pie"]])
def test_a_program_ends_with_the_cause_and_the_remedy(tmp_path: Path, flags: list[str]) -> None:
    program = build(tmp_path, *flags)
    done = subprocess.run([program], env=simulated_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "begin\n", LINE.format(program, LINK))


@pytest.mark.parametrize(("name", "remedy"), [("program", LINK), ("libcublas.so.13", "call torch's ops instead")])
def test_a_library_gets_an_error_and_is_named_once(tmp_path: Path, name: str, remedy: str) -> None:
    not_found = 500
    library = build(tmp_path, "-shared", "-fPIC", name=name)
    program = f"import ctypes\nlibrary = ctypes.CDLL({library!r})\nprint(library.start(), library.start())"
    done = python(program, simulated_environment())
    assert (done.returncode, done.stderr) == (0, LINE.format(library, remedy))
    # Python and C write from buffers of their own.
    assert sorted(done.stdout.split()) == [*[str(not_found)] * 2, *["begin"] * 2]


def test_other_tables_are_missing_without_a_word() -> None:
    program = """
import ctypes
cuda, table = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(1)
print(cuda.cuGetExportTable(ctypes.byref(table), bytes(16)), table.value, cuda.cuGetExportTable(None, bytes(16)))
"""
    done = python(program, simulated_environment())
    assert (done.stdout, done.stderr) == ("500 None 1\n", "")
