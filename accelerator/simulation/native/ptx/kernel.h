/* What translated kernels include. */
#ifndef ACCELERATOR_SIM_KERNELS_KERNEL_H
#define ACCELERATOR_SIM_KERNELS_KERNEL_H

#include "memory.h"

/* A kernel begins by naming what its instructions use. Instructions are written in these names: k, b, w and t are the worker,
 * the block, the warp and the thread. */
#define BLOCK_NAMES                                                                                                    \
    struct worker *const k = b->worker;                                                                                \
    const struct launch *const launch = b->launch;                                                                     \
    const char *const parameters = launch->parameters;                                                                 \
    char *const *const variables = launch->variables;                                                                  \
    char *const shared = b->shared;                                                                                    \
    const u32 shared_size = b->shared_size;                                                                            \
    const u32 threads = b->threads;                                                                                    \
    const u32 ntid_x = launch->block[0], ntid_y = launch->block[1], ntid_z = launch->block[2];                         \
    const u32 ctaid_x = b->index[0], ctaid_y = b->index[1], ctaid_z = b->index[2];                                     \
    (void)k, (void)parameters, (void)variables, (void)shared, (void)shared_size, (void)threads, (void)ntid_x,          \
        (void)ntid_y, (void)ntid_z, (void)ctaid_x, (void)ctaid_y, (void)ctaid_z

#define FOR_WARPS for (u32 number = 0; number < b->warp_count; number++)

/* What the code of a warp uses. `lanes` are those that are threads. */
#define WARP_NAMES                                                                                                     \
    struct warp *const w = &b->warps[number];                                                                          \
    const u32 first = w->first, lanes = w->alive;                                                                      \
    (void)first, (void)lanes
#define SAVED_NAMES struct saved *const s = (struct saved *)w->saved

/* All 32 lanes, which do not depend on each other: the compiler may run some at once. */
#define FOR_ALL_LANES _Pragma("GCC ivdep") for (u32 lane = 0; lane < LANES; lane++)

#define LOCAL_OF(thread) (b->local + (thread)*b->local_stride)

/* A device function begins by naming what its instructions use, and takes its frame from the thread's stack. */
#define THREAD_NAMES                                                                                                   \
    struct block *const b = t->block;                                                                                  \
    BLOCK_NAMES;                                                                                                       \
    struct warp *const w = t->warp;                                                                                    \
    const u32 thread = t->number, lane = t->lane, tid_x = t->x, tid_y = t->y, tid_z = t->z;                            \
    char *const local_base = t->local_base, *const local = t->local_top;                                               \
    const u64 local_span = (u64)(t->local_end - t->local_base);                                                        \
    (void)w, (void)thread, (void)lane, (void)tid_x, (void)tid_y, (void)tid_z, (void)local_base, (void)local_span

#define ENTER_FUNCTION(frame_size)                                                                                     \
    do {                                                                                                               \
        t->local_top += (frame_size);                                                                                  \
        if (__builtin_expect(t->local_top > t->local_end || (char *)__builtin_frame_address(0) < k->stack_end, 0))     \
            services->fail(k, KERNEL_ILLEGAL_ADDRESS, "its stack overflows");                                              \
    } while (0)

/* What a kernel passes to the functions that it calls. */
#define KERNEL_THREAD(frame_size)                                                                                      \
    struct thread thread_ = {                                                                                          \
        .worker = k, .block = b, .warp = w, .number = thread, .lane = lane, .x = tid_x, .y = tid_y, .z = tid_z,        \
        .local_base = local_base, .local_top = local + (frame_size), .local_end = local_base + b->local_span,        \
    };                                                                                                                 \
    struct thread *const t = &thread_

/* The functions that an indirect call may mean, by the numbers that stand for their addresses. */
struct function {
    void (*code)(void);
    u32 parameter_count;
};

#define INDIRECT_FUNCTION                                                                                              \
    static void (*indirect_function(struct worker *k, u64 number, u32 parameter_count))(void)                          \
    {                                                                                                                  \
        if (number >= sizeof functions / sizeof *functions || !functions[number].code ||                               \
            functions[number].parameter_count != parameter_count)                                                      \
            services->fail(k, KERNEL_INVALID_PC, "it calls %#llx, which is no such function",                          \
                           (unsigned long long)number);                                                                \
        return functions[number].code;                                                                                 \
    }

/* alloca */
INLINE char *allocate_on_stack(struct thread *t, u64 size, u32 alignment)
{
    char *start = (char *)(((u64)t->local_top + alignment - 1) / alignment * alignment);
    if (size > (u64)(t->local_end - t->local_base) || start + size > t->local_end)
        services->fail(t->worker, KERNEL_ILLEGAL_ADDRESS, "its stack overflows");
    t->local_top = start + (size + 15) / 16 * 16; /* frames are aligned */
    return start;
}

/* After so many polls of memory, a thread lets others run. */
enum { MAX_POLLS = 256 };

INLINE bool polls_long(struct warp *w, u32 lane)
{
    bool is_long = ++w->polls[lane] > MAX_POLLS;
    w->polls[lane] = is_long ? 0 : w->polls[lane];
    return is_long;
}

/* Exchanges between the lanes of a warp. */
typedef u32 u32x8 __attribute__((vector_size(32), aligned(4)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE_8(a, b, ...) __builtin_shufflevector(*(const u32x8 *)(a), *(const u32x8 *)(b), __VA_ARGS__)
#else
#define SHUFFLE_8(a, b, ...) __builtin_shuffle(*(const u32x8 *)(a), *(const u32x8 *)(b), (u32x8){__VA_ARGS__})
#endif

/* In a warp of fewer threads. The value of a lane that is no thread is undefined: here it is the lane's own. */
NO_INLINE void shuffle_part(u32 *to, const u32 *from, const u8 *sources, u32 lanes)
{
    u32 values[LANES];
    __builtin_memcpy(values, from, sizeof values);
    FOR_LANES(lanes)
        to[lane] = values[lanes >> sources[lane] & 1 ? sources[lane] : lane];
}

INLINE u32 lanes_before(u32 lane)
{
    return (1u << lane) - 1;
}

/* %total_smem_size is a multiple of what GPUs allocate; %aggr_smem_size contains what the system reserves. */
enum { SHARED_UNIT = 128, RESERVED_SHARED = 1024 };

INLINE u32 rounded_shared_size(u32 size)
{
    return (size + SHARED_UNIT - 1) / SHARED_UNIT * SHARED_UNIT;
}

/* %clock counts cycles: nanoseconds of a clock of 1 GHz. */
INLINE u64 clock_cycles(void)
{
    return services->nanoseconds();
}

#endif
