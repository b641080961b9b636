/* Faults of the machine's GPUs: a table in its state, which all its processes map, and what the table does to a process.
 *
 * A fault waits until its condition holds in a process that uses its GPU. What it leaves behind stays in the GPU's health, which
 * NVML reads. Errors of a process stay until it ends, as those of a CUDA context do. fault_words.py describes the faults. The
 * functions are in faults/. */
#ifndef ACCELERATOR_SIM_FAULTS_H
#define ACCELERATOR_SIM_FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "interface/fault_effects.h"
#include "interface/settings.h"

enum fault_kind { FAULT_ERROR, FAULT_LOST, FAULT_HANG, FAULT_SLOW, FAULT_LINK, FAULT_FLIP, FAULT_KILL, FAULT_NOTE };
enum fault_scope { SCOPE_PROCESS, SCOPE_USERS, SCOPE_UNTIL_RESET }; /* which processes an error reaches */
enum fault_state { FAULT_FREE, FAULT_WAITS, FAULT_ACTIVE, FAULT_OVER, FAULT_CLEARED, FAULT_CLAIMED };
enum fault_mark { MARK_ECC = 1, MARK_REMAP = 2, MARK_REMAP_FAILED = 4, MARK_CORRECTED = 8 };
enum { FAULT_ANY_GPU = -1, FAULT_ANY_RANK = -1, SIM_MAX_EVENTS = 256 };

_Static_assert(SIM_MAX_GPUS <= HANG_TIMES, "each GPU has a time that stands for its hang");

struct fault {
    _Atomic int32_t state;
    int32_t kind, scope, clock, marks;
    int32_t xid, error, recovery; /* the code that CUDA's calls return; the recovery action as NVML numbers it */
    _Atomic int32_t gpu;          /* of a fault of a rank: FAULT_ANY_GPU until the rank has fired it */
    int32_t rank;
    int64_t at;     /* number on the clock, or nanoseconds of CLOCK_MONOTONIC */
    uint64_t chance, seed; /* the chance at each tick, out of 2^32; 0 if the first tick after `at` fires it */
    int64_t amount;   /* FAULT_SLOW: nanoseconds an op; FAULT_FLIP: the bit */
    int64_t duration; /* nanoseconds, 0: until it is cleared */
    _Atomic uint64_t ticks;
    _Atomic int64_t since; /* nanoseconds of CLOCK_MONOTONIC when it fired */
    _Atomic int64_t ended_at; /* of a hang, when it is over: nanoseconds of CLOCK_MONOTONIC */
    _Atomic int64_t fired_at; /* seconds of the calendar */
    _Atomic pid_t pid; /* of the process that fired it */
    char words[160], text[120]; /* as the user wrote it; of the kernel's log */
};

struct gpu_health {
    _Atomic uint32_t is_lost, recovery, error, resets; /* `error`: of each new context, until a reset */
    _Atomic uint64_t volatile_errors, aggregate_errors, volatile_corrected, aggregate_corrected;
    _Atomic uint32_t remapped, is_remap_pending, has_remap_failed, reserved;
};

struct fault_table {
    _Atomic int is_used; /* from the first fault on; until then nothing else is read */
    _Atomic uint32_t event_count;
    _Atomic uint64_t events[SIM_MAX_EVENTS]; /* the number of the event, plus 1, the GPU and the Xid in 32, 16 and 16 bits */
    struct gpu_health gpus[SIM_MAX_GPUS];
    struct fault faults[SIM_MAX_FAULTS];
};

/* parse.c. Adds faults to the table of a machine; returns a problem, or NULL. Those of other nodes are left out. */
const char *faults_add(struct fault_table *table, const char *rows, int node, int gpu_count);

/* clear_and_status.c */
void faults_clear(struct fault_table *table, int gpu); /* the cause is gone; a lost GPU is back */
void faults_reset(struct fault_table *table, int gpu); /* ends the errors of new processes, and the GPU's users */
/* Describes the faults and the GPUs, or only faults that have never fired, a line each. */
void faults_describe(const struct fault_table *table, bool only_unfired, char *text, size_t size);

/* process.c */
void faults_use(struct fault_table *table); /* of the machine of this process */
extern struct fault_table *_Atomic used_faults; /* or NULL */

static inline bool faults_are_used(void)
{
    struct fault_table *table = used_faults;
    return table && __builtin_expect(atomic_load_explicit(&table->is_used, memory_order_relaxed) != 0, 0);
}

int faults_error(int gpu);       /* of this process on the GPU, or 0; fires what is due */
bool faults_is_lost(int gpu);
int faults_new_context(int gpu); /* the error of a new context, or 0 */
struct fault_effect faults_at_op(int gpu);
void faults_at(enum fault_clock clock, int gpu); /* a collective or a launch */
bool faults_block(int gpu);                      /* whether collectives of the GPU do not go on */
int64_t faults_end_of(int64_t time); /* the time itself, or when the hang that it stands for was over; INT64_MAX while it lasts */
int faults_flip(int gpu);       /* the bit to flip in an op's result, or -1 */
void faults_flipped(int gpu);   /* it was flipped */
int faults_sleep(int gpu, int64_t time); /* until a time; returns the error that ends the wait, or 0 */
/* Breaks the context by an error of the program: an assertion, a failed kernel. Returns the error if launches wait for it, or 0. */
int faults_break(int gpu, int error);

/* For NVML, which has no context: fires what concerns no process. */
void faults_without_process(int gpu);

#endif
