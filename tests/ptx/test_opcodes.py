"""Each variant of an instruction that is translated computes what PTX's documentation says."""

from __future__ import annotations

import ctypes
import functools
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelerator.simulation._ptx import compiler
from accelerator.simulation._ptx.errors import Refused
from accelerator.simulation._ptx.generator import generate
from accelerator.simulation._ptx.opcodes import OPERATIONS, canonical, find
from accelerator.simulation._ptx.parser import Module, parse_variables
from accelerator.simulation._ptx.program import Program
from tests.ptx import (
    conversion_cases,
    float_cases,
    integer_cases,
    matrix_cases,
    memory_cases,
    other_cases,
    programs,
    warp_cases,
)
from tests.ptx.cases import Case, batches, failures, kernel_text
from tests.ptx.harness import Kernel
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]

PARTS = 16
SAMPLE = 200
"""Of so many variants in the order of their names, the default suite tests one."""


@functools.cache
def all_cases() -> tuple[Case, ...]:
    def generate() -> Iterator[Case]:
        yield from integer_cases.arithmetic()
        yield from integer_cases.bit_operations()
        yield from integer_cases.comparisons()
        yield from integer_cases.selections()
        for module in (float_cases, conversion_cases, memory_cases, warp_cases, matrix_cases, other_cases):
            yield from module.all_cases()

    return tuple(generate())


@functools.cache
def all_programs() -> tuple[programs.Program, ...]:
    return tuple(programs.all_programs())


def numbered_batches() -> list[list[Case]]:
    return batches(all_cases())


@pytest.mark.slow
def test_that_accepted_variants_are_those_that_are_tested() -> None:
    tested = {case.variant for case in all_cases()}
    for program in all_programs():
        tested.update(program.variants)
    for wmma in matrix_cases.wmmas():
        tested |= matrix_cases.WmmaProgram(wmma).variants
    assert sorted(tested ^ set(OPERATIONS)) == []


def test_a_sample_of_variants() -> None:
    """The exhaustive tests run all of them."""
    chosen = sorted(all_cases(), key=lambda case: case.variant)[::SAMPLE]
    wrong = [failure for batch in batches(chosen, 200) for failure in failures(batch)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_all_variants(part: int) -> None:
    assert [failure for batch in numbered_batches()[part::PARTS] for failure in failures(batch)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "wmma",
    [
        pytest.param(wmma, marks=pytest.mark.exhaustive if place % 8 else (), id=str(wmma))
        for place, wmma in enumerate(matrix_cases.wmmas())
    ],
)
def test_products_of_wmma(wmma: matrix_cases.Wmma) -> None:
    assert matrix_cases.WmmaProgram(wmma).run() == []


# A program of each kind, and the others.
QUICK = (
    "branches",
    "a common branch to where threads diverge",
    "other code between those that diverge",
    "recursion",
    "producers and consumers",
    "a vector of atoms whose result is a later value",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_program(name: str) -> None:
    program = next(program for program in all_programs() if program.name == name)
    assert program.failures() == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_programs(part: int) -> None:
    assert [failure for program in all_programs()[part::8] for failure in program.failures()] == []


@pytest.mark.parametrize("mode", ["toward zero", "subnormal numbers are zero"])
def test_settings_of_the_hosts_arithmetic_change_nothing(mode: str) -> None:
    body = """
        .reg .f32 %f<3>;
        ld.global.f32 %f1, [%in]; ld.global.f32 %f2, [%in+4]; add.rn.f32 %f1, %f1, %f2; st.global.f32 [%out], %f1;
        ld.global.f32 %f1, [%in+8]; ld.global.f32 %f2, [%in+12]; add.rn.f32 %f1, %f1, %f2; st.global.f32 [%out+4], %f1;
    """
    kernel, found = Kernel([programs.HEAD + programs.entry(body)], "main"), np.zeros(2, np.uint32)
    terms = np.array([0x3F800000, 0x33C00000, 0x00400000, 0], np.uint32)  # 1 and 3/4 of its unit, a subnormal number and 0
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 8)()  # fenv_t of x86-64; the last word is MXCSR
    assert libm.fegetenv(environment) == 0
    changed = (ctypes.c_uint32 * 8)(*environment)
    changed[7] |= 0x6000 if mode == "toward zero" else 0x8040
    try:
        assert libm.fesetenv(changed) == 0
        kernel.run(1, 1, terms, found)
        after = (ctypes.c_uint32 * 8)()
        libm.fegetenv(after)
    finally:
        libm.fesetenv(environment)
    assert [hex(word) for word in found] == ["0x3f800001", "0x400000"]
    assert after[7] & 0xE040 == changed[7] & 0xE040


def test_an_initializer_belongs_to_one_variable() -> None:
    variables = parse_variables(".global .u32 x, y = 6, z[2] = {1, 2}")
    assert [(variable.name, variable.initializer) for variable in variables] == [("x", ""), ("y", "6"), ("z", "{1, 2}")]


def test_the_alignment_of_what_a_pointer_points_to_is_not_its_own() -> None:
    parameters = ".param .u32 n, .param .u64 .ptr .global .align 1 p, .param .u64 .ptr .align 16 q"
    [*found] = Module(f"{programs.HEAD}.visible .entry main({parameters}) {{ ret; }}").function("main").parameters
    assert [(variable.name, variable.alignment) for variable in found] == [("n", 4), ("p", 8), ("q", 8)]


@pytest.mark.parametrize(("before", "is_refused"), [("", True), ("trap; ", False)])
def test_exit_in_a_function_is_refused(before: str, is_refused: bool) -> None:
    """It would end the thread. Compilers write it behind trap, where nothing arrives."""
    text = f"{programs.HEAD}.func leaves() {{ {before}exit; }}\n" + programs.entry("call leaves; st.global.u32 [%out], 1;")
    if not is_refused:
        assert "F0_leaves" in generate(Program([text]), "main")
        return
    with pytest.raises(Refused, match="exit in the function leaves"):
        generate(Program([text]), "main")


def ptxas_problems(text: str, target: str, folder: Path) -> str:
    source = folder / "kernel.ptx"
    source.write_text(text)
    architecture = "sm_90" if target == "sm_60" else target  # which CUDA 13 dropped; newer GPUs run its PTX
    command = [str(shutil.which("ptxas")), f"-arch={architecture}", str(source), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.slow
@pytest.mark.exhaustive  # a check of the tests, not of the package
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas of the CUDA toolkit")
def test_that_the_tests_are_valid_ptx(tmp_path: Path) -> None:
    texts = [(kernel_text(batch), batch[0].target) for batch in numbered_batches()]
    texts += [(program.full_text(), program.target) for program in all_programs()]
    texts += [(matrix_cases.WmmaProgram(wmma).text, "sm_90") for wmma in matrix_cases.wmmas()]
    problems = [ptxas_problems(text, target, tmp_path) for text, target in texts]
    assert [problem for problem in problems if "error" in problem or "fatal" in problem] == []


@pytest.mark.parametrize(
    ("opcode", "variant"),
    [
        ("ld.global.nc.L1::no_allocate.L2::128B.v4.f32", "ld.global.v4.f32"),
        ("ld.volatile.shared.u32", "ld.relaxed.shared.u32"),
        ("ld.acquire.sys.global.b64", "ld.relaxed.global.b64"),
        ("ld.global.relaxed.gpu.u32", "ld.relaxed.global.u32"),
        ("ld.weak.shared::cta.b8", "ld.shared.b8"),
        ("ld.param::entry.b32", "ld.param.b32"),
        ("st.release.gpu.global.cg.u32", "st.relaxed.global.u32"),
        ("st.global.wt.L2::cache_hint.b32", "st.global.b32"),
        ("atom.acq_rel.gpu.global.cas.b32", "atom.global.cas.b32"),
        ("atom.add.release.gpu.u32", "atom.add.u32"),
        ("red.relaxed.gpu.global.add.noftz.f16x2", "red.global.add.noftz.f16x2"),
        ("bar.cta.sync", "barrier.sync"),
        ("barrier.cta.red.popc.aligned.u32", "barrier.red.popc.u32"),
        ("bar.warp.sync", "bar.warp.sync"),
        ("mbarrier.arrive.release.cta.shared::cta.b64", "mbarrier.arrive.shared.b64"),
        ("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64", "mbarrier.try_wait.parity.shared.b64"),
        ("cp.async.cg.shared::cta.global.L2::cache_hint.L2::128B", "cp.async.cg.shared.global"),
        ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group.read"),
        ("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"),
    ],
)
def test_that_hints_and_scopes_make_no_other_variant(opcode: str, variant: str) -> None:
    assert canonical(opcode) == variant
    assert variant in OPERATIONS


@pytest.mark.parametrize(
    ("opcode", "reason"),
    [
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", "wgmma"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32", "tcgen05"),
        ("tex.2d.v4.f32.s32", "textures"),
        ("suld.b.2d.b32.trap", "surfaces"),
        ("mapa.shared::cluster.u32", "clusters"),
        ("barrier.cluster.arrive", "barrier.cluster.arrive"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile", "cp.async.bulk.tensor"),
        ("add.rn.sat.f64", "add.rn.sat.f64"),
        ("fancy.new.u32", "fancy.new.u32"),
    ],
)
def test_that_others_are_refused_by_name(opcode: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason.replace(".", r"\.")):
        find(opcode)


def test_that_the_headers_of_kernels_are_short() -> None:
    """Most kernels have some hundred instructions, so that reading immintrin.h would take most of their compilation."""
    command = [*compiler.compiler_command(), *compiler.FLAGS, *compiler.processor_flags(), "-E", "-P"]
    headers = ["-I", str(compiler.HEADERS), "-I", str(compiler.HEADERS.parent)]
    done = subprocess.run([*command, *headers, compiler.HEADERS / "kernel.h"], capture_output=True, check=True)
    assert len(done.stdout.splitlines()) < 5000


def test_that_operands_cover_edges() -> None:
    """The rows of cases are the same in each run, and have numbers at which rounding and signs change."""
    first = float_cases.operands(float_cases.FORMATS["f32"], 2, "seed")
    assert first == float_cases.operands(float_cases.FORMATS["f32"], 2, "seed")
    used = {bits for row in first for bits in row}
    edges = set(float_cases.edges(float_cases.FORMATS["f32"]))
    assert len(used & edges) > 10
    assert random.Random("seed").random() == random.Random("seed").random()
