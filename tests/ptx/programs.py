"""Kernels that test what needs several threads, memory of a kind or control flow: barriers, copies, calls.

A program names the variants that it tests, and describes what is wrong in its results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .harness import Array, Kernel, KernelFailed
from .memory_cases import TYPES, vectors
from .reference import signed

HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n"


@dataclass
class Program:
    """A kernel ``main(inputs, outputs)`` of 64-bit addresses, and its results.

    Attributes:
        name: A name for reports.
        variants: The variants that it tests.
        text: The PTX, without its head.
        inputs: The memory of the first parameter.
        expected: What the memory of the second one is at the end; None: the kernel fails with `error`.
        threads: The number of threads of a block.
        blocks: The number of blocks.
        mode: The mode in which the kernel must run; "" for any.
        error: CUDA's error.
        says: A part of the error's text.
        options: More arguments of `Kernel.run`.
    """

    name: str
    variants: tuple[str, ...]
    text: str
    inputs: Array
    expected: Array | None
    threads: int = 32
    blocks: int = 1
    mode: str = ""
    error: int = 0
    says: str = ""
    options: dict[str, Any] | None = None
    target: str = "sm_90"

    def full_text(self) -> str:
        return HEAD.replace("sm_90", self.target) + self.text

    def failures(self, make: Any = Kernel) -> list[str]:
        kernel = make([self.full_text()], "main")
        if make is Kernel and self.mode and kernel.mode != self.mode:
            return [f"{self.name} runs in {kernel.mode}, not {self.mode}"]
        outputs = np.zeros_like(self.expected) if self.expected is not None else np.zeros(1024, np.uint8)
        inputs = self.inputs.copy()
        try:
            kernel.run(self.blocks, self.threads, inputs, outputs, **(self.options or {}))
        except KernelFailed as failure:
            if self.error == 0 or failure.error != self.error or self.says not in failure.message:
                return [f"{self.name} fails: {failure}"]
            return []
        if self.expected is None:
            return [f"{self.name} ends without the error {self.error}"]
        if not np.array_equal(outputs, self.expected):
            at = int(np.flatnonzero(outputs.reshape(-1) != self.expected.reshape(-1))[0])
            return [f"{self.name}: element {at} is {outputs.reshape(-1)[at]}, not {self.expected.reshape(-1)[at]}"]
        return []


def entry(body: str, *, declare: str = "") -> str:
    """A kernel whose threads have the addresses of their words: %in and %out, and their number %thread."""
    return f"""
.visible .entry main(.param .u64 inputs, .param .u64 outputs) {{
    .reg .b32 %thread, %x, %y, %z; .reg .b64 %in, %out, %inputs, %outputs; .reg .pred %p, %q; {declare}
    ld.param.u64 %inputs, [inputs]; ld.param.u64 %outputs, [outputs];
    mov.u32 %x, %ctaid.x; mov.u32 %y, %ntid.x; mov.u32 %z, %tid.x; mad.lo.u32 %thread, %x, %y, %z;
    mad.wide.u32 %in, %thread, 4, %inputs; mad.wide.u32 %out, %thread, 4, %outputs;
    {body}
    ret;
}}
"""


def words(count: int, seed: str) -> Array:
    generator = random.Random(seed)
    return np.array([generator.getrandbits(32) for _ in range(count)], np.uint32)


def control_flow() -> Iterator[Program]:
    numbers = words(64, "control")
    thread = np.arange(64, dtype=np.uint32)
    yield Program(
        "branches",
        ("bra", "bra.uni", "ret", "exit"),
        entry("""
            ld.global.u32 %x, [%in];
            setp.lt.u32 %p, %thread, 16;
            @%p bra small;
            setp.lt.u32 %p, %thread, 32;
            @!%p bra large;
            add.u32 %x, %x, 1;
            st.global.u32 [%out], %x;
            ret;
        small:
            add.u32 %x, %x, 2;
            bra.uni end;
        large:
            setp.lt.u32 %p, %thread, 40;
            @%p exit;
            mul.lo.u32 %x, %x, 3;
        end:
            st.global.u32 [%out], %x;
        """),
        numbers,
        np.select([thread < 16, thread < 32, thread < 40], [numbers + 2, numbers + 1, 0 * numbers], numbers * 3),
        threads=64,
        mode="MODE_BLOCK",
    )
    yield from _layouts(numbers, thread)
    yield Program(
        "a return in a function and in the kernel",
        ("ret.uni", "call.uni", "call"),
        """
        .func (.param .b32 result) clamp(.param .b32 number) {
            .reg .b32 %n; .reg .pred %big;
            ld.param.u32 %n, [number];
            setp.gt.u32 %big, %n, 100;
            @%big bra cut;
            st.param.b32 [result], %n;
            ret.uni;
        cut:
            st.param.b32 [result], 100;
            ret;
        }
        """
        + entry("""
            ld.global.u32 %x, [%in];
            and.b32 %x, %x, 255;
            { .param .b32 given; .param .b32 got;
              st.param.b32 [given], %x;
              call.uni (got), clamp, (given);
              ld.param.b32 %x, [got]; }
            { .param .b32 given; .param .b32 got;
              add.u32 %y, %x, 50;
              st.param.b32 [given], %y;
              call (got), clamp, (given);
              ld.param.b32 %y, [got]; }
            add.u32 %x, %x, %y;
            st.global.u32 [%out], %x;
            ret.uni;
        """),
        numbers,
        _clamped(numbers),
        threads=64,
    )
    yield from _indirect(numbers, thread)
    yield from _recursion()
    for name, offset, error in (
        ("a store after shared memory", 1024, 700),
        ("a store far after shared memory", (16 << 20) - 2048, 700),
        ("a store beyond the window of shared memory", 16 << 20, 715),
        ("a store far before shared memory", (1 << 32) - 2048, 715),
    ):
        store = f"mov.u32 %x, bytes; add.u32 %x, %x, {offset}; st.shared.u32 [%x], %thread;"
        text = entry(store, declare=".shared .align 16 .b8 bytes[1024];")
        yield Program(name, (), text, numbers, None, error=error, says="1024 bytes of shared memory")
    for name, opcode in (("a trap", "trap"), ("a breakpoint", "brkpt")):
        yield Program(
            name,
            (opcode,),
            entry(f"setp.eq.u32 %p, %thread, 5; @%p {opcode}; st.global.u32 [%out], %thread;"),
            numbers,
            None,
            error=719,
            says=f"block (0,0,0), thread (5,0,0): it executes {opcode}",
        )


def _clamped(numbers: Array) -> Array:
    first = np.minimum(numbers & 255, 100)
    return (first + np.minimum(first + 50, 100)).astype(np.uint32)


def _indirect(numbers: Array, thread: Array) -> Iterator[Program]:
    for opcode in ("brx.idx", "brx.idx.uni"):
        yield Program(
            opcode,
            (opcode,),
            entry(f"""
                and.b32 %y, %thread, {0 if opcode.endswith("uni") else 3};
                ld.global.u32 %x, [%in];
                table: .branchtargets first, second, third, first;
                {opcode} %y, table;
            first:
                add.u32 %x, %x, 10; bra.uni end;
            second:
                add.u32 %x, %x, 20; bra.uni end;
            third:
                add.u32 %x, %x, 30;
            end:
                st.global.u32 [%out], %x;
            """),
            numbers,
            numbers + (10 if opcode.endswith("uni") else np.array([10, 20, 30, 10], np.uint32)[thread % 4]),
            threads=64,
        )
    functions = "".join(
        f"""
        .func (.param .b32 result) by_{number}(.param .b32 given) {{
            .reg .b32 %n; ld.param.u32 %n, [given]; mul.lo.u32 %n, %n, {number}; st.param.b32 [result], %n; ret;
        }}
        """
        for number in (3, 5)
    )
    call = """
        {{ .param .b32 given; .param .b32 got;
          st.param.b32 [given], %x;
          kind: .callprototype (.param .b32 _) _ (.param .b32 _);
          {call} (got), %function, (given), kind;
          ld.param.b32 %x, [got]; }}
        st.global.u32 [%out], %x;
    """
    for opcode in ("call", "call.uni"):
        yield Program(
            f"an indirect {opcode}",
            (opcode,),
            functions
            + entry(
                f"""
                ld.global.u32 %x, [%in];
                and.b32 %y, %thread, 1; setp.ne.u32 %p, %y, 0;
                mov.u64 %function, by_3; @%p mov.u64 %function, by_5;
                {call.format(call=opcode)}
                """,
                declare=".reg .b64 %function;",
            ),
            numbers,
            numbers * np.where(thread % 2, 5, 3).astype(np.uint32),
            threads=64,
        )
    yield Program(
        "a call of no function",
        (),
        functions
        + entry(
            f"mov.u64 %function, by_3; add.u64 %function, %function, 77; {call.format(call='call')}",
            declare=".reg .b64 %function;",
        ),
        numbers,
        None,
        error=718,
        says="no such function",
    )


def _narrow_addresses(nothing: Array) -> Iterator[Program]:
    """Registers of 32 bits hold addresses of local and parameter memory, as Triton writes them."""
    thread = np.arange(64, dtype=np.uint32)
    for name, wait in (("", ""), (" of threads that wait", "bar.sync 0;")):
        yield Program(
            f"addresses of local memory in 32 bits{name}",
            (),
            entry(f"""
                .local .align 16 .b8 depot[32]; .reg .b32 %SPL; .reg .b64 %SP, %a;
                mov.b32 %SPL, depot; cvt.u64.u32 %a, %SPL; cvta.local.u64 %SP, %a;
                st.local.u32 [%SPL+4], %thread; add.u32 %y, %SPL, 8; st.local.u32 [%y], 7;
                {wait}
                ld.u32 %x, [%SP+4]; ld.u32 %y, [depot+8]; ld.local.u32 %z, depot[4]; add.u32 %x, %x, %y;
                cvta.to.local.u64 %a, %SP; cvt.u32.u64 %y, %a; setp.eq.u32 %p, %y, %SPL; selp.u32 %y, 100, 0, %p;
                add.u32 %x, %x, %y; st.global.u32 [%out], %x;
            """),
            nothing,
            thread + 107,
            threads=64,
        )
    yield Program(
        "a selection between addresses of parameters",
        (),
        entry("""
            mov.b32 %x, inputs; mov.b32 %y, outputs; setp.ge.u32 %p, %thread, 32; selp.b32 %x, %x, %y, %p;
            ld.param.b64 %in, [%x]; mov.b64 %out, outputs; ld.param.b64 %out, [%out];
            mad.wide.u32 %out, %thread, 4, %out; setp.eq.u64 %p, %in, %outputs; selp.u32 %x, 1, 2, %p; st.global.u32 [%out], %x;
        """),
        nothing,
        np.where(thread < 32, 1, 2).astype(np.uint32),
        threads=64,
    )


def _recursion() -> Iterator[Program]:
    text = """
        .func (.param .b32 result) factorial(.param .b32 given) {
            .reg .b32 %n, %m; .reg .pred %end; .local .b32 kept;
            ld.param.u32 %n, [given];
            st.local.u32 [kept], %n;
            setp.le.u32 %end, %n, 1;
            @%end bra last;
            { .param .b32 less; .param .b32 got;
              sub.u32 %m, %n, 1;
              st.param.b32 [less], %m;
              call.uni (got), factorial, (less);
              ld.param.b32 %m, [got]; }
            ld.local.u32 %n, [kept];
            mul.lo.u32 %m, %m, %n;
            st.param.b32 [result], %m;
            ret;
        last:
            st.param.b32 [result], 1;
            ret;
        }
    """
    call = """
        ld.global.u32 %x, [%in];
        { .param .b32 given; .param .b32 got;
          st.param.b32 [given], %x;
          call.uni (got), factorial, (given);
          ld.param.b32 %x, [got]; }
        st.global.u32 [%out], %x;
    """
    inputs = np.arange(32, dtype=np.uint32)
    expected = np.cumprod(np.maximum(inputs, 1), dtype=np.uint32)
    yield Program("recursion", ("call.uni",), text + entry(call), inputs, expected)
    yield Program(
        "endless recursion", (), text + entry(call), np.full(32, 10**9, np.uint32), None, error=700, says="its stack overflows"
    )


# Memory of kinds that a case has not: constants and parameters


def parameters() -> Iterator[Program]:
    data = random.Random("parameters").randbytes(16)
    for type in (*TYPES, "b128"):
        for vector, count in vectors(type):
            yield _parameter(type, vector, count, data)
            yield _constant(type, vector, count, data)


def _registers(type: str, count: int) -> tuple[str, str, str, int]:
    """Declare registers that are wider than the type, list them, and store them."""
    is_float = type in ("f32", "f64")
    size = 16 if type == "b128" else 8 if type.endswith("64") else 4
    register = type if is_float else f"b{8 * size}"
    names = [f"%v{index}" for index in range(count)]
    stores = " ".join(f"st.global.{register} [%outputs+{size * index}], {name};" for index, name in enumerate(names))
    vector = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    return f".reg .{register} {', '.join(names)};", vector, stores, size


def _extended(data: bytes, type: str, count: int, size: int) -> Array:
    n = int(type[1:])
    whole = int.from_bytes(data, "little")
    result = 0
    for index in range(count):
        part = whole >> n * index & ((1 << n) - 1)
        part = signed(part, n) if type[0] == "s" else part
        result |= (part & ((1 << 8 * size) - 1)) << 8 * size * index
    return np.frombuffer(result.to_bytes(size * count, "little"), np.uint8).copy()


def _parameter(type: str, vector: str, count: int, data: bytes) -> Program:
    """A function stores its parameter into its result, and the kernel loads the result."""
    declare, names, stores, size = _registers(type, count)
    load, store = f"ld.param{vector}.{type}", f"st.param{vector}.{type}"
    text = f"""
        .func (.param .align 16 .b8 result[16]) passed(.param .align 16 .b8 given[16]) {{
            {declare}
            {load} {names}, [given];
            {store} [result], {names};
            ret;
        }}
    """ + entry(
        f"""
        {{ .param .align 16 .b8 sent[16]; .param .align 16 .b8 got[16]; .reg .b64 %low, %high;
          ld.global.v2.b64 {{%low, %high}}, [%inputs];
          st.param.b64 [sent], %low; st.param.b64 [sent+8], %high;
          call.uni (got), passed, (sent);
          {load} {names}, [got]; }}
        {stores}
        """,
        declare=declare,
    )
    inputs = np.frombuffer(data, np.uint8).copy()
    return Program(f"{load} and {store}", (load, store), text, inputs, _extended(data, type, count, size), threads=1)


def _constant(type: str, vector: str, count: int, data: bytes) -> Program:
    declare, names, stores, size = _registers(type, count)
    load = f"ld.const{vector}.{type}"
    text = ".const .align 16 .b8 numbers[16];\n" + entry(f"{load} {names}, [numbers]; {stores}", declare=declare)
    memory = np.frombuffer(data, np.uint8).copy()
    expected = _extended(data, type, count, size)
    return Program(load, (load,), text, np.zeros(16, np.uint8), expected, threads=1, options={"variables": [memory]})


def constant_addresses() -> Iterator[Program]:
    """cvta of constants and parameters."""
    memory = words(4, "constant")
    yield Program(
        "generic addresses of constants",
        ("cvta.const.u64", "cvta.to.const.u64"),
        ".const .align 16 .b32 numbers[4];\n"
        + entry(
            """
            mov.u64 %address, numbers; cvta.const.u64 %generic, %address; ld.u32 %x, [%generic+4];
            cvta.to.const.u64 %address, %generic; ld.const.u32 %y, [%address+8];
            xor.b32 %x, %x, %y; st.global.u32 [%out], %x;
            """,
            declare=".reg .b64 %address, %generic;",
        ),
        memory,
        np.full(32, memory[1] ^ memory[2], np.uint32),
        options={"variables": [memory]},
    )
    yield Program(
        "generic addresses of parameters",
        ("cvta.param.u64", "cvta.to.param.u64"),
        entry(
            """
            mov.b64 %address, inputs; cvta.param.u64 %generic, %address; ld.u64 %in, [%generic];
            cvta.to.param.u64 %address, %generic; ld.param.u64 %out, [%address+8];
            mad.wide.u32 %in, %thread, 4, %in; mad.wide.u32 %out, %thread, 4, %out;
            ld.global.u32 %x, [%in]; st.global.u32 [%out], %x;
            """,
            declare=".reg .b64 %address, %generic;",
        ),
        words(32, "parameter"),
        words(32, "parameter"),
    )


# Barriers


def barriers() -> Iterator[Program]:
    numbers = words(96, "barriers")
    reversed_ = numbers[::-1].copy()
    shared = ".shared .b32 kept[96];"
    exchange = """
        ld.global.u32 %x, [%in]; shl.b32 %y, %thread, 2; mov.u32 %base, kept; add.u32 %y, %y, %base; st.shared.u32 [%y], %x;
        {barrier}
        mov.u32 %z, 95; sub.u32 %z, %z, %thread; shl.b32 %z, %z, 2; add.u32 %z, %z, %base; ld.shared.u32 %x, [%z];
        st.global.u32 [%out], %x;
    """
    declare = f"{shared} .reg .b32 %base, %id; .reg .b16 %h;"
    for text, mode in (
        ("bar.sync 0;", "MODE_BLOCK"),
        ("bar.cta.sync 7;", "MODE_BLOCK"),
        ("barrier.sync.aligned 0;", "MODE_BLOCK"),
        ("barrier.cta.sync 0;", "MODE_BLOCK"),
        ("bar.sync 3, 96;", "MODE_LANES"),
        ("mov.u32 %id, 4; barrier.sync %id, 96;", "MODE_LANES"),
        # Threads that may take different ways meet at the same barrier.
        (
            "setp.lt.u32 %p, %thread, 40; @%p bra here; barrier.sync 0; bra.uni there; here: barrier.sync 0; there:",
            "MODE_LANES",
        ),
    ):
        yield Program(
            text,
            ("barrier.sync",),
            entry(exchange.format(barrier=text), declare=declare),
            numbers,
            reversed_,
            threads=96,
            mode=mode,
        )
    yield from _barrier_reductions()
    yield _producers(numbers)


def _layouts(numbers: Array, thread: Array) -> Iterator[Program]:
    """Programs whose blocks all threads of the second block of threads enter at another place."""
    second, late = thread >= 32, thread % 32 >= 16
    into = entry("""
        ld.global.u32 %x, [%in];
        mov.u32 %y, %ctaid.x; mov.u32 %z, %tid.x;
        setp.eq.u32 %q, %y, 1; setp.ge.u32 %p, %z, 16;
        bar.sync 0;
        @%q bra inside;
        @%p bra join;
    inside:
        add.u32 %x, %x, 1;
    join:
        bar.sync 0;
        st.global.u32 [%out], %x;
    """)
    results = numbers + (second | ~late)
    yield Program("a common branch to where threads diverge", (), into, numbers, results, blocks=2, mode="MODE_BLOCK")
    between = entry("""
        ld.global.u32 %x, [%in];
        mov.u32 %y, %ctaid.x; mov.u32 %z, %tid.x;
        setp.eq.u32 %q, %y, 1; setp.ge.u32 %p, %z, 16;
        bar.sync 0;
        @%q bra other;
        @%p bra right;
        add.u32 %x, %x, 1;
        bra.uni join;
    other:
        add.u32 %x, %x, 1000;
        bra.uni after;
    right:
        add.u32 %x, %x, 2;
    join:
        add.u32 %x, %x, 4;
    after:
        bar.sync 0;
        st.global.u32 [%out], %x;
    """)
    results = np.where(second, numbers + 1000, numbers + np.where(late, 6, 5)).astype(np.uint32)
    yield Program("other code between those that diverge", (), between, numbers, results, blocks=2, mode="MODE_BLOCK")


def _barrier_reductions() -> Iterator[Program]:
    """Of how many, of all and of any of the threads a predicate holds: three predicates, in one kernel each."""
    for threads, suffix, mode in ((96, "", "MODE_BLOCK"), (96, ", 96", "MODE_LANES")):
        body = ""
        results: list[int] = []
        for limit in (0, 30, 96):
            body += f"""
                setp.lt.u32 %p, %thread, {limit};
                bar.red.popc.u32 %x, 1{suffix}, %p; add.u32 %sum, %sum, %x;
                barrier.red.and.pred %q, 2{suffix}, %p; selp.u32 %x, 1000, 0, %q; add.u32 %sum, %sum, %x;
                barrier.cta.red.or.aligned.pred %q, 3{suffix}, %p; selp.u32 %x, 10000, 0, %q; add.u32 %sum, %sum, %x;
                bar.red.popc.u32 %x, 1{suffix}, !%p; add.u32 %sum, %sum, %x;
            """
            results.append(96 + (1000 if limit == 96 else 0) + (10000 if limit else 0))
        text = entry(f"mov.u32 %sum, 0; {body} st.global.u32 [%out], %sum;", declare=".reg .b32 %sum;")
        expected = np.full(96, sum(results), np.uint32)
        variants = ("barrier.red.popc.u32", "barrier.red.and.pred", "barrier.red.or.pred")
        yield Program(f"reductions{suffix}", variants, text, np.zeros(96, np.uint32), expected, threads=threads, mode=mode)


def _producers(numbers: Array) -> Program:
    """One warp produces and only arrives; two warps wait for it."""
    text = entry(
        """
        mov.u32 %base, kept; shl.b32 %y, %thread, 2; add.u32 %y, %y, %base;
        setp.lt.u32 %p, %thread, 64; @%p bra consume;
        ld.global.u32 %x, [%in]; st.shared.u32 [%y], %x;
        bar.arrive 5, 96;
        st.global.u32 [%out], %x;
        ret;
    consume:
        bar.sync 5, 96;
        and.b32 %z, %thread, 31; add.u32 %z, %z, 64; shl.b32 %z, %z, 2; add.u32 %z, %z, %base;
        ld.shared.u32 %x, [%z]; st.global.u32 [%out], %x;
        """,
        declare=".shared .b32 kept[96]; .reg .b32 %base;",
    )
    last = numbers[64:96]
    return Program(
        "producers and consumers",
        ("barrier.arrive",),
        text,
        numbers,
        np.concatenate([last, last, last]),
        threads=96,
        mode="MODE_LANES",
    )


# Asynchronous copies


def copies() -> Iterator[Program]:
    numbers = words(512, "copies")
    shared = ".shared .align 16 .b8 kept[2048];"
    for cache, size in itertools.product(("ca", "cg"), (4, 8, 16)):
        if cache == "cg" and size != 16:
            continue
        yield _copy(cache, size, numbers, shared)
    yield from _bulk_copies(numbers)


def _copy(cache: str, size: int, numbers: Array, shared: str) -> Program:
    """Whole copies, shorter sources, ignored sources, and hints; 16 bytes of each thread are shown."""
    variant = f"cp.async.{cache}.shared.global"
    prefetch = ".L2::128B" if size == 16 else ""
    body = f"""
        mad.wide.u32 %from, %thread, 16, %inputs; mov.u32 %to, kept; mad.lo.u32 %to, %thread, 16, %to;
        st.shared.v4.b32 [%to], {{-1, -1, -1, -1}};
        and.b32 %x, %thread, 3; setp.eq.u32 %p, %x, 3; setp.eq.u32 %q, %x, 0;
        @%q {variant}{prefetch} [%to], [%from], {size};
        setp.eq.u32 %q, %x, 1;
        @%q {variant} [%to], [%from], {size}, 3;
        setp.eq.u32 %q, %x, 2;
        mov.u64 %nowhere, 64;
        @%q {variant} [%to], [%nowhere], {size}, 0;
        @%p {variant} [%to], [%from], {size}, %p;
        cp.async.commit_group;
        cp.async.wait_group 0;
        cp.async.wait_all;
        bar.sync 0;
        ld.shared.v4.b32 {{%x, %y, %z, %w}}, [%to];
        mad.wide.u32 %out, %thread, 16, %outputs; st.global.v4.b32 [%out], {{%x, %y, %z, %w}};
    """
    source = numbers[:128].view(np.uint8).reshape(32, 16)
    expected = np.full((32, 16), 0xFF, np.uint8)
    for lane in range(32):
        expected[lane, :size] = 0
        copied = (size, min(3, size), 0, 0)[lane % 4]
        expected[lane, :copied] = source[lane, :copied]
    variants = (variant, "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
    text = entry(body, declare=f"{shared} .reg .b32 %to, %w; .reg .b64 %from, %nowhere;")
    return Program(f"{variant} of {size} bytes", variants, text, numbers[:128], expected)


def _bulk_copies(numbers: Array) -> Iterator[Program]:
    body = """
        mov.u32 %base, kept; mov.u32 %object, object;
        setp.eq.u32 %p, %thread, 0;
        @%p mbarrier.init.shared::cta.b64 [%object], 1;
        bar.sync 0;
        @!%p bra wait;
        mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%object], 2048;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%base], [%inputs], 1024, [%object];
        add.u64 %from, %inputs, 1024; add.u32 %half, %base, 1024;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%half], [%from], 1024, [%object];
    wait:
        mbarrier.try_wait.parity.shared::cta.b64 %q, [%object], 0;
        @!%q bra wait;
        @!%p bra leave;
        cp.async.bulk.prefetch.L2.global [%inputs], 1024;
        cp.async.bulk.global.shared::cta.bulk_group [%outputs], [%base], 2048;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        cp.async.bulk.wait_group.read 0;
    leave:
        mbarrier.inval.shared::cta.b64 [%object];
    """
    declare = """.shared .align 128 .b8 kept[2048]; .shared .align 8 .b64 object;
        .reg .b32 %base, %object, %half; .reg .b64 %from, %state;"""
    variants = (
        "cp.async.bulk.shared.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.global.shared.bulk_group",
        "cp.async.bulk.prefetch.L2.global",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group",
        "cp.async.bulk.wait_group.read",
        "mbarrier.arrive.expect_tx.shared.b64",
        "mbarrier.try_wait.parity.shared.b64",
        "mbarrier.inval.shared.b64",
        "mbarrier.init.shared.b64",
    )
    yield Program("bulk copies", variants, entry(body, declare=declare), numbers, numbers, threads=64, mode="MODE_LANES")


# mbarrier


def mbarriers() -> Iterator[Program]:
    """Each opcode through a shared address and through a generic one."""
    for space in (".shared", ""):
        yield from _mbarriers(space)


def _mbarriers(space: str) -> Iterator[Program]:
    address = "%object" if space else "%generic"
    head = """
        mov.u32 %object, object; cvt.u64.u32 %generic, %object; cvta.shared.u64 %generic, %generic;
        setp.eq.u32 %p, %thread, 0;
    """
    declare = """.shared .align 8 .b64 object; .shared .b32 kept[64];
        .reg .b32 %object, %base, %count; .reg .b64 %generic, %state;"""
    exchange = """
        ld.global.u32 %x, [%in]; mov.u32 %base, kept; mad.lo.u32 %y, %thread, 4, %base; st.shared.u32 [%y], %x;
        {wait}
        mov.u32 %z, 63; sub.u32 %z, %z, %thread; mad.lo.u32 %z, %z, 4, %base; ld.shared.u32 %x, [%z]; st.global.u32 [%out], %x;
    """
    numbers = words(64, "mbarrier")
    for test in ("test_wait", "try_wait"):
        for parity in ("", ".parity"):
            wait = f"""
                @%p mbarrier.init{space}.b64 [{address}], 64; bar.sync 0;
                mbarrier.arrive{space}.b64 %state, [{address}];
            again: mbarrier.{test}{parity}{space}.b64 %q, [{address}], {"0" if parity else "%state"}; @!%q bra again;
            """
            variants = (f"mbarrier.init{space}.b64", f"mbarrier.arrive{space}.b64", f"mbarrier.{test}{parity}{space}.b64")
            text = entry(head + exchange.format(wait=wait), declare=declare)
            yield Program(
                f"mbarrier.{test}{parity}{space}", variants, text, numbers, numbers[::-1].copy(), threads=64, mode="MODE_LANES"
            )
    yield _phases(space, address, head, declare)


def _phases(space: str, address: str, head: str, declare: str) -> Program:
    """One thread goes through phases; after each step, whether the phase is over and how many arrivals its state lacked."""
    shown = 0
    expected: list[int] = []
    lines: list[str] = []

    def store(result: int) -> None:
        nonlocal shown
        lines.append(f"st.global.u32 [%outputs+{4 * shown}], %x;")
        expected.append(result)
        shown += 1

    def show(over: bool, pending: int) -> None:
        lines.append(f"mbarrier.test_wait{space}.b64 %q, [{address}], %state; selp.u32 %x, 100, 0, %q;")
        lines.append("mbarrier.pending_count.b64 %count, %state; add.u32 %x, %x, %count;")
        store(100 * over + pending)

    def wait(test: str) -> None:
        """A copy's arrival comes by itself, at any time."""
        lines.append(f"again{shown}: mbarrier.test_wait{test}; @!%q bra again{shown}; mov.u32 %x, 100;")
        store(100)

    lines.append(f"mbarrier.init{space}.b64 [{address}], 5; mbarrier.arrive.noComplete{space}.b64 %state, [{address}], 2;")
    show(False, 5)
    lines.append(f"mbarrier.arrive_drop{space}.b64 %state, [{address}];")
    show(False, 3)
    lines.append(f"mbarrier.expect_tx{space}.b64 [{address}], 64; mbarrier.arrive{space}.b64 %state, [{address}], 2;")
    show(False, 2)
    lines.append(f"mbarrier.complete_tx{space}.b64 [{address}], 24;")
    show(False, 2)
    lines.append(f"mbarrier.complete_tx{space}.b64 [{address}], 40;")
    show(True, 2)
    # The phase has ended, and the next one expects the arrivals without the one that has dropped.
    lines.append(f"mbarrier.arrive_drop.noComplete{space}.b64 %state, [{address}], 2;")
    show(False, 4)
    lines.append(f"mbarrier.arrive_drop.expect_tx{space}.b64 %state, [{address}], 8;")
    show(False, 2)
    lines.append(
        f"mbarrier.arrive.expect_tx{space}.b64 %state, [{address}], 8; mbarrier.complete_tx{space}.b64 [{address}], 16;"
    )
    show(True, 1)
    # The count goes up by the copies' arrival, and down when the copies are done.
    lines.append(f"cp.async.mbarrier.arrive{space}.b64 [{address}]; mbarrier.arrive{space}.b64 %state, [{address}];")
    wait(f"{space}.b64 %q, [{address}], %state")
    lines.append(f"cp.async.mbarrier.arrive.noinc{space}.b64 [{address}];")
    wait(f".parity{space}.b64 %q, [{address}], 1")  # the fourth phase, number 3
    lines.append(f"mbarrier.inval{space}.b64 [{address}];")
    kinds = ("init", "inval", "arrive", "arrive.noComplete", "arrive.expect_tx", "arrive_drop", "arrive_drop.noComplete")
    kinds += ("arrive_drop.expect_tx", "expect_tx", "complete_tx", "test_wait", "test_wait.parity")
    variants = tuple(f"mbarrier.{kind}{space}.b64" for kind in kinds)
    variants += (
        f"cp.async.mbarrier.arrive{space}.b64",
        f"cp.async.mbarrier.arrive.noinc{space}.b64",
        "mbarrier.pending_count.b64",
    )
    text = entry(head + "\n".join(lines), declare=declare)
    return Program(
        f"phases of an mbarrier{space}", variants, text, np.zeros(1, np.uint32), np.array(expected, np.uint32), threads=1
    )


def names_and_texts() -> Iterator[Program]:
    nothing = np.zeros(32, np.uint32)
    yield Program(
        "braces in comments",
        (),
        entry("""
            // } the end of a part; { and the begin of another
            /* } */ st.global.u32 [%out], 7;
        """),
        nothing,
        nothing + 7,
    )
    yield Program(
        "names that differ in a percent or dollar sign, or in their scope",
        (),
        entry("""
            .reg .b32 n, %n, %r_s1, %r;
            mov.u32 n, 1; mov.u32 %n, 20; mov.u32 %r_s1, 300; mov.u32 %r, 0;
            bra $L;
        L:
            st.global.u32 [%out], 9;
            ret;
        $L:
            { .reg .b32 %r; mov.u32 %r, 4000; add.u32 n, n, %r; }
            add.u32 n, n, %n; add.u32 n, n, %r_s1; add.u32 n, n, %r;
            st.global.u32 [%out], n;
        """),
        nothing,
        nothing + 4321,
    )


def carries_and_operands() -> Iterator[Program]:
    nothing = np.zeros(64, np.uint32)
    thread = np.arange(64, dtype=np.uint32)
    yield Program(
        "a carry across a barrier",
        ("add.cc.u32", "addc.u32"),
        entry("""
            sub.u32 %x, 0, %thread;
            add.cc.u32 %y, %x, 8;
            bar.sync 0;
            addc.u32 %z, 0, 0;
            st.global.u32 [%out], %z;
        """),
        nothing,
        ((thread > 0) & (thread <= 8)).astype(np.uint32),
        threads=64,
        mode="MODE_BLOCK",
    )
    yield Program(
        "a carry across an instruction that others do not share",
        (),
        entry("""
            mov.u32 %x, 4294967295; mov.u32 %y, %ntid.x;
            add.cc.u32 %y, %x, %y;
            mov.u32 %x, 5;
            addc.u32 %z, %x, 0;
            bar.sync 0;
            st.global.u32 [%out], %z;
        """),
        nothing,
        nothing + 6,
        threads=64,
        mode="MODE_BLOCK",
    )
    yield Program(
        "a vector of atoms whose result is a later value",
        (),
        entry("""
            .reg .f32 %f<4>;
            mov.f32 %f1, 0f40000000; mov.f32 %f3, 0f3f800000;
            mov.b32 %x, 0f41200000; st.global.b32 [%outputs], %x; mov.b32 %x, 0f41a00000; st.global.b32 [%outputs+4], %x;
            atom.global.add.v2.f32 {%f1, %f2}, [%outputs], {%f3, %f1};
        """),
        np.zeros(2, np.float32),
        np.array([11, 22], np.float32),
        threads=1,
    )


def memory_of_threads() -> Iterator[Program]:
    nothing = np.zeros(64, np.uint32)
    yield Program(
        "memory of alloca across barriers",
        (),
        entry(
            """
            alloca.u64 %a, 16, 8; st.local.b32 [%a], %thread;
            bar.sync 0;
            alloca.u64 %b, 16, 8; st.local.b32 [%b], 2;
            ld.local.b32 %x, [%a];
            st.global.u32 [%out], %x;
            """,
            declare=".reg .b64 %a, %b;",
        ),
        nothing,
        np.arange(64, dtype=np.uint32),
        threads=64,
    )
    yield Program(
        "a frame of a function after a frame of four bytes",
        (),
        """
        .func (.param .b32 result) twice(.param .b32 number) {
            .reg .b32 %n; .local .align 8 .b8 words[8]; .reg .b64 %d, %a;
            ld.param.u32 %n, [number];
            mov.u64 %a, words;
            cvt.u64.u32 %d, %n; st.local.u64 [%a], %d; ld.local.u64 %d, [%a];
            cvt.u32.u64 %n, %d; add.u32 %n, %n, %n;
            st.param.b32 [result], %n;
            ret;
        }
        """
        + entry("""
            .local .align 4 .b8 small[4];
            .reg .b32 %result, %own;
            st.local.u32 [small], %thread;
            { .param .b32 given; .param .b32 got;
              st.param.b32 [given], %thread; call (got), twice, (given); ld.param.b32 %result, [got]; }
            bar.sync 0;
            ld.local.u32 %own, [small]; add.u32 %x, %result, %own;
            st.global.u32 [%out], %x;
        """),
        nothing,
        np.arange(64, dtype=np.uint32) * 3,
        threads=64,
    )
    yield Program(
        "windows of memory in a kernel with a barrier",
        ("isspacep.local", "isspacep.global"),
        entry(
            """
            .local .align 4 .b8 small[4];
            mov.u64 %a, small; cvta.local.u64 %a, %a;
            isspacep.local %p, %a; isspacep.global %q, %a;
            selp.u32 %x, 1, 0, %p; selp.u32 %y, 2, 0, %q; or.b32 %x, %x, %y;
            bar.sync 0;
            mov.b64 %a, inputs; cvta.param.u64 %a, %a; isspacep.global %p, %a;
            selp.u32 %y, 4, 0, %p; or.b32 %x, %x, %y;
            st.global.u32 [%out], %x;
            """,
            declare=".reg .b64 %a;",
        ),
        nothing,
        nothing + 5,
        threads=64,
    )
    yield Program(
        "windows of constants and of parameters",
        ("isspacep.const", "isspacep.param"),
        ".const .align 4 .b32 table[4] = {1, 2, 3, 4};\n"
        + entry(
            """
            mov.u64 %a, table; cvta.const.u64 %a, %a; add.u64 %a, %a, 12;
            isspacep.const %p, %a; isspacep.global %q, %a;
            selp.u32 %x, 1, 0, %p; selp.u32 %y, 2, 0, %q; or.b32 %x, %x, %y;
            isspacep.const %p, %in; isspacep.param::entry %q, %in;
            selp.u32 %y, 4, 0, %p; or.b32 %x, %x, %y; selp.u32 %y, 8, 0, %q; or.b32 %x, %x, %y;
            mov.b64 %a, inputs; cvta.param.u64 %a, %a; isspacep.param %p, %a; isspacep.const %q, %a;
            selp.u32 %y, 16, 0, %p; or.b32 %x, %x, %y; selp.u32 %y, 32, 0, %q; or.b32 %x, %x, %y;
            st.global.u32 [%out], %x;
            """,
            declare=".reg .b64 %a;",
        ),
        nothing,
        nothing + 17,
        threads=64,
        options={"variables": [np.array([1, 2, 3, 4], np.uint32)]},
    )
    yield from _narrow_addresses(nothing)
    yield Program(
        "alignment of shared memory",
        (),
        ".extern .shared .align 128 .b8 dynamic[];\n"
        + entry(
            """
            .shared .align 16 .b8 fixed[16];
            mov.u64 %a, fixed; st.shared.u32 [%a], 0;
            mov.u64 %a, dynamic; cvt.u32.u64 %x, %a; and.b32 %x, %x, 127;
            cvta.shared.u64 %a, %a; cvt.u32.u64 %y, %a; and.b32 %y, %y, 127; or.b32 %x, %x, %y;
            mov.u64 %a, 0; cvta.shared.u64 %a, %a; cvt.u32.u64 %y, %a; and.b32 %y, %y, 1023; or.b32 %x, %x, %y;
            st.global.u32 [%out], %x;
            """,
            declare=".reg .b64 %a;",
        ),
        nothing,
        nothing,
        threads=64,
        options={"shared": 64},
    )
    yield Program(
        "sizes of shared memory",
        (),
        entry("""
            mov.u32 %x, %total_smem_size; mov.u32 %y, %aggr_smem_size; sub.u32 %y, %y, %x; mad.lo.u32 %x, %y, 1000, %x;
            st.global.u32 [%out], %x;
        """),
        nothing,
        nothing + 1024 * 1000 + 128,
        threads=64,
        options={"shared": 100},
    )


def all_programs() -> list[Program]:
    sources: Sequence[Callable[[], Iterator[Program]]] = (
        *(control_flow, parameters, constant_addresses, barriers, copies, mbarriers),
        *(names_and_texts, carries_and_operands, memory_of_threads),
    )
    return [program for source in sources for program in source()]
