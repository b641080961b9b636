"""The PTX of the tests, so that they need no nvcc."""

HEADER = ".version 7.0\n.target sm_80\n.address_size 64\n"

# saxpy(float a, const float *x, float *y, unsigned n): y[i] = a * x[i] + y[i]
SAXPY = (
    HEADER
    + """
.visible .entry saxpy(.param .f32 a, .param .u64 x, .param .u64 y, .param .u32 n)
{
    .reg .pred %p; .reg .b32 %i, %n, %t, %b, %c; .reg .f32 %a, %v, %w; .reg .b64 %x, %y, %o;
    ld.param.f32 %a, [a]; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.u32 %n, [n];
    mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mov.u32 %c, %ntid.x; mad.lo.u32 %i, %b, %c, %t;
    setp.ge.u32 %p, %i, %n;
    @%p bra END;
    mul.wide.u32 %o, %i, 4; add.s64 %x, %x, %o; add.s64 %y, %y, %o;
    ld.global.f32 %v, [%x]; ld.global.f32 %w, [%y]; fma.rn.f32 %w, %a, %v, %w; st.global.f32 [%y], %w;
END:
    ret;
}
"""
)

# total(const int *x, int *out): the sum of a block's numbers, in dynamic shared memory. If `divergent` is not 0, the first half
# of the threads waits at another barrier.
TOTAL = (
    HEADER
    + """
.extern .shared .align 16 .b8 numbers[];
.visible .entry total(.param .u64 x, .param .u64 out, .param .u32 divergent)
{
    .reg .pred %p, %q; .reg .b32 %t, %s, %a, %v, %w, %n, %e; .reg .b64 %x, %o, %b;
    ld.param.u64 %x, [x]; ld.param.u64 %o, [out]; ld.param.u32 %e, [divergent];
    mov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %s, numbers; mad.lo.u32 %a, %t, 4, %s;
    mul.wide.u32 %b, %t, 4; add.s64 %x, %x, %b; ld.global.u32 %v, [%x]; st.shared.u32 [%a], %v;
    shr.u32 %w, %n, 1;
    setp.lt.u32 %p, %t, %w; setp.ne.u32 %q, %e, 0; and.pred %p, %p, %q;
    @%p bra OTHER;
    bar.sync 0;
    bra JOIN;
OTHER:
    bar.sync 1;
JOIN:
    setp.ne.u32 %p, %t, 0;
    @%p bra END;
    mov.u32 %v, 0; mov.u32 %t, 0;
LOOP:
    ld.shared.u32 %w, [%s]; add.u32 %v, %v, %w; add.u32 %s, %s, 4; add.u32 %t, %t, 1;
    setp.lt.u32 %p, %t, %n;
    @%p bra LOOP;
    st.global.u32 [%o], %v;
END:
    ret;
}
"""
)

# add_table(float *y): y[t] += table[t], *pointer += 1; `pointer` is &counter. `limit` is managed.
VARIABLES = (
    HEADER
    + """
.visible .const .align 4 .f32 table[4] = {0f3F800000, 2.0, 0f40400000, 0f40800000};
.visible .global .align 4 .u32 counter = 41;
.visible .global .align 8 .u64 pointer = generic(counter);
.visible .global .attribute(.managed) .align 4 .u32 limit = 7;
.visible .entry add_table(.param .u64 y)
{
    .reg .pred %p; .reg .b32 %t, %c; .reg .f32 %v, %w; .reg .b64 %y, %o, %a;
    ld.param.u64 %y, [y]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.s64 %y, %y, %o;
    mov.u64 %a, table; add.s64 %a, %a, %o; ld.const.f32 %v, [%a];
    ld.global.f32 %w, [%y]; add.f32 %w, %w, %v; st.global.f32 [%y], %w;
    setp.ne.u32 %p, %t, 0;
    @%p ret;
    ld.global.u64 %a, [pointer]; ld.u32 %c, [%a]; add.u32 %c, %c, 1; st.u32 [%a], %c;
    ld.global.u32 %c, [limit]; add.u32 %c, %c, 1; st.global.u32 [limit], %c;
    ret;
}
"""
)

# Two modules: the first one's kernel calls a function and reads a variable of the second one.
CALLER = (
    HEADER
    + """
.extern .global .align 4 .u32 base;
.extern .func (.param .b32 result) triple(.param .b32 value);
.visible .entry call(.param .u64 out)
{
    .reg .b32 %v, %b; .reg .b64 %o;
    ld.param.u64 %o, [out]; ld.global.u32 %b, [base];
    { .param .b32 p; st.param.b32 [p], %b; .param .b32 r; call.uni (r), triple, (p); ld.param.b32 %v, [r]; }
    st.global.u32 [%o], %v;
    ret;
}
"""
)
CALLED = (
    HEADER
    + """
.visible .global .align 4 .u32 base = 14;
.visible .func (.param .b32 result) triple(.param .b32 value)
{
    .reg .b32 %v;
    ld.param.b32 %v, [value]; mul.lo.u32 %v, %v, 3; st.param.b32 [result], %v;
    ret;
}
"""
)

# wrong(int *x, unsigned kind): what a kernel can do wrong.
WRONG = (
    HEADER
    + """
.global .align 1 .b8 text[12] = {120, 32, 61, 32, 37, 100, 10, 0};
.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 values);
.visible .entry trap_() { trap; ret; }
.visible .entry misaligned(.param .u64 x)
{
    .reg .b32 %v; .reg .b64 %x;
    ld.param.u64 %x, [x]; ld.global.u32 %v, [%x+2]; st.global.u32 [%x], %v; ret;
}
.visible .entry endless(.param .u64 x)
{
    .reg .pred %p; .reg .b32 %v; .reg .b64 %x;
    ld.param.u64 %x, [x];
LOOP:
    ld.volatile.global.u32 %v, [%x]; setp.eq.u32 %p, %v, 0;
    @%p bra LOOP;
    ret;
}
.visible .entry say(.param .u32 x)
{
    .local .align 8 .b8 values[8]; .reg .b32 %v; .reg .b64 %f, %a;
    ld.param.u32 %v, [x]; mov.u64 %a, values; st.local.u32 [%a], %v; cvta.local.u64 %a, %a;
    mov.u64 %f, text; cvta.global.u64 %f, %f;
    { .param .b64 p; st.param.b64 [p], %f; .param .b64 q; st.param.b64 [q], %a; .param .b32 r;
      call.uni (r), vprintf, (p, q); }
    ret;
}
.visible .entry textured(.param .u64 x)
{
    .reg .f32 %a, %b, %c, %d; .reg .b32 %i; .reg .b64 %x;
    ld.param.u64 %x, [x]; mov.u32 %i, 0; tex.1d.v4.f32.s32 {%a, %b, %c, %d}, [%x, {%i}]; ret;
}
.visible .entry limited() .maxntid 64, 1, 1 { ret; }
"""
)

# add(float *x) adds 1 to x[0] in all threads; column(float *x) writes x[0], x[2], x[4] ... x[126]; flag(float *x) reads and
# writes x[0] as a flag; bulk(float *x) reads x[0] to x[63] at once.
COUNTS = (
    HEADER.replace("7.0", "8.0").replace("sm_80", "sm_90")
    + """
.visible .entry flag(.param .u64 x)
{
    .reg .b32 %v; .reg .b64 %x;
    ld.param.u64 %x, [x]; ld.acquire.gpu.global.u32 %v, [%x]; st.release.gpu.global.u32 [%x], %v; ret;
}
.visible .entry bulk(.param .u64 x)
{
    .shared .align 16 .b8 target[256]; .shared .align 8 .b64 done;
    .reg .pred %p; .reg .b32 %t, %s, %b; .reg .b64 %x, %state;
    ld.param.u64 %x, [x]; mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 0; mov.u32 %s, target; mov.u32 %b, done;
    @%p ret;
    mbarrier.init.shared.b64 [%b], 1;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%b], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%x], 256, [%b];
    ret;
}
.visible .entry add(.param .u64 x)
{
    .reg .f32 %v; .reg .b64 %x;
    ld.param.u64 %x, [x]; mov.f32 %v, 0f3F800000; red.global.add.f32 [%x], %v; ret;
}
.visible .entry column(.param .u64 x)
{
    .reg .b32 %t; .reg .f32 %v; .reg .b64 %x, %o;
    ld.param.u64 %x, [x]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 8; add.s64 %x, %x, %o; mov.f32 %v, 0f3F800000;
    st.global.f32 [%x], %v; ret;
}
"""
)

# Errors that authors of kernels make. check: an assertion fails in thread 3. deep: an endless recursion. loops: an endless loop
# that accesses no memory. locked(int *lock): a lock that nobody releases. apart: threads of a warp wait at different barriers.
# reverse(float *x): a barrier is missing between the writes and the reads of shared memory.
PLANTED = (
    HEADER
    + """
.global .align 1 .b8 message[8] = {120, 32, 62, 32, 48, 0};
.global .align 1 .b8 file[8] = {107, 46, 99, 117, 0};
.global .align 1 .b8 owner[8] = {99, 104, 101, 99, 107, 0};
.extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.visible .entry check()
{
    .reg .pred %p; .reg .b32 %t; .reg .b64 %m, %f, %o;
    mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 3;
    @%p ret;
    mov.u64 %m, message; cvta.global.u64 %m, %m; mov.u64 %f, file; cvta.global.u64 %f, %f;
    mov.u64 %o, owner; cvta.global.u64 %o, %o;
    { .param .b64 a; st.param.b64 [a], %m; .param .b64 b; st.param.b64 [b], %f; .param .b32 c; st.param.b32 [c], 7;
      .param .b64 d; st.param.b64 [d], %o; .param .b64 e; st.param.b64 [e], 1;
      call.uni __assertfail, (a, b, c, d, e); }
    ret;
}
.func (.param .b32 result) depth(.param .b32 n)
{
    .reg .b32 %n, %r; .local .align 4 .b8 frame[1024];
    ld.param.b32 %n, [n]; st.local.b32 [frame], %n; add.u32 %n, %n, 1;
    { .param .b32 a; st.param.b32 [a], %n; .param .b32 r; call.uni (r), depth, (a); ld.param.b32 %r, [r]; }
    ld.local.b32 %n, [frame]; add.u32 %r, %r, %n; st.param.b32 [result], %r; ret;
}
.visible .entry deep(.param .u64 x)
{
    .reg .b32 %r; .reg .b64 %x; ld.param.u64 %x, [x];
    { .param .b32 a; st.param.b32 [a], 0; .param .b32 r; call.uni (r), depth, (a); ld.param.b32 %r, [r]; }
    st.global.u32 [%x], %r; ret;
}
.visible .entry loops(.param .u32 n)
{
    .reg .b32 %t, %n; ld.param.u32 %n, [n]; mov.u32 %t, %n;
LOOP:
    add.u32 %t, %t, %n;
    bra LOOP;
}
.visible .entry locked(.param .u64 lock)
{
    .reg .pred %p; .reg .b32 %v; .reg .b64 %x;
    ld.param.u64 %x, [lock];
LOOP:
    atom.global.cas.b32 %v, [%x], 0, 1; setp.ne.u32 %p, %v, 0;
    @%p bra LOOP;
    ret;
}
.visible .entry apart()
{
    .reg .pred %p; .reg .b32 %t;
    mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 40;
    @%p bra WAIT;
    bar.warp.sync 0xffffffff;
    ret;
WAIT:
    bar.sync 0;
    ret;
}
.visible .entry reverse(.param .u64 x)
{
    .shared .align 4 .b8 s[256];
    .reg .b32 %t, %a, %n, %v; .reg .b64 %x, %o;
    ld.param.u64 %x, [x]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.s64 %x, %x, %o;
    ld.global.b32 %v, [%x]; mov.u32 %a, s; mad.lo.u32 %n, %t, 4, %a; st.shared.b32 [%n], %v;
    sub.u32 %t, 63, %t; mad.lo.u32 %n, %t, 4, %a; ld.shared.b32 %v, [%n]; st.global.b32 [%x], %v; ret;
}
"""
)

# spin(unsigned long long duration): runs for so many nanoseconds.
SPIN = (
    HEADER
    + """
.visible .entry spin(.param .u64 duration)
{
    .reg .pred %p; .reg .b64 %d, %e, %t;
    ld.param.u64 %d, [duration]; mov.u64 %t, %globaltimer; add.u64 %e, %t, %d;
LOOP:
    mov.u64 %t, %globaltimer; setp.lt.u64 %p, %t, %e;
    @%p bra LOOP;
    ret;
}
"""
)
