"""Each character of a module is understood, or the module is refused: nothing is dropped."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from accelerator.simulation._ptx.constants import parse_constant
from accelerator.simulation._ptx.errors import Refused
from accelerator.simulation._ptx.generator import generate
from accelerator.simulation._ptx.program import Program
from tests.ptx.harness import Kernel
from tests.ptx.programs import HEAD, entry
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]

MODULE = """
.extern .func (.param .b32 status) vprintf(.param .b64 format, .param .b64 values);
.global .align 1 .b8 words[3] = {37, 100, 0};
.visible .const .align 4 .b32 table[4] = {1, 2 + 3, 0x10, 017};
.visible .global .align 8 .u64 where = generic(words) + 1;
.extern .shared .align 16 .b8 dynamic[];
.func (.param .b32 result) twice(.param .b32 number) .noreturn
{
    .reg .b32 %n;
    ld.param.u32 %n, [number]; add.u32 %n, %n, %n; st.param.b32 [result], %n;
    ret;
}
.visible .entry main(.param .u64 .ptr .global .align 8 inputs, .param .u64 outputs) .reqntid 32, 1, 1
{
    .reg .pred %p, %q; .reg .b32 %r<6>; .reg .b64 %in, %out, %f; .reg .v4 .b32 %v; .reg .f32 %x; .reg .b16 %h, %g;
    .shared .align 16 .b32 fixed[8];
    .local .align 8 .b8 depot[16];
    ld.param.u64 %in, [inputs]; ld.param.u64 %out, [outputs];
    mov.u32 %r0, %tid.x; setp.lt.u32 %p|%q, %r0, 7;
    st.shared.u32 [fixed+4], %r0; ld.shared.u32 %r1, fixed[1]; ld.shared.u32 %r2, [dynamic];
    @!%p bra $other;
    { .reg .b32 %r1; mov.b32 %r1, 9; add.u32 %r0, %r0, %r1; }
$other:
    @%q add.u32 %r0, %r0, 1;
    { .param .b32 given; .param .b32 got; st.param.b32 [given+0], %r0; call.uni (got), twice, (given);
      ld.param.b32 %r3, [got+0]; }
    ld.global.v4.b32 %v, [%in+16]; mov.b32 {%h, %g}, %v.y; mov.b32 %r4, {%g, %h}; selp.b32 %r5, %v.x, %v.w, !%q;
    mov.f32 %x, 1.5; fma.rn.f32 %x, %x, 0f40000000, -.5e1; cvt.rzi.s32.f32 %r2, %x;
    and.b32 %r3, %r3, 3;
    brx.idx %r3, targets;
targets: .branchtargets first, second, first, second;
first: mad.lo.u32 %r0, %r1, %r2, %r3; bra.uni end;
second: xor.b32 %r0, %r4, %r5;
end:
    st.local.b32 [depot+8], %r0; ld.const.u32 %r1, [table+4]; shfl.sync.bfly.b32 %r2|%p, %r1, 1, 31, -1;
    bar.sync 0;
    mov.u64 %f, twice; { .param .b32 given; .param .b32 got; st.param.b32 [given], %r1;
      prototype: .callprototype (.param .b32 _) _ (.param .b32 _);
      call (got), %f, (given), prototype; ld.param.b32 %r1, [got]; }
    atom.global.cas.b32 %r1, [%out], %r0, %r2; st.global.u32 [%out+4], %r1;
    ret;
}
"""
TOKEN = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[a-z])?(?![\w$])|\.\w+|\d[\w.]*|\.\d\w*|\S")
ACCESSES = re.compile(r"(?:static const struct access accesses|\.name = ).*")


def meaning(text: str) -> str:
    """Return what the translator makes of a kernel, without the texts of instructions that are for reports."""
    return ACCESSES.sub("", generate(Program([HEAD + text]), "main")) + str(
        [(name, variable) for name, variable in Program([HEAD + text]).modules[0].variables.items()]
    )


def mutations(text: str) -> Iterator[tuple[str, str]]:
    """Yield each text with one token taken out, or with another token after it, and what was changed."""
    inserted = ["0", "x", ",", ".b32", "%r0", "{", "}", "(", ")", "[", "]", "@", "!", "|", "+", ":", '"', "<", "."]
    for number, token in enumerate(TOKEN.finditer(text)):
        yield f"without {token[0]} at {token.start()}", text[: token.start()] + " " + text[token.end() :]
        junk = inserted[number % len(inserted)]
        yield f"{junk} after {token[0]} at {token.start()}", text[: token.end()] + f" {junk} " + text[token.end() :]


# Of these a kernel may lack one and mean the same: linkage and hints; the return at a function's end; the state space of an
# address that says it itself, or of global memory; the size of an array with initial values.
MEANINGLESS = re.compile(r"without (?:\.(?:extern|visible|noreturn|uni|global|shared|local|const)|ret|[34]) at \d+")


def unnoticed(step: int) -> list[str]:
    """Return the changes of the module that the translator does not notice, and should."""
    before = meaning(MODULE)
    found: list[str] = []
    for what, text in list(mutations(MODULE))[::step]:
        try:
            after = meaning(text)
        except Refused:
            continue
        if after == before and not MEANINGLESS.fullmatch(what):
            found.append(what)
    return found


def test_that_a_token_less_or_more_is_noticed() -> None:
    assert unnoticed(11) == []


@pytest.mark.slow
def test_that_each_token_less_or_more_is_noticed() -> None:
    assert unnoticed(1) == []


@pytest.mark.slow
def test_that_random_changes_are_refused_by_name_or_noticed() -> None:
    """No change makes the translator fail otherwise than with Refused."""
    generator = random.Random("parser")
    tokens = [token[0] for token in TOKEN.finditer(MODULE)]
    for _ in range(600):
        changed = list(tokens)
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(len(changed))
            changed[place : place + generator.randint(0, 2)] = generator.choices(tokens, k=generator.randint(0, 2))
        with contextlib.suppress(Refused):
            meaning(" ".join(changed))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3*4)+1", 13),
        ("1<<4", 16),
        ("1 << 3 + 1", 16),
        ("-7/2", -3),
        ("(-7 / 2U) >> 62", 1),
        ("7 & 3 == 3", 1),
        ("1 ? 2 : 3 ? 4 : 5", 2),
        ("~0", -1),
        ("(-1) >> 1", -1),
        ("(~0U) >> 63", 1),
        ("(.u64)-1 >> 63", 1),
        ("-1 < 1U", 0),
        ("1.5 < 2.5", 1),
        ("!5", 0),
        ("1 && 0 || 1", 1),
        ("1 << 65", 2),
        ("8 >> 64", 8),
        ("WARP_SZ + 1", 33),
        ("017", 15),
        ("0b1011", 11),
        ("0B11U", 3),
        ("0XfFU", 255),
        ("0x1FFFFFFFF00000010", 0xFFFFFFFF00000010),
        ("--5", 5),
        ("+5", 5),
    ],
)
def test_constant_expressions(text: str, value: int) -> None:
    """The values are those that ptxas 13.0 computes."""
    constant = parse_constant(text)
    assert constant is not None
    assert (constant.value, constant.bits) == (value, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000.0), (".5", 0.5), ("-2.", -2.0), ("-.5E-1", -0.05), ("1.1+2.2", 1.1 + 2.2), ("3.0 / -(2.0 - 0.5)", -2.0)],
)
def test_floating_point_constants(text: str, value: float) -> None:
    constant = parse_constant(text)
    assert constant is not None
    assert (constant.bits, np.uint64(constant.value).view(np.float64)) == (64, value)


@pytest.mark.parametrize(
    "text", ["08", "12u", "12L", "1.5f", "1.0/3", "1/0", "1+", "(1", "0f3f8", "99999999999999999999", "1 2", "5x"]
)
def test_what_is_no_constant_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="the constant"):
        parse_constant(text)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mov.b32 %x, %y, %z;", "3 operands in the place of 2"),
        ("add.u32 %x, %y;", "2 operands in the place of 3"),
        ("ld.global.u32 %x, [%in], 5;", "3 operands in the place of 2"),
        ("ld.global.u32 %x, [%in] junk;", "the address"),
        ("ld.global.v2.u32 %x, [%in];", "ld.global.v2.u32"),
        ("ld.global.u32 {%x, %y}, [%in];", "ld.global.u32"),
        ("add.u32 %x, %y, 1.5;", "a constant in the place of a u32"),
        (".reg .f32 f; mov.f32 f, 1;", "a constant in the place of a f32"),
        (".reg .f64 d; mov.f64 d, 0f3f800000;", "a constant in the place of a f64"),
        (".reg .b32 t, t;", "a second t"),
        ("a: a: ret;", "a second label a"),
        (".reg .b32 t, ; mov.b32 t, 1;", "before or after a comma"),
        (".reg .b32 t junk;", "a declaration"),
        (".reg .b32 .b64 t;", "a declaration"),
        (".shared .b32 t = 5;", "a declaration"),
        (".shared .b32 t[4]; ld.shared.u32 %x, t[%y];", "the address"),
        ("ld.u32 %x, [inputs];", "a parameter at a generic address"),
        ("vadd.u32.u32.u32 %x, %y.b0, %z;", "the operand %y.b0"),
        ("vadd2.u32.u32.u32 %x, %y, %z, %z;", "the instruction vadd2"),
        (".maxnreg 5;", "maxnreg"),
        (".loc 1 2\n mov.u32 %x, 1;", "loc 1 2"),
        ("junk", "junk"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(body: str, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        generate(Program([HEAD + entry(body)]), "main")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (".func f() { ret; } .func f() { ret; }", "a second function f"),
        (".global .b32 g; .global .b32 g;", "a second variable g"),
        (".global .b32 g", "a declaration: g .visible"),
        (".func f() { ret;", "which has no end"),
        (".func f() .fast { ret; }", "a function's header"),
        (".func f() junk { ret; }", "a function's header"),
        (".extern .func f(.param .b32) junk;", "a function's header"),
        ("junk;", "junk;"),
        (".address_size 32", "addresses of 32 bits"),
        (".global .texref t;", "the type texref"),
    ],
)
def test_parts_of_a_module_that_are_not_understood_are_refused_by_name(part: str, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        generate(Program([f"{HEAD}{part}\n{entry('st.global.u32 [%out], 1;')}"]), "main")


@pytest.mark.parametrize(("size", "is_refused"), [(48 << 10, False), ((48 << 10) + 4, True)])
def test_the_limit_of_static_shared_memory(size: int, is_refused: bool) -> None:
    text = HEAD + entry(f".shared .align 4 .b8 s[{size}]; st.shared.u32 [s], 1; st.global.u32 [%out], 1;")
    if not is_refused:
        assert generate(Program([text]), "main")
        return
    with pytest.raises(Refused, match="49156 bytes of static shared memory; ptxas takes at most 49152"):
        generate(Program([text]), "main")


# Each computes its number.
SPELLINGS = {
    "a declaration without blanks": ("{ .reg .b32 t; mov.b32 t,5; {.reg.b32 t; mov.b32 t,7;} mov.b32 %x,t; }", 5),
    "no blank after an opcode": ("mov.u32%x,3;", 3),
    "a blank in an opcode": ("mov\n.u32 %x, 3;", 3),
    "an expression": ("mov.u32 %x, (3*4)+1;", 13),
    "numbers of registers": (".reg .b32 %a<0x3>, %b< 2 >; mov.u32 %a2, 4; mov.u32 %b1, %a2; mov.u32 %x, %b1;", 4),
    "vector registers": (".reg .v4.b32 v; mov.b32 v.r, 1; mov.b32 v.y, 2; add.u32 %x, v.x, v.g;", 3),
    "vector registers in a row": (".reg .v2 .b32 v<2>; mov.v2.b32 v1, {3, 4}; add.u32 %x, v1.x, v1.y;", 7),
    "a vector register as two halves": (
        ".reg .v2 .b32 v; .reg .b64 d; mov.u64 d, 0x500000007; mov.b64 v, d; mov.b32 %x, v.y;",
        5,
    ),
    "a vector of threads": ("mov.v4.u32 {%y, %x, _, _}, %ntid; mov.u32 %z, %ntid.w; add.u32 %x, %x, %z;", 1),
    "elements of arrays": (".shared .b32 s[4]; st.shared.b32 s[1+1], 6; ld.shared.b32 %x, [s+8];", 6),
    "the address of an element": (".shared .b32 s[4]; mov.u32 %x, s[2]; mov.u32 %y, s; sub.u32 %x, %x, %y;", 8),
    "elements of vectors": (".shared .v2 .b32 s[4]; st.shared.b32 [s+4], 6; ld.shared.b32 %x, s[1];", 6),
    "a generic address of shared memory": (".shared .b32 s; st.b32 [s], 8; ld.shared.b32 %x, [s];", 8),
    "offsets": (".shared .b32 s[4]; st.shared.b32 [s+2*4], 2; mov.u32 %y, s; ld.shared.b32 %x, [%y+(4+4)];", 2),
    "a comment with braces and quotes": ('mov.u32 %x, /* ; } " */ 9; // ; { "', 9),
    "pragmas": ('.pragma "nounroll"; .pragma "a;{b}", "c"; mov.u32 %x, 1;', 1),
    "labels on one line": ("mov.u32 %x, 0; a: b: add.u32 %x, %x, 1; setp.lt.u32 %p, %x, 5; @%p bra a;", 5),
    "labels of scopes": ("{ a: mov.u32 %x, 1; } { a: add.u32 %x, %x, 1; }", 2),
    "blanks in a guard": ("setp.ne.u32 %p, 0, 0; mov.u32 %x, 3; @ ! %p mov.u32 %x, 4;", 4),
    "blanks in a pair": ("setp.lt.u32 %p | %q, 1, 2; selp.u32 %x, 3, 4, ! %q;", 3),
    "a line directive before an instruction": (".loc 1 2 3 mov.u32 %x, 7;", 7),
    "orders of modifiers": (".reg .f32 f; mov.f32 f, 1e3; add.sat.ftz.rn.f32 f, f, .5; mov.b32 %x, f;", 0x3F800000),
    "relu after the type": ("max.s32.relu %x, -5, -3;", 0),
    "a volatile local variable": (".local .b32 l; st.volatile.local.u32 [l], 6; ld.local.volatile.u32 %x, [l];", 6),
    "a ballot": ("setp.eq.u32 %p, 0, 0; vote.ballot.sync.b32 %x, %p, 1;", 1),
    "video": ("vadd.u32.u32.u32 %x, 5, 7; vset.u32.u32.lt %y, 5, 7; add.u32 %x, %x, %y;", 13),
    "an unsigned constant": ("mov.u32 %x, 0xFFFFFFFFU; shr.u32 %x, %x, 0B11100;", 15),
}


def test_spellings() -> None:
    """ptxas takes all of them. Each is in a scope of its own in one kernel."""
    stores = [f"{{ {body}\n st.global.u32 [%outputs+{4 * place}], %x; }}" for place, (body, _) in enumerate(SPELLINGS.values())]
    outputs = np.zeros(len(SPELLINGS), np.uint32)
    files = '.file 1 "a // b.cu" .file 2 "c.cu", 3, 4\n.pragma "x";\n.section .debug { .b8 1, 2\nL:\n.b32 L }\n'
    Kernel([HEAD + files + entry(" ".join(stores))], "main").run(1, 1, outputs.copy(), outputs)
    wrong = {name: int(found) for (name, (_, value)), found in zip(SPELLINGS.items(), outputs, strict=True) if found != value}
    assert wrong == {}
