/* The library that runs translated kernels: what its files share. */
#ifndef ACCELERATOR_SIM_KERNELS_LIBRARY_H
#define ACCELERATOR_SIM_KERNELS_LIBRARY_H

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>

#include "common/clock.h"
#include "interface/kernel_runs.h"
#include "translated.h"

#define EXPORT __attribute__((visibility("default")))

enum { MESSAGE_SIZE = 1024, MAX_WORKERS = 64, RECENT_SPANS = 16 };

struct span {
    u64 low, size;
};

#define NO_RANGE ((struct range){UINT64_MAX, 0}) /* no address is in it */

/* A launch while it runs. */
struct run {
    struct launch launch;
    const struct kernel *kernel;
    const struct sim_kernel_run *request;
    u64 block_count;
    _Atomic u64 next_block;
    _Atomic bool stops; /* a thread has failed, or the time is over */
    int64_t deadline;   /* nanoseconds of CLOCK_MONOTONIC; the watchdog's, as the next one */
    _Atomic u64 ended_blocks;
    u64 seen_blocks; /* that had ended when the watchdog last looked */
    pthread_mutex_t lock;
    int error; /* guarded by the lock, as the message */
    char message[MESSAGE_SIZE];
    u32 grid_workspace[4] __attribute__((aligned(16)));
    u32 worker_count;
    struct running_worker *workers[MAX_WORKERS];
    struct run *next; /* in the watchdog's list */
};

/* A thread of the CPU that runs blocks. */
struct running_worker {
    struct worker worker; /* the first member, so that a pointer to it is one to this */
    struct run *run;
    pthread_t thread;
    _Atomic bool is_running;
    sigjmp_buf escape;
    _Atomic u32 is_busy; /* in a function that must not be interrupted */
    _Atomic bool is_interrupted;
    void *scheduler_stack; /* while a fiber runs: the stack pointer of the scheduler */
    struct access_record *record; /* or NULL: accesses are not recorded */
    struct span recent[RECENT_SPANS];
    u32 recent_count;
};

static inline struct running_worker *running(struct worker *worker)
{
    return (struct running_worker *)worker;
}

struct barrier {
    u32 expected;                   /* threads; 0 for all of the block */
    u32 arrived_count;              /* threads that have come */
    u32 true_count;                 /* of those, for how many the predicate was true */
    u32 arrived[MAX_THREADS_PER_BLOCK / LANES], waiting[MAX_THREADS_PER_BLOCK / LANES]; /* lanes of each warp */
};

/* failures.c. The message of `fail_kernel` begins with the kernel, its block and its thread. */
void fail_kernel(struct worker *worker, enum kernel_error error, const char *format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));
void escape(struct worker *worker) __attribute__((noreturn));
/* Describe a failure that concerns no thread; the first failure of a run stays. */
void note_failure(struct run *run, enum kernel_error error, const char *format, ...) __attribute__((format(printf, 3, 4)));
void begin_faults(void);
void end_faults(void);
void enter_worker(struct running_worker *worker);
void leave_worker(struct running_worker *worker);
void watch(struct run *run);
void unwatch(struct run *run);
void begin_uninterrupted(struct worker *worker);
void end_uninterrupted(struct worker *worker);

/* memory.c */
struct range find_range(struct worker *worker, u32 group, u64 address, u32 size_log2, u32 access);
void fail_offset(struct worker *worker, const char *space, u64 offset, u64 size, u32 access_size, u32 access)
    __attribute__((noreturn));
bool is_global(struct worker *worker, u64 address);
u64 allocate(struct worker *worker, u64 size);
void release(struct worker *worker, u64 address);

/* recorded.c */
struct access_record *new_access_record(const struct kernel *kernel); /* NULL without memory */
void note_access(struct access_record *record, u64 address, u64 size, u32 access);
void collect_accesses(struct access_record *record, struct sim_kernel_accesses *spans);
void free_access_record(struct access_record *record);

/* buffers.c */
void *take_buffer(size_t size);
void return_buffer(void *buffer);

/* print.c */
u32 print(struct worker *worker, const char *format, const char *arguments);
void fail_assertion(struct worker *worker, const char *message, const char *file, u32 line, const char *function)
    __attribute__((noreturn));

/* lanes.c */
bool run_round(struct block *block); /* lets each lane go on; returns whether one has done more than to poll */
void begin_lanes(struct block *block);
void operate(struct block *block, const struct point *point);
void operate_warp(struct warp *warp, const struct point *point);
void arrive(struct block *block, u32 thread, u32 barrier, u32 count);
void fail_because_stuck(struct block *block) __attribute__((noreturn));

/* operations.c */
void operate_on_group(struct warp *warp, u32 group, const struct point *point);

/* matrices.c */
void multiply_matrices(struct warp *warp, const struct matrix_shape *shape);
void move_matrices(struct warp *warp, enum operation operation, const struct matrix_move *move);

/* fibers.c */
bool make_fibers(struct block *block);
void free_fibers(struct block *block);
void begin_fibers(struct block *block);
void run_fibers(struct warp *warp, u32 lanes);
void suspend(struct thread *thread, u32 point);

#endif
