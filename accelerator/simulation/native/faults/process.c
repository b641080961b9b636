/* Faults: when faults fire, and what they do to this process. */
#include "common/clock.h"
#include "common/config.h"
#include "common/errors.h"
#include "common/faults.h"
#include "common/marked_processes.h"
#include "common/state.h"
#include "interface/cuda_errors.h"

struct fault_table *_Atomic used_faults;

/* Of this process's context on each GPU. */
static struct {
    _Atomic int error;       /* stays until the process ends */
    _Atomic int64_t begin;   /* 0: there is no context */
    _Atomic uint32_t resets; /* of the GPU, when the context was made */
    _Atomic int flip;        /* the bit to flip in the result of an op, plus 1; or 0 */
} contexts[SIM_MAX_GPUS];

/* Read when a context is made: other threads must not read the environment while the program writes it. */
static _Atomic int own_rank = FAULT_ANY_RANK;
static _Atomic bool is_blocking; /* each op waits for its error */

void faults_use(struct fault_table *table)
{
    used_faults = table;
}

/* Returns whether the context was whole. */
static bool break_context(int gpu, int error)
{
    int none = 0;
    return atomic_compare_exchange_strong(&contexts[gpu].error, &none, error);
}

static void post_event(struct fault_table *table, int gpu, int xid)
{
    const uint32_t number = atomic_fetch_add(&table->event_count, 1);
    table->events[number % SIM_MAX_EVENTS] = (uint64_t)(number + 1) << 32 | (uint64_t)gpu << 16 | (unsigned)xid;
}

/* What the driver writes to the kernel's log, and the event that NVML reports. */
static void log_xid(struct fault_table *table, const struct fault *fault, int gpu, bool has_process)
{
    if (!fault->xid)
        return;
    unsigned domain, bus;
    char process[64] = "";
    post_event(table, gpu, fault->xid);
    sim_pci_address(gpu, &domain, &bus);
    if (has_process)
        snprintf(process, sizeof process, "pid=%d, name=%s, ", getpid(), program_invocation_short_name);
    fprintf(stderr, "NVRM: Xid (PCI:%04x:%02x:00): %d, %s%s\n", domain, bus, fault->xid, process, fault->text);
}

static void mark(struct gpu_health *health, const struct fault *fault)
{
    if (fault->kind == FAULT_LOST)
        health->is_lost = 1;
    if (fault->scope == SCOPE_UNTIL_RESET)
        health->error = (uint32_t)fault->error;
    if (fault->recovery)
        health->recovery = (uint32_t)fault->recovery;
    if (fault->marks & MARK_ECC) {
        health->volatile_errors++;
        health->aggregate_errors++;
    }
    if (fault->marks & MARK_CORRECTED) {
        health->volatile_corrected++;
        health->aggregate_corrected++;
    }
    if (fault->marks & MARK_REMAP) {
        health->remapped++;
        health->is_remap_pending = 1;
    }
    if (fault->marks & MARK_REMAP_FAILED)
        health->has_remap_failed = 1;
}

static bool is_of_rank(const struct fault *fault)
{
    return fault->rank == FAULT_ANY_RANK || fault->rank == own_rank;
}

static bool is_of_gpu(const struct fault *fault, int gpu)
{
    return fault->gpu == gpu || fault->gpu == FAULT_ANY_GPU;
}

/* A hash (splitmix64): the chance is a function of the seed and the tick, so that a run can be repeated. */
static bool draws(const struct fault *fault, uint64_t tick)
{
    uint64_t bits = fault->seed + 0x9E3779B97F4A7C15ULL * (tick + 1);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ULL;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBULL;
    return (bits ^ (bits >> 31)) >> 32 < fault->chance;
}

static bool is_due(struct fault *fault, enum fault_clock clock)
{
    if (fault->clock == CLOCK_NONE)
        return true;
    if (fault->clock == CLOCK_SECONDS)
        return now() >= fault->at && (fault->chance == 0 || (clock == CLOCK_OPS && draws(fault, fault->ticks++)));
    if (fault->clock != (int32_t)clock)
        return false;
    uint64_t ticks = ++fault->ticks;
    return ticks > (uint64_t)fault->at && (fault->chance == 0 || draws(fault, ticks));
}

/* Kills the other processes of the machine, which may start more before they are killed. */
static void kill_node(void)
{
    enum { MAX_ROUNDS = 50 };
    char mark[4096];
    const char *state = sim_state_path();
    int length = snprintf(mark, sizeof mark, SETTING_STATE "=%s", state ? state : "");
    if (!state || length >= (int)sizeof mark)
        return;
    for (int round = 0; round < MAX_ROUNDS && kill_marked(mark, (size_t)length + 1); round++)
        sleep_until(now() + MILLISECOND);
}

static void fire(struct fault_table *table, struct fault *fault, int gpu, bool has_process)
{
    const bool is_over = fault->kind == FAULT_NOTE || fault->kind == FAULT_FLIP || fault->kind == FAULT_KILL ||
                         (fault->kind == FAULT_ERROR && fault->scope == SCOPE_PROCESS);
    int32_t waits = FAULT_WAITS;
    if (!atomic_compare_exchange_strong(&fault->state, &waits, FAULT_CLAIMED))
        return;
    fault->since = now();
    if (fault->rank != FAULT_ANY_RANK)
        fault->gpu = gpu;
    fault->pid = has_process ? getpid() : 0;
    fault->fired_at = time(NULL);
    if (fault->kind != FAULT_HANG) /* a hang is told when the driver notices it */
        mark(&table->gpus[gpu], fault);
    fault->state = is_over ? FAULT_OVER : FAULT_ACTIVE; /* from here on others read it */
    if (fault->kind != FAULT_HANG)
        log_xid(table, fault, gpu, has_process);
    if (fault->kind == FAULT_FLIP)
        contexts[gpu].flip = (int)fault->amount + 1;
    if ((fault->kind == FAULT_ERROR || fault->kind == FAULT_LOST) && has_process)
        break_context(gpu, fault->error);
    if (fault->kind == FAULT_KILL) {
        if (fault->scope != SCOPE_PROCESS)
            kill_node();
        kill(getpid(), SIGKILL);
    }
}

/* A fault whose time is over: the driver has noticed a hang with an Xid, and ends what hung. */
static void end_if_over(struct fault_table *table, struct fault *fault, int gpu)
{
    if (fault->duration == 0 || now() - fault->since < fault->duration)
        return;
    const bool breaks = fault->kind == FAULT_HANG && fault->error;
    if (breaks && fault->scope == SCOPE_PROCESS && fault->pid != getpid())
        return;
    int32_t active = FAULT_ACTIVE;
    if (breaks)
        break_context(gpu, fault->error);
    fault->ended_at = breaks ? now() : fault->since + fault->duration;
    if (atomic_compare_exchange_strong(&fault->state, &active, FAULT_OVER) && breaks) {
        mark(&table->gpus[gpu], fault);
        log_xid(table, fault, gpu, true);
    }
}

/* Whether a fault that happened at a time concerns this process too. */
static bool reaches(const struct fault *fault, int gpu, int64_t time)
{
    return fault->scope != SCOPE_PROCESS && contexts[gpu].begin != 0 && contexts[gpu].begin <= time;
}

/* What other processes have done to the context of this one: fired an error of all users, ended a hang, reset the GPU. */
static void notice(const struct fault_table *table, int gpu)
{
    for (int i = 0; i < SIM_MAX_FAULTS; i++) {
        const struct fault *fault = &table->faults[i];
        const bool is_error = fault->state == FAULT_ACTIVE && (fault->kind == FAULT_ERROR || fault->kind == FAULT_LOST);
        const bool was_hang = fault->state == FAULT_OVER && fault->kind == FAULT_HANG && fault->error;
        if ((is_error || was_hang) && is_of_gpu(fault, gpu) && reaches(fault, gpu, was_hang ? fault->ended_at : fault->since))
            break_context(gpu, fault->error);
    }
    if (contexts[gpu].begin != 0 && contexts[gpu].resets != table->gpus[gpu].resets)
        break_context(gpu, ERROR_UNKNOWN);
}

static void update(struct fault_table *table, int gpu, enum fault_clock clock)
{
    for (int i = 0; i < SIM_MAX_FAULTS; i++) {
        struct fault *fault = &table->faults[i];
        if (fault->state == FAULT_FREE || fault->state == FAULT_CLAIMED || !is_of_gpu(fault, gpu))
            continue;
        if (fault->state == FAULT_WAITS && is_of_rank(fault) && is_due(fault, clock))
            fire(table, fault, gpu, true);
        if (fault->state == FAULT_ACTIVE)
            end_if_over(table, fault, gpu);
    }
    notice(table, gpu);
}

int faults_error(int gpu)
{
    if (!faults_are_used() || gpu < 0)
        return 0;
    update(used_faults, gpu, CLOCK_NONE);
    return contexts[gpu].error;
}

bool faults_is_lost(int gpu)
{
    if (!faults_are_used())
        return false;
    faults_without_process(gpu);
    return used_faults->gpus[gpu].is_lost;
}

int faults_new_context(int gpu)
{
    struct fault_table *table = used_faults;
    const struct gpu_health *health = &table->gpus[gpu];
    RETURN_UNLESS(!health->is_lost, ERROR_UNKNOWN);
    if (health->error)
        return (int)health->error;
    const char *rank = getenv("RANK"), *blocking = getenv("CUDA_LAUNCH_BLOCKING");
    own_rank = rank ? atoi(rank) : FAULT_ANY_RANK;
    is_blocking = blocking && strcmp(blocking, "1") == 0;
    contexts[gpu].resets = health->resets;
    contexts[gpu].begin = now();
    return 0;
}

/* What hangs are the channels of the processes that used the GPU then. New processes get new ones. */
static bool is_active(const struct fault *fault, int gpu, enum fault_kind kind)
{
    return fault->state == FAULT_ACTIVE && (int)kind == fault->kind && is_of_gpu(fault, gpu) &&
           (fault->kind != FAULT_HANG || fault->pid == getpid() || reaches(fault, gpu, fault->since));
}

int64_t faults_end_of(int64_t time)
{
    if (!is_while_hung(time))
        return time;
    int64_t last = 0;
    for (int i = 0; i < SIM_MAX_FAULTS; i++) {
        const struct fault *fault = &used_faults->faults[i];
        const int32_t state = fault->state;
        if (fault->kind != FAULT_HANG || !is_of_gpu(fault, hung_gpu(time)) || (state != FAULT_ACTIVE && fault->ended_at == 0))
            continue;
        /* A hang with an error lasts until the driver notices it, one without a time until it is cleared. */
        const int64_t known = fault->duration && !fault->error ? fault->since + fault->duration : INT64_MAX;
        const int64_t end = state == FAULT_ACTIVE ? known : fault->ended_at;
        if (end > now())
            return INT64_MAX;
        last = end > last ? end : last;
    }
    return last;
}

/* The op that fires a fault is on the GPU already: the error comes with the next call. */
struct fault_effect faults_at_op(int gpu)
{
    struct fault_table *table = used_faults;
    notice(table, gpu);
    struct fault_effect effect = {.error = contexts[gpu].error};
    if (effect.error)
        return effect;
    update(table, gpu, CLOCK_OPS);
    if (is_blocking)
        effect.error = contexts[gpu].error;
    for (int i = 0; i < SIM_MAX_FAULTS; i++) {
        const struct fault *fault = &table->faults[i];
        if (is_active(fault, gpu, FAULT_SLOW))
            effect.delay += fault->amount;
        if (is_active(fault, gpu, FAULT_HANG))
            effect.until = while_hung(gpu);
    }
    return effect;
}

void faults_at(enum fault_clock clock, int gpu)
{
    if (faults_are_used() && gpu >= 0)
        update(used_faults, gpu, clock);
}

bool faults_block(int gpu)
{
    struct fault_table *table = used_faults;
    if (!faults_are_used() || gpu < 0)
        return false;
    update(table, gpu, CLOCK_NONE);
    if (contexts[gpu].error)
        return true;
    for (int i = 0; i < SIM_MAX_FAULTS; i++)
        if (is_active(&table->faults[i], gpu, FAULT_LINK) || is_active(&table->faults[i], gpu, FAULT_HANG))
            return true;
    return false;
}

int faults_flip(int gpu)
{
    return contexts[gpu].flip - 1;
}

void faults_flipped(int gpu)
{
    contexts[gpu].flip = 0;
}

int faults_sleep(int gpu, int64_t time)
{
    enum { SLICE = 20 * MILLISECOND };
    for (;;) {
        const int error = faults_error(gpu);
        if (is_while_hung(time) && hung_gpu(time) != gpu && contexts[hung_gpu(time)].begin != 0)
            update(used_faults, hung_gpu(time), CLOCK_NONE); /* another GPU of this process may hang */
        const int64_t begin = now(), end = faults_end_of(time);
        if (error || begin >= end)
            return error;
        sleep_until(end - begin > SLICE ? begin + SLICE : end);
    }
}

/* The Xid of a program's error, as recorded on an H100. There, a stack that overflows is an illegal address with 43. */
static int xid_of_program(int error)
{
    return error == ERROR_ILLEGAL_ADDRESS ? 31 : error == ERROR_MISALIGNED_ADDRESS ? 13 : 43;
}

int faults_break(int gpu, int error)
{
    if (break_context(gpu, error))
        post_event(used_faults, gpu, xid_of_program(error));
    used_faults->is_used = 1;
    return is_blocking ? contexts[gpu].error : 0;
}

void faults_without_process(int gpu)
{
    struct fault_table *table = used_faults;
    for (int i = 0; i < SIM_MAX_FAULTS; i++) {
        struct fault *fault = &table->faults[i];
        if (fault->state == FAULT_WAITS && is_of_gpu(fault, gpu) && fault->rank == FAULT_ANY_RANK &&
            (fault->kind == FAULT_LOST || fault->kind == FAULT_NOTE) && fault->chance == 0 &&
            (fault->clock == CLOCK_NONE || fault->clock == CLOCK_SECONDS) && is_due(fault, CLOCK_NONE))
            fire(table, fault, gpu, false);
    }
}
