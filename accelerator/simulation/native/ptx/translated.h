/* What translated kernels and the library that runs them share.
 *
 * A translated kernel is a shared library with one symbol, a struct kernel. The library that runs it fills in the structs
 * below and calls one of the kernel's functions. A kernel calls back through struct services.
 *
 * PTX calls a block a CTA; a lane is a thread's place in its warp of 32. */
#ifndef ACCELERATOR_SIM_KERNELS_INTERFACE_H
#define ACCELERATOR_SIM_KERNELS_INTERFACE_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef unsigned __int128 u128;
typedef __int128 s128;

enum {
    LANES = 32,
    BARRIERS = 16,
    FRAGMENT_WORDS = 32,       /* of the operands of an operation on matrices, in each lane */
    MAX_THREADS_PER_BLOCK = 1024,
    LOCAL_STACK = 64 * 1024,   /* bytes of a thread for alloca and recursion, besides each function's frame */
    MAX_LOCAL_MEMORY = 512 * 1024, /* bytes of a thread, on GPUs */
    POINT_START = 0,           /* where a thread begins */
    POINT_EXITED = 0xffff,     /* in place of a point: the thread has returned */
};

/* Memory that an access may use, for accesses of one size: an address is inside, and a multiple of that size, if
 * rotate_right(address - low, log2(size)) <= limit. */
struct range {
    u64 low, limit;
};

/* Why a lane waits. */
enum wait {
    WAIT_NONE,       /* it can go on */
    WAIT_POLITELY,   /* it can go on, but others should run before: it polls memory or sleeps */
    WAIT_BARRIER,
    WAIT_WARP,       /* for the lanes of its mask */
    WAIT_CONVERGED,  /* until no lane of its warp can go on: the lanes that have then come are the active ones */
};

/* What lanes do together. */
enum operation {
    BARRIER_SYNC,
    BARRIER_POPC,
    BARRIER_AND,
    BARRIER_OR,
    WARP_SYNC,
    WARP_ACTIVE_MASK,
    SHUFFLE_UP,
    SHUFFLE_DOWN,
    SHUFFLE_BUTTERFLY,
    SHUFFLE_INDEX,
    VOTE_ALL,
    VOTE_ANY,
    VOTE_UNIFORM,
    VOTE_BALLOT,
    MATCH_ANY,
    MATCH_ALL,
    REDUCE_ADD,
    REDUCE_MIN_U32,
    REDUCE_MAX_U32,
    REDUCE_MIN_S32,
    REDUCE_MAX_S32,
    REDUCE_AND,
    REDUCE_OR,
    REDUCE_XOR,
    ELECT,
    MATRIX_MULTIPLY, /* detail: struct matrix_shape */
    MATRIX_LOAD,     /* detail: struct matrix_move */
    MATRIX_STORE,
    MATRIX_TRANSPOSE,
};

/* Element types of matrices. */
enum element { E_F16, E_BF16, E_TF32, E_F32, E_F64, E_E4M3, E_E5M2, E_S8, E_U8, E_S4, E_U4, E_B1, E_S32 };

struct matrix_shape {
    u8 m, n;
    u16 k;
    u8 a, b, c, d;                /* enum element */
    u8 a_words, b_words, c_words, d_words; /* 32-bit words of each lane */
    bool a_is_column, b_is_column; /* of m8n8k4 with halves */
    bool is_wmma, saturates, is_and; /* is_and: bits are combined by and, otherwise by xor */
};

struct matrix_move {
    u8 count; /* of 8 x 8 matrices */
    bool is_transposed;
};

/* A place in a kernel at which lanes wait and go on. */
struct point {
    u8 wait, operation;
    u16 reserved;
    u32 access;         /* the instruction, for reports */
    const void *detail;
};

/* An instruction, for reports: its text, and the source line if the PTX has one. */
struct access {
    const char *text, *file;
    u32 line;
};

struct variable {
    const char *name;
    u64 size;
};

struct launch;
struct worker;

struct warp {
    struct block *block;
    u32 number;
    u32 first;   /* the number of its first thread in the block */
    u32 alive;   /* lanes that are threads of the block and have not returned */
    u32 ready;   /* and can go on */
    u16 point[LANES];
    u32 polls[LANES]; /* of memory, since the lane last let others run */
    u32 x[LANES], y[LANES], z[LANES];
    /* Operands and results of the operation at which a lane waits. */
    u32 members[LANES]; /* the lanes with which it waits */
    u64 a[LANES];
    u32 b[LANES], c[LANES];
    u64 result[LANES];
    u8 flag[LANES];
    u32 (*operands)[LANES], (*results)[LANES]; /* of operations on matrices: FRAGMENT_WORDS of each lane */
    char *saved; /* registers that live across a point, laid out by the kernel */
    /* The library's: */
    u32 waiting; /* lanes that wait for others of the warp */
    u32 polite;  /* lanes that run again after all other warps have run */
};

struct block {
    struct launch *launch;
    struct worker *worker;
    u64 number;
    u32 index[3];
    u32 threads, alive;
    char *shared;
    u32 shared_size;
    char *local; /* local memory of the first thread, and how far the next one's is from it; 0 if they share it */
    size_t local_stride;
    size_t local_span; /* bytes of each thread's */
    char *saved; /* of all warps */
    struct warp *warps;
    u32 warp_count;
    struct barrier *barriers; /* BARRIERS of them */
    struct fiber *fibers;     /* of kernels that need them */
    u32 idle_rounds, polling_rounds; /* in which lanes only polled, in which some did */
};

/* What device functions know of the thread that calls them. */
struct thread {
    struct worker *worker;
    struct block *block;
    struct warp *warp;
    u32 number, lane, x, y, z;
    char *local_base, *local_top, *local_end;
};

/* What a thread of the CPU that runs blocks knows. */
struct worker {
    struct launch *launch;
    struct block *block;
    u32 thread; /* that runs now: its number in the block */
    struct range *ranges; /* for each group of accesses, the memory it used last */
    char *stack_end; /* calls of device functions must stay above this address */
    struct range (*find_range)(struct worker *worker, u32 group, u64 address, u32 size_log2, u32 access);
};

enum kernel_error {
    KERNEL_ILLEGAL_ADDRESS = 700,
    KERNEL_TIMEOUT = 702,
    KERNEL_ASSERT = 710,
    KERNEL_ILLEGAL_INSTRUCTION = 715,
    KERNEL_MISALIGNED = 716,
    KERNEL_INVALID_PC = 718,
    KERNEL_FAILED = 719,
};

struct services {
    /* Finds the memory around an address, or ends the kernel. */
    struct range (*find_range)(struct worker *worker, u32 group, u64 address, u32 size_log2, u32 access);
    /* These end the kernel: an access of shared, local or parameter memory is out of bounds or misaligned. */
    void (*fail_offset)(struct worker *worker, const char *space, u64 offset, u64 size, u32 access_size, u32 access)
        __attribute__((noreturn));
    void (*fail)(struct worker *worker, enum kernel_error error, const char *format, ...)
        __attribute__((noreturn, format(printf, 3, 4)));
    /* Let all lanes of a block, of which each has come to the point, do its operation. */
    void (*operate)(struct block *block, const struct point *point);
    void (*operate_warp)(struct warp *warp, const struct point *point); /* or all threads of a warp */
    void (*arrive)(struct block *block, u32 thread, u32 barrier, u32 count);
    void (*suspend)(struct thread *thread, u32 point); /* in a fiber */
    u32 (*print)(struct worker *worker, const char *format, const char *arguments);
    void (*fail_assertion)(struct worker *worker, const char *message, const char *file, u32 line, const char *function)
        __attribute__((noreturn));
    u64 (*allocate)(struct worker *worker, u64 size);
    void (*release)(struct worker *worker, u64 address);
    bool (*is_global)(struct worker *worker, u64 address);
    u64 (*nanoseconds)(void);
    u64 (*grid_workspace)(struct worker *worker);
};

enum kernel_mode {
    MODE_BLOCK,  /* run_block runs all threads of a block */
    MODE_LANES,  /* run_lanes runs lanes that are at one point until each has come to another */
    MODE_FIBERS, /* run_thread runs one thread, which calls services->suspend */
};

enum { KERNEL_INTERFACE = 3 };

struct kernel {
    u32 interface, mode;
    const char *name;
    void (*run_block)(struct block *block);
    void (*run_lanes)(struct warp *warp, u32 point, u32 lanes);
    void (*run_thread)(struct thread *thread);
    const struct services **services; /* the kernel's pointer, which the library sets */
    const struct point *points;
    const struct access *accesses;
    const struct variable *variables; /* of the module, that the kernel uses */
    const u32 (*parameters)[2];       /* offset and size of each */
    u32 point_count, access_count, variable_count, parameter_count, parameter_size;
    u32 range_groups;
    u32 shared_size; /* without what a launch adds */
    u32 local_size;  /* of one thread, without the stack of the functions that it calls */
    u32 stack_size;  /* of the frames of the functions that a thread calls, if each is called once */
    u32 saved_size;  /* of one warp */
    u32 constant_size;
    u32 thread_limit, required_block[3]; /* .maxntid and .reqntid, 0 if they are not given */
    u32 ptx_version; /* the architecture of the PTX, as 80 for 8.0 */
    bool calls_functions; /* which take local memory from a stack */
    bool is_recursive;    /* or calls functions through pointers */
    bool shares_local;    /* a thread ends before the next one begins */
    bool uses_matrices, uses_clusters;
};

struct launch {
    const struct kernel *kernel;
    u32 grid[3], block[3];
    u32 dynamic_shared;
    bool is_cooperative;
    const char *parameters;
    char *const *variables;
};

#endif
