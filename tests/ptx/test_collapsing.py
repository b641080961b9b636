"""Kernels whose warps run as loops over their lanes compute what separate lanes compute, from random programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerator.simulation._ptx import generator
from tests.ptx.harness import Array, Kernel, KernelFailed
from tests.ptx.programs import HEAD, entry, words
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]

DECLARE = """
    .reg .b32 %a<4>, %at, %lane, %n; .reg .f32 %f<3>; .reg .pred %g<3>, %again; .reg .b64 %from, %to, %wide;
    .shared .align 16 .b8 kept[16384];
"""
BEGIN = """
    mov.u32 %at, kept;
    mov.u32 %lane, %tid.x; ld.global.u32 %a0, [%in]; mov.u32 %a1, %thread; xor.b32 %a2, %a0, 0x9e3779b9; mov.u32 %a3, %laneid;
    cvt.rn.f32.s32 %f0, %a0; mov.b32 %f1, %a0; mul.f32 %f2, %f0, 0f3F000001;
    setp.lt.s32 %g0, %a0, 0; setp.gt.u32 %g1, %a3, 13; setp.eq.u32 %g2, %thread, 5;
"""
WORDS, FLOATS, FLAGS = ("%a0", "%a1", "%a2", "%a3"), ("%f0", "%f1", "%f2"), ("%g0", "%g1", "%g2")
# D, A, B: words; F, G, H: floats; P, Q: predicates; N, M: numbers; L: a label.
ARITHMETIC = (
    *(
        f"{name} D, A, B;"
        for name in ("add.u32", "sub.s32", "mul.lo.u32", "min.s32", "max.u32", "xor.b32", "div.u32", "mul.hi.s32")
    ),
    *(
        "shl.b32 D, A, N;",
        "shr.s32 D, A, N;",
        "selp.b32 D, A, B, P;",
        "bfe.u32 D, A, N, 7;",
        "popc.b32 D, A;",
        "prmt.b32 D, A, B, M;",
    ),
    *(
        "add.f32 F, G, H;",
        "mul.ftz.f32 F, G, H;",
        "fma.rn.f32 F, G, H, F;",
        "fma.rm.ftz.f32 F, G, H, F;",
        "max.NaN.f32 F, G, H;",
    ),
    *(
        "min.f32 F, G, H;",
        "ex2.approx.ftz.f32 F, G;",
        "cvt.ftz.sat.f32.f32 F, G;",
        "div.full.f32 F, G, H;",
        "selp.f32 F, G, H, P;",
    ),
    *(
        "mov.b32 F, A;",
        "mov.b32 D, G;",
        "cvt.rzi.s32.f32 D, G;",
        "setp.lt.s32 P, A, B;",
        "setp.gtu.f32 P, G, H;",
        "and.pred P, P, Q;",
    ),
    *(
        "mov.u32 D, %tid.x;",
        "mov.u32 D, %lanemask_lt;",
        "@P add.u32 D, A, B;",
        "@!P fma.rn.f32 F, G, H, F;",
        "@Q mov.u32 D, N;",
    ),
)
MEMORY = (
    "and.b32 %at, A, 63; mad.wide.u32 %from, %at, 4, %inputs; ld.global.u32 D, [%from];",
    "and.b32 %at, A, 31; mad.wide.u32 %from, %at, 8, %inputs; @P ld.global.v2.f32 {F, G}, [%from];",
    "ld.global.u32 D, [%inputs+N]; ".replace("N", "12"),
    "mad.wide.u32 %from, %lane, 4, %inputs; @!P ld.global.f32 F, [%from];",
    "mad.wide.u32 %to, %thread, 16, %outputs; @P st.global.v2.u32 [%to], {A, B};",
    "mad.wide.u32 %to, %thread, 16, %outputs; st.global.f32 [%to+8], F;",
    "and.b32 %at, A, 3; mad.wide.u32 %to, %at, 4, %outputs; red.global.add.u32 [%to+16384], A;",
)
EXCHANGES = (
    *(
        f"shfl.sync.{mode}.b32 D|P, A, N, {c:#x}, -1;"
        for mode in ("bfly", "down", "idx")
        for c in (31, 0x181F, 0x1C1F, 0x0A1F, 9)
    ),
    *(f"shfl.sync.up.b32 D|P, A, N, {c:#x}, -1;" for c in (0, 0x1800, 0x1C00, 3)),
    *("shfl.sync.bfly.b32 F, G, N, 31, -1;", "shfl.sync.idx.b32 D, A, B, 31, -1;", "shfl.sync.idx.b32 D, D, N, 0x181f, -1;"),
    *(f"vote.sync.{mode}.pred P, Q, -1;" for mode in ("all", "any", "uni")),
    *("vote.sync.ballot.b32 D, P, -1;", "vote.sync.ballot.b32 D, !P, -1;", "vote.sync.any.pred P, !P, -1;"),
    *(
        f"redux.sync.{name} D, A, -1;"
        for name in ("add.u32", "min.s32", "max.u32", "max.s32", "min.u32", "xor.b32", "and.b32", "or.b32")
    ),
    *("match.any.sync.b32 D, A, -1;", "activemask.b32 D;", "bar.warp.sync -1;", "elect.sync D|P, -1;"),
)
BARRIERS = (
    "shl.b32 %at, %lane, 2; st.shared.u32 [%at], A; bar.sync 0; xor.b32 %at, %at, 4; ld.shared.u32 D, [%at]; bar.sync 0;",
    "shl.b32 %at, %lane, 3; st.shared.v2.f32 [%at], {F, G}; bar.sync 0; ld.shared.f32 H, [8]; bar.sync 0;",
    "barrier.red.popc.u32 D, 0, P;",
    "barrier.red.or.pred P, 0, Q;",
)
plain = st.sampled_from(ARITHMETIC + MEMORY)


def _nested(inner: st.SearchStrategy[str], level: int) -> st.SearchStrategy[str]:
    end, other = f"L{level}_", f"L{level + 1}_"

    def number(texts: list[str]) -> str:
        return " ".join(text.replace("L1_", f"L1_{place}_").replace("L2_", f"L2_{place}_") for place, text in enumerate(texts))

    several = st.lists(inner, min_size=1, max_size=3).map(number)
    skip = several.map(lambda text: f"@P bra {end}; {text} {end}:")
    choose = st.tuples(several, several).map(
        lambda texts: (
            f"@!P bra {other}; {texts[0]} bra {end}; {other}: {texts[1].replace('L1_', 'L1_e').replace('L2_', 'L2_e')} {end}:"
        )
    )
    return st.one_of(inner, skip, choose)


loops = st.lists(st.one_of(plain, st.sampled_from(EXCHANGES)), min_size=1, max_size=5).map(
    lambda texts: f"mov.u32 %n, 3; L1_: {' '.join(texts)} sub.u32 %n, %n, 1; setp.ne.u32 %again, %n, 0; @%again bra L1_;"
)
statements = st.one_of(
    plain,
    st.sampled_from(EXCHANGES),
    st.sampled_from(EXCHANGES),
    st.sampled_from(BARRIERS),
    _nested(_nested(plain, 1), 3),
    loops,
)


@st.composite
def kernels(draw: st.DrawFn) -> str:
    """Return the body of a kernel of which all threads come to each exchange."""
    texts: list[str] = []
    for text in draw(st.lists(statements, min_size=3, max_size=12)):
        words_ = re.sub(r"\bL(\d)_", rf"L{len(texts)}_\1_", text)
        for letter, names in (("A", WORDS), ("B", WORDS), ("D", WORDS), ("F", FLOATS), ("G", FLOATS), ("H", FLOATS)):
            words_ = _name(words_, letter, draw(st.sampled_from(names)))
        for letter in "PQ":
            words_ = _name(words_, letter, draw(st.sampled_from(FLAGS)))
        words_ = _name(_name(words_, "N", str(draw(st.integers(0, 31)))), "M", str(draw(st.integers(0, 0xFFFF))))
        texts.append(words_)
    return "\n".join(texts)


def _name(text: str, letter: str, name: str) -> str:
    """Replace a letter that stands alone."""
    return re.sub(rf"(?<![\w.%]){letter}(?![\w.])", name, text)


END = """
    mad.wide.u32 %to, %thread, 32, %outputs; st.global.v4.u32 [%to+32768], {%a0, %a1, %a2, %a3};
    st.global.f32 [%to+32784], %f0; st.global.f32 [%to+32788], %f1; st.global.f32 [%to+32792], %f2;
    selp.u32 %a0, 1, 0, %g0; selp.u32 %a1, 2, 0, %g1; selp.u32 %a2, 4, 0, %g2; or.b32 %a0, %a0, %a1; or.b32 %a0, %a0, %a2;
    st.global.u32 [%to+32796], %a0;
"""


def _choose_lanes(main: generator.Main) -> str:
    return "MODE_LANES"


class _SeparateLanes(Kernel):
    """A kernel whose lanes run one after the other, each until it waits."""

    def __init__(self, texts: Sequence[str], name: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generator.Main, "_choose_mode", _choose_lanes)
            super().__init__(texts, name)


def _both(body: str, threads: int, inputs: Array, **options: Any) -> list[tuple[Array, str]]:
    """Run a kernel in both ways, and return the memory and the error of each."""
    found: list[tuple[Array, str]] = []
    text = HEAD + entry(DECLARE + BEGIN + body + END)
    for make, mode in ((Kernel, "MODE_BLOCK"), (_SeparateLanes, "MODE_LANES")):
        kernel, outputs, error = make([text], "main"), np.zeros(1 << 14, np.uint32), ""
        assert kernel.mode == mode, body
        try:
            kernel.run(2, threads, inputs.copy(), outputs, **options)
        except KernelFailed as failure:
            error = str(failure)
        found.append((outputs, error))
    return found


def _compare(body: str, threads: int) -> None:
    inputs = words(256, "collapsing")
    inputs[::7] = 0
    inputs[3::11] = np.array([1.5, -0.0, np.inf, np.nan, 1e-40, 3e38], np.float32).view(np.uint32)[np.arange(23) % 6]
    (together, error), (apart, other_error) = _both(body, threads, inputs)
    assert error == other_error == "", body
    different = np.flatnonzero(together != apart)
    assert different.size == 0, (int(different[0]), hex(together[different[0]]), hex(apart[different[0]]), body)


SIZES = st.sampled_from((1, 17, 32, 33, 64, 69))


@settings(max_examples=4, deadline=None)
@given(kernels(), SIZES)
def test_lanes_in_loops_compute_what_separate_lanes_do(body: str, threads: int) -> None:
    _compare(body, threads)


@pytest.mark.slow
@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None)
@given(kernels(), SIZES)
def test_lanes_in_loops_compute_what_separate_lanes_do_in_many_programs(body: str, threads: int) -> None:
    _compare(body, threads)


GUARDED = {
    "two guards": "@%g0 mov.u32 %a1, 7; @%g1 add.u32 %a1, %a2, 9; @%g0 add.u32 %a2, %a1, %a0;",
    "guard changes": "@%g0 add.u32 %a1, %a0, 7; not.pred %g0, %g0; @%g0 add.u32 %a2, %a1, %a0; mov.u32 %a1, 3;",
    "nested": """
        @%g0 bra OUT; add.u32 %a1, %a0, 7; @!%g1 bra IN; xor.b32 %a1, %a1, 5; add.u32 %a2, %a1, 1; IN: OUT: mov.u32 %a1, 3;
    """,
    "read under another guard": "@%g0 ld.global.u32 %a1, [%inputs]; @%g1 add.u32 %a2, %a1, 1; @%g0 add.u32 %a3, %a1, 2;",
    "access before a branch": """
        @%g2 ld.global.f32 %f0, [%inputs]; @%g0 bra THEN; @%g1 bra LAST; setp.lt.s32 %g0, %a3, 9; LAST: THEN:
    """,
}


def test_values_under_guards() -> None:
    """Where only instructions with a result's guard read it, all lanes compute it, or none."""
    mix = "mad.lo.u32 %a0, %a0, 5, %a1; mad.lo.u32 %a0, %a0, 5, %a2; mad.lo.u32 %a3, %a0, 5, %a3; bar.sync 0;\n"
    _compare("".join(f"{body} {mix}" for body in GUARDED.values()), 64)


@pytest.mark.parametrize("threads", [37, pytest.param(64, marks=pytest.mark.slow)])
def test_each_exchange_alone(threads: int) -> None:
    """All in one kernel, with other operands each."""
    body = ""
    for number, text in enumerate((*EXCHANGES, *BARRIERS)):
        for letter, name in (
            ("D", f"%a{number % 4}"),
            ("A", f"%a{(number + 1) % 4}"),
            ("B", "%a3"),
            ("F", "%f0"),
            ("G", "%f1"),
        ):
            text = _name(text, letter, name)
        text = _name(_name(_name(text, "H", "%f2"), "N", str(number * 5 % 32)), "P", "%g0")
        body += f"{_name(text, 'Q', '%g1')} add.u32 %a0, %a0, %a1; xor.b32 %a2, %a2, %a0; mad.lo.u32 %a3, %a3, 5, %thread;\n"
    _compare(body, threads)


@pytest.mark.parametrize(
    "access", ["st.global.u32 [%from], %a0;", "ld.global.v2.u32 {%a0, %a1}, [%from];", "@%g2 st.shared.u32 [%at], %a0;"]
)
def test_errors_name_the_thread(access: str) -> None:
    """Of 37 threads, the fifth one of the second warp has another address."""
    body = f"""
        setp.eq.u32 %g2, %lane, 36; selp.u32 %at, 0x10000, 64, %g2; cvt.u64.u32 %wide, %at; shl.b64 %wide, %wide, 8;
        add.u64 %from, %inputs, %wide; @!%g2 mov.u64 %from, %inputs; shfl.sync.bfly.b32 %a1, %a0, 1, 31, -1; {access}
    """
    (_, together), (_, apart) = _both(body, 37, words(256, "errors"))
    assert "thread (36,0,0)" in together
    assert together.partition(" bytes at")[0] == apart.partition(" bytes at")[0]  # they have other addresses


def test_lanes_that_are_no_threads_or_are_guarded_take_no_part() -> None:
    """Of 69 threads, the odd ones store to adjacent memory; the others vote."""
    body = """
        .reg .pred %odd; and.b32 %y, %thread, 1; setp.ne.u32 %odd, %y, 0; @%odd st.global.u32 [%out], %thread;
        vote.sync.ballot.b32 %x, !%odd, -1; st.global.u32 [%out+512], %x;
    """
    kernel, found = Kernel([HEAD + entry(body)], "main"), np.full(256, 99, np.uint32)
    kernel.run(1, 69, np.zeros(128, np.uint32), found)
    assert kernel.mode == "MODE_BLOCK"
    assert found[:128].tolist() == [n if n % 2 and n < 69 else 99 for n in range(128)]
    assert found[128:].tolist() == [0x55555555] * 64 + [0b10101] * 5 + [99] * 59
