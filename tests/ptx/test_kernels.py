"""What kernels do beside the results of single instructions: they print, wait for each other, call functions, copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from tests.ptx.harness import Kernel, KernelFailed, captured
from tests.ptx.programs import HEAD, entry
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]


def stored(values: list[tuple[str, str]]) -> str:
    """Return PTX that stores arguments of printf, each aligned to its size."""
    lines: list[str] = []
    offset = 0
    for type, value in values:
        size = int(type[1:]) // 8
        offset = -(-offset // size) * size
        lines.append(f"st.local.{type} [values+{offset}], {value};")
        offset += size
    return " ".join(lines)


@pytest.mark.parametrize(
    ("format", "arguments", "printed", "count"),
    [
        ("%zu %d|", [("b64", "5000000000"), ("b32", "7")], "5000000000 7|", 2),
        ("%jd %td %ld %lld|", [("b64", f"-{number}000000000") for number in (5, 6, 7, 8)], None, 4),
        ("%d %*d %s|", [("b32", "1"), ("b32", "4"), ("b32", "2"), ("b64", "0")], "1    2 (null)|", 4),
        ("%hhx %c 100%%|", [("b32", "255"), ("b32", "120")], "ff x 100%|", 2),
        ("nothing|", [], "nothing|", 0),
        (None, [], "", -1),
    ],
)
def test_printf_returns_the_number_of_its_arguments(
    format: str | None, arguments: list[tuple[str, str]], printed: str | None, count: int
) -> None:
    body = f"""
        .local .align 8 .b8 values[64]; .reg .b64 %format, %values; .param .b64 a; .param .b64 b; .param .b32 r;
        {stored(arguments)}
        mov.u64 %values, values; cvta.local.u64 %values, %values; mov.u64 %format, {"text" if format else "0"};
        st.param.b64 [a], %format; st.param.b64 [b], %values; call (r), vprintf, (a, b); ld.param.b32 %x, [r];
        st.global.u32 [%out], %x;
    """
    head = f"{HEAD}.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n.global .b8 text[64];\n"
    kernel, result = Kernel([head + entry(body)], "main"), np.zeros(1, np.int32)
    text = np.frombuffer((format or "").encode().ljust(64, b"\0"), np.uint8)
    with captured(1) as texts:
        kernel.run(1, 1, np.zeros(1, np.uint32), result, variables=[text] if format else [])
    assert texts == ["-5000000000 -6000000000 -7000000000 -8000000000|" if printed is None else printed]
    assert result[0] == count


NAN = 0x7FFFFFFF
NANS = {  # from %f0 = 0, %fi = infinity, %fn = a NaN with a payload and a sign, %d0 = 0
    "div.rn.f32 %f, %f0, %f0;": NAN,
    "sub.f32 %f, %fi, %fi;": NAN,
    "mul.rz.f32 %f, %fi, %f0;": NAN,
    "fma.rn.f32 %f, %fi, %f0, %f0;": NAN,
    "sqrt.rn.f32 %f, %minus;": NAN,
    "rsqrt.approx.f32 %f, %minus;": NAN,
    "lg2.approx.ftz.f32 %f, %minus;": NAN,
    "sin.approx.f32 %f, %fi;": NAN,
    "add.f32 %f, %fn, %f0;": NAN,
    "fma.rn.f32 %f, %f0, %f0, %fn;": NAN,
    "max.f32 %f, %fn, %fn;": NAN,
    "min.NaN.f32 %f, %fn, %f0;": NAN,
    "rcp.approx.f32 %f, %fn;": NAN,
    "div.full.f32 %f, %fn, %f0;": NAN,
    "cvt.rni.f32.f32 %f, %fn;": NAN,
    "cvt.rn.f32.f64 %f, %dn;": NAN,
    "cvt.f32.f16 %f, %hn;": NAN,
    # More arithmetic, a choice, a loop and a comparison read it before it is stored.
    "sub.f32 %f, %fi, %fi; add.f32 %f, %f, %minus; mul.f32 %f, %f, %f;": NAN,
    "sub.f32 %f, %fi, %fi; selp.f32 %f, %f, %f0, %p;": NAN,
    "div.rn.f32 %w, %f0, %f0; mov.b32 %f, %w;": NAN,
    "div.rn.f32 %w, %f0, %f0; setp.gt.s32 %q, %w, 0; selp.f32 %f, %minus, %f0, %q;": 0xBF800000,
    "div.rn.f32 %w, %f0, %f0; copysign.f32 %f, %w, %minus;": 0x3F800000,
    "mov.f32 %f, %f0; again: fma.rn.f32 %f, %fi, %f0, %f; setp.leu.f32 %q, %f, %f0; @!%q bra again;": NAN,
    "add.f32x2 %pair, %pn, %pn; mov.b64 {%f, %w}, %pair;": NAN,
    "div.rn.f32 %w, %f0, %f0; shfl.sync.idx.b32 %f, %w, 0, 31, 1;": NAN,
    "st.shared.f32 [word], %f0; red.shared.add.f32 [word], %fn; ld.shared.f32 %f, [word];": NAN,
    "sub.f32 %w, %fi, %fi; atom.shared.exch.b32 %f, [word], %w; ld.shared.b32 %f, [word];": NAN,
    # What moves bits keeps them, also those that look like a NaN.
    "mov.f32 %f, %fn;": 0xFFC12345,
    "selp.f32 %f, %fn, %f0, %p;": 0xFFC12345,
    "cvt.f32.bf16 %f, %bn;": 0xFFC10000,
    "mov.b32 %w, -1; @!%p sub.f32 %w, %fi, %fi; mov.b32 %f, %w;": 0xFFFFFFFF,
    # Half precision has one NaN too. Double precision has that of x86, and keeps payloads.
    "{ .reg .b16 %h; add.f16 %h, %hn, %hn; cvt.u32.u16 %w, %h; mov.b32 %f, %w; }": 0x7FFF,
    "{ .reg .b16 %h; sub.bf16 %h, %bn, %bn; cvt.u32.u16 %w, %h; mov.b32 %f, %w; }": 0x7FFF,
    "{ .reg .f64 %d; div.rn.f64 %d, %d0, %d0; mov.b64 {%w, %f}, %d; }": 0xFFF80000,
    "{ .reg .f64 %d; add.rn.f64 %d, %d0, %dn; mov.b64 {%w, %f}, %d; }": 0xFFFC0000,
    "{ .reg .f64 %d; sub.f32 %w, %fi, %fi; cvt.f64.f32 %d, %w; mov.b64 {%w, %f}, %d; }": 0x7FFFFFFF,
}


def wrong_results(expected: dict[str, int], head: str = "", inputs: Sequence[int] = (0,)) -> list[str]:
    """Run one thread through texts of PTX, of which each computes %f, a register of 32 bits; describe the wrong ones."""
    body = head
    for place, text in enumerate(expected):
        text = text.replace("again", f"again_{place}")
        body += f"{{ .reg .f32 %f; .reg .b32 %w; .reg .b64 %pair; {text} st.global.f32 [%outputs+{4 * place}], %f; }}\n"
    found = np.zeros(len(expected), np.uint32)
    Kernel([HEAD.replace("sm_90", "sm_100") + entry(body)], "main").run(1, 1, np.array(inputs, np.uint32), found)
    return [f"{text} {bits:#x}" for (text, right), bits in zip(expected.items(), found.tolist(), strict=True) if bits != right]


def test_arithmetic_has_one_nan_and_copies_keep_theirs() -> None:
    head = """
        .reg .f32 %f0, %fi, %fn, %minus; .reg .f64 %d0, %dn; .reg .b16 %hn, %bn; .reg .b64 %pn; .shared .align 4 .b32 word;
        ld.global.f32 %f0, [%inputs]; mov.b32 %fi, 0x7f800000; add.f32 %fi, %fi, %f0; mov.b32 %minus, 0xbf800000;
        ld.global.f32 %fn, [%inputs+4]; cvt.f64.f32 %d0, %f0; ld.global.f64 %dn, [%inputs+8]; mov.b16 %hn, 0xfe01;
        mov.b16 %bn, 0xffc1; mov.b64 %pn, {%fn, %fn}; setp.eq.f32 %p, %f0, %f0;
    """
    assert wrong_results(NANS, head, [0, 0xFFC12345, 0, 0xFFFC0000]) == []


BFLOAT16 = {7: 0x40E0, 9: 0x4110, 29: 0x41E8, 37: 0x4214, 258: 0x4381, 260: 0x4382, 262: 0x4383}
"""Bits of integers. 9 * 29 and 7 * 37 are ties: 261 is nearest to 260 and 262, and 259 to 258 and 260."""


def ties_of_fma() -> dict[str, int]:
    found: dict[str, int] = {}
    for a, b, tiny, right in (
        (9, 29, 0, 260),
        (9, 29, 1, 262),
        (9, 29, -1, 260),
        (7, 37, 0, 260),
        (7, 37, 1, 260),
        (7, 37, -1, 258),
    ):
        for sign in (0, 0x8000):
            c = {0: 0, 1: 0x0D80 ^ sign, -1: 0x8D80 ^ sign}[tiny]  # 2**-100
            operands = f"{BFLOAT16[a] | sign:#x}, {BFLOAT16[b]:#x}, {c:#x}"
            text = "{ .reg .b16 %a, %b, %c; mov.b16 %a, A; mov.b16 %b, B; mov.b16 %c, C; fma.rn.bf16 %a, %a, %b, %c;"
            for name, value in zip("ABC", operands.split(", "), strict=True):
                text = text.replace(f", {name};", f", {value};")
            found[f"{text} cvt.u32.u16 %w, %a; mov.b32 %f, %w; }}"] = BFLOAT16[right] | sign
    return found


SATURATED = {
    f"mov.b32 %w, {bits:#x}; cvt.{rounding}.satfinite.tf32.f32 %w, %w; mov.b32 %f, %w;": 0x7F7FE000 | bits & 0x80000000
    for rounding in ("rna", "rn", "rz")
    for bits in (0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000)
}


@pytest.mark.parametrize("texts", [ties_of_fma(), SATURATED], ids=["fma", "tf32"])
def test_arithmetic_at_its_edges(texts: dict[str, int]) -> None:
    assert wrong_results(texts) == []


def test_conversions_to_integers_saturate() -> None:
    values = [2.0**31, 2.0**32, -(2.0**31), -(2.0**33), 2.0**63, 2.0**64, -1.0, 127.0, 128.0, -129.0, 255.5, 65536.0]
    values += [float("inf"), float("-inf")]
    kinds = list(itertools.product((8, 16, 32, 64), "su", ("f32", "f64")))
    body = f"""
        .reg .f32 %single; .reg .f64 %double; .reg .b64 %wide; mad.wide.u32 %in, %thread, 8, %inputs;
        mad.wide.u32 %out, %thread, {8 * len(kinds)}, %outputs;
        ld.global.f64 %double, [%in]; cvt.rn.f32.f64 %single, %double;
    """
    for place, (bits, sign, source) in enumerate(kinds):
        number = {"f32": "%single", "f64": "%double"}[source]
        body += f"{{ .reg .b{max(bits, 16)} %r; cvt.rzi.{sign}{bits}.{source} %r, {number};"
        body += f" cvt.{sign}64.{sign}{bits} %wide, %r; st.global.b64 [%out+{8 * place}], %wide; }}\n"
    found = np.zeros((len(values), len(kinds)), np.uint64)
    Kernel([HEAD + entry(body)], "main").run(1, len(values), np.array(values), found)
    for value, row in zip(values, found.tolist(), strict=True):
        whole = int(min(max(value, -(2.0**65)), 2.0**65))
        limits = [
            (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if sign == "s" else (0, (1 << bits) - 1) for bits, sign, _ in kinds
        ]
        assert row == [min(max(whole, low), high) % 2**64 for low, high in limits], value


def test_shuffles_stay_in_their_segments() -> None:
    """Of 8 lanes; beyond them a lane keeps its own value, and an index wraps around."""
    body = "mul.wide.u32 %in, %thread, 16; add.u64 %out, %outputs, %in;"
    for place, operands in enumerate(
        (
            "idx.b32 %x, %thread, 13, 0x181f",
            "up.b32 %x, %thread, 3, 0x1800",
            "down.b32 %x, %thread, 3, 0x181f",
            "bfly.b32 %x, %thread, 12, 0x181f",
        )
    ):
        body += f" shfl.sync.{operands}, -1; st.global.u32 [%out+{4 * place}], %x;"
    found = np.zeros((32, 4), np.uint32)
    Kernel([HEAD + entry(body)], "main").run(1, 32, np.zeros(1, np.uint32), found)
    right = [
        (
            lane // 8 * 8 + 5,
            lane - 3 if lane % 8 >= 3 else lane,
            lane + 3 if lane % 8 < 5 else lane,
            lane ^ 12 if lane & 8 else lane,
        )
        for lane in range(32)
    ]
    assert [tuple(row) for row in found.tolist()] == right


def stored_words(body: str, threads: int, blocks: int = 1, functions: str = "", timeout_ms: int = 10_000) -> list[int]:
    """Run a kernel, and return what its threads store at %out."""
    found = np.zeros(blocks * threads, np.uint32)
    Kernel([HEAD + functions + entry(body)], "main").run(blocks, threads, np.zeros(1), found, timeout_ms=timeout_ms)
    return found.tolist()


@pytest.mark.parametrize("value", ["0", "%thread"])
def test_match_all_compares_the_lanes_of_its_mask(value: str) -> None:
    body = f"""
        setp.lt.u32 %p, %thread, 16; selp.b32 %y, 0xffff, 0xffff0000, %p; selp.b32 %z, {value}, 7, %p; @!%p bra others;
        match.all.sync.b32 %x|%q, %z, %y; bra.uni both;
        others: match.all.sync.b32 %x|%q, %z, %y;
        both: selp.b32 %y, 1, 0, %q; add.u32 %x, %x, %y; st.global.u32 [%out], %x;
    """
    assert stored_words(body, 32) == [0x10000 if value == "0" else 0] * 16 + [0xFFFF0001] * 16


def test_a_barrier_counts_whole_warps() -> None:
    """Of 64 threads 24 have returned: the second warp is whole with those that remain."""
    body = "setp.ge.u32 %p, %thread, 40; @%p bra leaves; bar.sync 1, 64; st.global.u32 [%out], 7; leaves:"
    assert stored_words(body, 64, timeout_ms=1000) == [7] * 40 + [0] * 24


@pytest.mark.parametrize("limit", [0, 30, 64])
def test_a_barrier_reduces_the_predicates_of_those_that_come(limit: int) -> None:
    """The third warp goes on meanwhile, to the barrier of all."""
    body = f"""
        mov.u32 %x, 0; setp.ge.u32 %p, %thread, 64; @%p bra others; setp.lt.u32 %p, %thread, {limit};
        bar.red.popc.u32 %x, 1, 64, %p;
        bar.red.and.pred %q, 2, 64, %p; selp.b32 %y, 100, 0, %q; add.u32 %x, %x, %y;
        bar.red.or.pred %q, 3, 64, %p; selp.b32 %y, 1000, 0, %q; add.u32 %x, %x, %y;
        others: bar.sync 0; st.global.u32 [%out], %x;
    """
    reduced = limit + 100 * (limit == 64) + 1000 * (limit > 0)
    assert stored_words(body, 96, timeout_ms=1000) == [reduced] * 64 + [0] * 32


def test_a_kernel_has_more_time_whenever_a_block_ends() -> None:
    body = """
        .reg .b64 %end, %now; mov.u64 %now, %globaltimer; add.u64 %end, %now, 50000000;
        wait: mov.u64 %now, %globaltimer; setp.lt.u64 %p, %now, %end; @%p bra wait; st.global.u32 [%out], 7;
    """
    assert stored_words(body, 1, blocks=16, timeout_ms=600) == [7] * 16


@pytest.mark.parametrize(("size", "copied"), [(16, 4), (16, 15), (8, 1), (4, 3)])
def test_asynchronous_copies_read_no_more_than_their_size(size: int, copied: int) -> None:
    """Thread 0 copies the last bytes of the memory; the count is in a register."""
    body = f"""
        .shared .align 16 .b8 kept[16]; .reg .b64 %from; st.shared.v4.b32 [kept], {{-1, -1, -1, -1}};
        add.u64 %from, %inputs, {16 - size}; add.u64 %from, %from, {size}; mov.u32 %x, {copied};
        cp.async.ca.shared.global [kept], [%from], {size}, %x; cp.async.wait_all;
        ld.shared.b{8 * min(size, 8)} %from, [kept]; st.global.b{8 * min(size, 8)} [%outputs], %from;
    """
    memory, found = np.arange(16 + copied, dtype=np.uint8), np.zeros(8, np.uint8)
    Kernel([HEAD + entry(body)], "main").run(1, 1, memory, found)
    assert found[: min(size, 8)].tolist() == [*range(16, 16 + copied), *[0] * 16][: min(size, 8)]
    with pytest.raises(KernelFailed, match=f"accesses 1 bytes .*, 0 bytes after {15 + copied} bytes"):
        Kernel([HEAD + entry(body)], "main").run(1, 1, memory[:-1], found)


def test_asynchronous_copies_from_misaligned_memory_fail() -> None:
    body = """
        .shared .align 16 .b8 kept[16]; .reg .b64 %from; add.u64 %from, %inputs, 4; mov.u32 %x, 4;
        cp.async.ca.shared.global [kept], [%from], 16, %x;
    """
    with pytest.raises(KernelFailed, match="no multiple of 16") as failure:
        Kernel([HEAD + entry(body)], "main").run(1, 1, np.zeros(16, np.uint32), np.zeros(1, np.uint32))
    assert failure.value.error == 716


WAIT = """
    .func waits(.param .b64 flag) {
        .reg .b64 %flag; .reg .b32 %value; .reg .pred %p;
        ld.param.b64 %flag, [flag];
        again: ld.volatile.global.u32 %value, [%flag]; setp.eq.u32 %p, %value, 0; @%p bra again;
        ret; }
"""
PEEK = """
    .func (.param .b32 value) peeks(.param .b64 flag) {
        .reg .b64 %flag; .reg .b32 %value;
        ld.param.b64 %flag, [flag]; ATOM st.param.b32 [value], %value; ret; }
"""
LOCAL = """
    .func waits(.param .b64 flag) {
        .local .align 8 .b8 frame[16]; .reg .b64 %flag; .reg .b32 %value; .reg .pred %p;
        ld.param.b64 %flag, [flag]; st.local.b64 [frame], %flag;
        again: ld.local.b64 %flag, [frame]; ld.volatile.global.u32 %value, [%flag]; st.local.b32 [frame+8], %value;
        ld.local.b32 %value, [frame+8]; setp.eq.u32 %p, %value, 0; @%p bra again;
        ret; }
"""
PLAIN = """
    .func nothing() { membar.gl; ret; }
    .func waits(.param .b64 flag) {
        .local .align 8 .b8 frame[16]; .reg .b64 %flag; .reg .b32 %value, %kept; .reg .pred %p;
        ld.param.b64 %flag, [flag];
        again: call nothing; ld.global.u32 %value, [%flag]; st.local.b32 [frame+8], %value;
        ld.local.b32 %kept, [frame+8]; setp.eq.u32 %p, %kept, 0; @%p bra again;
        ret; }
"""
RECURSIVE = """
    .func waits(.param .b64 flag, .param .b32 depth) {
        .reg .b64 %flag; .reg .b32 %value, %depth; .reg .pred %p;
        ld.param.b64 %flag, [flag]; ld.param.b32 %depth, [depth]; setp.eq.u32 %p, %depth, 0; @%p bra again;
        sub.u32 %depth, %depth, 1;
        { .param .b64 a; .param .b32 b; st.param.b64 [a], %flag; st.param.b32 [b], %depth; call waits, (a, b); }
        ret;
        again: ld.volatile.global.u32 %value, [%flag]; setp.eq.u32 %p, %value, 0; @%p bra again;
        ret; }
"""
CALL = "{ .param .b64 a; st.param.b64 [a], %inputs; call waits, (a); }"
LOOP = (
    "again: { .param .b64 a; .param .b32 r; st.param.b64 [a], %inputs; call (r), peeks, (a); ld.param.b32 %x, [r]; }"
    " LATER setp.eq.u32 %q, %x, 0; @%q bra again;"
)
DEEP = "{ .param .b64 a; .param .b32 b; st.param.b64 [a], %inputs; st.param.b32 [b], 5; call waits, (a, b); }"
POINTER = (
    ".reg .b64 %at; mov.b64 %at, waits; { .param .b64 a; st.param.b64 [a], %inputs; p: .callprototype _ (.param .b64 _);"
    " call %at, (a), p; }"
)
SHARED = """
    .shared .b32 kept; again: bar.sync 0; mov.u32 %y, %tid.x; setp.eq.u32 %q, %y, 0;
    @%q ld.volatile.global.u32 %y, [%inputs]; @%q st.shared.u32 [kept], %y; bar.sync 0;
    ld.shared.u32 %z, [kept]; setp.eq.u32 %q, %z, 0; @%q bra again;
"""
POLLS = {
    "by one thread of a block": ("", SHARED),
    "a function": (WAIT, CALL),
    "through a pointer": (WAIT, POINTER),
    "in its frame": (LOCAL, CALL),
    "a load that is not volatile": (PLAIN, CALL),
    "recursion": (RECURSIVE, DEEP),
    "a loop around a function": (PEEK.replace("ATOM", "ld.volatile.global.u32 %value, [%flag];"), LOOP.replace("LATER", "")),
    "a loop around an atom": (PEEK.replace("ATOM", "atom.global.or.b32 %value, [%flag], 0;"), LOOP.replace("LATER", "")),
    "a loop around a pointer": (
        PEEK.replace("ATOM", "atom.global.or.b32 %value, [%flag], 0;"),
        ".reg .b64 %at; mov.b64 %at, peeks;"
        + LOOP.replace("LATER", "").replace(
            "call (r), peeks, (a);", "p: .callprototype (.param .b32 _) _ (.param .b64 _); call (r), %at, (a), p;"
        ),
    ),
    "a result in a frame": (
        PEEK.replace("ATOM", "ld.volatile.global.u32 %value, [%flag];"),
        ".local .b32 kept; " + LOOP.replace("LATER", "st.local.b32 [kept], %x; ld.local.b32 %x, [kept];"),
    ),
}


@pytest.mark.parametrize("name", POLLS)
@pytest.mark.parametrize("by_blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_functions_wait_for_memory_that_others_write(name: str, by_blocks: bool) -> None:
    """Block 0, or thread 0, waits for what the other writes."""
    functions, wait = POLLS[name]
    body = f"""
        setp.ne.u32 %p, %thread, 0; @%p bra writes;
        {wait} ld.global.u32 %x, [%inputs]; st.global.u32 [%outputs], %x; bra leaves;
        writes: membar.gl; st.volatile.global.u32 [%inputs], 7;
        leaves:
    """
    found = np.zeros(1, np.uint32)
    kernel = Kernel([HEAD + functions + entry(body)], "main")
    kernel.run(*((2, 1) if by_blocks else (1, 2)), np.zeros(1, np.uint32), found, timeout_ms=1000)
    assert found[0] == 7


FRAME = """
    .func (.param .b32 result) NAME(.param .b32 number) {
        .local .align 8 .b8 words[SIZE]; .reg .b32 %n; .reg .b64 %at;
        ld.param.b32 %n, [number]; mov.b64 %at, words; st.local.b32 [words+SIZE-4], %n;
        CALL
        ld.local.b32 %n, [words+SIZE-4]; st.param.b32 [result], %n; ret; }
"""


@pytest.mark.parametrize("size", [80_000, 500_000])
@pytest.mark.parametrize("waits", ["", pytest.param("bar.warp.sync -1;", marks=pytest.mark.slow)])
def test_frames_of_functions_may_be_large(size: int, waits: str) -> None:
    """CUDA has up to 512 KB for each thread, of all functions that call each other."""
    inner = FRAME.replace("NAME", "inner").replace("SIZE-4", "7996").replace("SIZE", "8000").replace("CALL", waits)
    call = "{ .param .b32 a; .param .b32 r; st.param.b32 [a], %n; call (r), inner, (a); ld.param.b32 %n, [r]; }"
    outer = FRAME.replace("NAME", "outer").replace("SIZE-4", str(size - 4)).replace("SIZE", str(size)).replace("CALL", call)
    body = call.replace("inner", "outer").replace("%n", "%thread") + " st.global.u32 [%out], %thread;"
    assert stored_words(body, 64, functions=inner + outer) == list(range(64))


def test_a_larger_heap_has_space_for_more() -> None:
    head = f"{HEAD}.extern .func (.param .b64 r) malloc(.param .b64 a);\n.extern .func free(.param .b64 a);\n"
    body = """
        .reg .b64 %at;
        { .param .b64 a; .param .b64 r; st.param.b64 [a], 1048576; call (r), malloc, (a); ld.param.b64 %at, [r]; }
        setp.ne.u64 %p, %at, 0; vote.sync.ballot.b32 %x, %p, -1; popc.b32 %x, %x; st.global.u32 [%outputs], %x;
        { .param .b64 a; st.param.b64 [a], %at; call free, (a); }
    """
    kernel, found = Kernel([head + entry(body)], "main"), np.zeros(1, np.uint32)
    for heap_limit, count in ((8 << 20, 8), (64 << 20, 32), (3 << 20, 3), (0, 0)):
        kernel.run(1, 32, np.zeros(1, np.uint32), found, heap_limit=heap_limit)
        assert found[0] == count


def test_a_larger_stack_has_space_for_deeper_recursion() -> None:
    call = "setp.eq.u32 %p, %n, 0; @%p bra ends; sub.u32 %n, %n, 1;"
    call += " { .param .b32 a; .param .b32 r; st.param.b32 [a], %n; call (r), deep, (a); ld.param.b32 %n, [r]; } ends:"
    function = FRAME.replace("NAME", "deep").replace("SIZE-4", "2044").replace("SIZE", "2048").replace("CALL", call)
    function = function.replace(".reg .b32 %n;", ".reg .b32 %n; .reg .pred %p;")
    body = """
        mov.u32 %x, 100; { .param .b32 a; .param .b32 r; st.param.b32 [a], %x; call (r), deep, (a); ld.param.b32 %x, [r]; }
        st.global.u32 [%out], %x;
    """
    kernel, found = Kernel([HEAD + function + entry(body)], "main"), np.zeros(64, np.uint32)
    with pytest.raises(KernelFailed, match="its stack overflows"):
        kernel.run(1, 64, np.zeros(64, np.uint32), found)
    kernel.run(1, 64, np.zeros(64, np.uint32), found, stack_limit=256 << 10)
    assert found.tolist() == [100] * 64


WARP_OPERATIONS = {
    "bar.warp.sync": "bar.warp.sync %m;",
    "shfl": "shfl.sync.idx.b32 %x, %thread, 0, 31, %m;",
    "vote": "vote.sync.ballot.b32 %x, %p, %m;",
    "match": "match.any.sync.b32 %x, %thread, %m;",
    "redux": "redux.sync.add.u32 %x, %thread, %m;",
    "elect": "elect.sync %x|%p, %m;",
}


@pytest.mark.parametrize("name", WARP_OPERATIONS)
@pytest.mark.parametrize("way", ["together", pytest.param("diverged", marks=pytest.mark.slow)])
def test_a_lane_that_its_mask_lacks_fails(name: str, way: str) -> None:
    """Lane 5 has the mask of the lanes 0 to 3, which are there."""
    body = f"""
        .reg .b32 %m; setp.lt.u32 %p, %thread, 4; setp.eq.u32 %q, %thread, 5; or.pred %q, %p, %q;
        selp.b32 %m, 0xf, 0xffffffd0, %q; {"@!%q bra leaves;" if way == "diverged" else ""}
        {WARP_OPERATIONS[name]}
        leaves: st.global.u32 [%out], %x;
    """
    memory = np.zeros(32, np.uint32)
    with pytest.raises(KernelFailed, match="is executed by lane 5, which its mask 0xf lacks") as failure:
        Kernel([HEAD + entry(body)], "main").run(1, 32, memory, memory.copy(), timeout_ms=1000)
    assert failure.value.error == 715
