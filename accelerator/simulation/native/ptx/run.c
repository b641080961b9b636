/* Runs a launch: threads of the CPU take blocks, fill their shared memory, and run each until its threads have returned. */
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "library.h"

enum {
    SMALL_LAUNCH = 16 * 1024, /* threads, for which one thread of the CPU is enough */
    WORKER_STACK = 256 << 20, /* bytes: device functions may be recursive */
    STACK_RESERVE = 128 << 10,
    IDLE_ROUNDS = 16,         /* after which a block whose threads only poll makes way for another */
    POLLING_ROUNDS = 64,      /* the same, if its other threads go on */
    MAX_RESIDENT = 16384,
};

static u64 nanoseconds(void)
{
    return (u64)now();
}

/* cooperative_groups: the second word is a barrier of the grid that threads increment and poll. */
static u64 grid_workspace(struct worker *worker)
{
    struct run *run = running(worker)->run;
    return run->launch.is_cooperative ? (u64)run->grid_workspace : 0;
}

static const struct services services = {
    .find_range = find_range,
    .fail_offset = fail_offset,
    .fail = fail_kernel,
    .operate = operate,
    .operate_warp = operate_warp,
    .arrive = arrive,
    .suspend = suspend,
    .print = print,
    .fail_assertion = fail_assertion,
    .allocate = allocate,
    .release = release,
    .is_global = is_global,
    .nanoseconds = nanoseconds,
    .grid_workspace = grid_workspace,
};

EXPORT bool sim_kernel_connect(const struct kernel *kernel, struct sim_kernel_facts *facts)
{
    _Static_assert(sizeof(struct variable) == sizeof(struct sim_kernel_variable), "the same structure");
    if (kernel->interface != KERNEL_INTERFACE)
        return false;
    *kernel->services = &services;
    *facts = (struct sim_kernel_facts){
        .parameters = kernel->parameters,
        .parameter_count = kernel->parameter_count,
        .parameter_size = kernel->parameter_size,
        .variables = (const struct sim_kernel_variable *)kernel->variables,
        .variable_count = kernel->variable_count,
        .shared_size = kernel->shared_size,
        .local_size = kernel->local_size,
        .constant_size = kernel->constant_size,
        .thread_limit = kernel->thread_limit,
        .required_block = {kernel->required_block[0], kernel->required_block[1], kernel->required_block[2]},
        .ptx_version = kernel->ptx_version,
        .uses_clusters = kernel->uses_clusters,
    };
    return true;
}

/* Programs compute with generic addresses of shared memory that is declared with up to this alignment. */
enum { SHARED_ALIGNMENT = 1024 };

static size_t round_up(size_t size, size_t multiple)
{
    return (size + multiple - 1) / multiple * multiple;
}

/* The parts of a block's memory, one after the other in a buffer. */
struct layout {
    size_t warps, barriers, shared, saved, fragments, local, size;
    size_t local_stride, local_span;
};

static struct layout lay_out(const struct run *run)
{
    const struct kernel *kernel = run->kernel;
    const u32 *block = run->launch.block;
    size_t threads = (size_t)block[0] * block[1] * block[2], warps = (threads + LANES - 1) / LANES;
    struct layout layout = {0};
    size_t end = round_up(sizeof(struct block), 64);
    layout.warps = end, end += round_up(warps * sizeof(struct warp), 64);
    layout.barriers = end, end += round_up(BARRIERS * sizeof(struct barrier), 64);
    layout.saved = end, end += round_up(warps * kernel->saved_size, 64);
    layout.fragments = end, end += kernel->uses_matrices ? warps * 2 * FRAGMENT_WORDS * LANES * sizeof(u32) : 0;
    layout.shared = end, end += round_up((size_t)kernel->shared_size + run->launch.dynamic_shared + 16 + SHARED_ALIGNMENT, 64);
    const u64 limit = run->request->stack_limit;
    const u64 stack = limit < LOCAL_STACK ? LOCAL_STACK : limit < MAX_LOCAL_MEMORY ? limit : MAX_LOCAL_MEMORY;
    layout.local_span = kernel->local_size + (kernel->calls_functions ? kernel->stack_size + stack : 0);
    /* An odd number of cache lines, so that the same variable of all threads is not in the same lines of the cache. */
    layout.local_stride = kernel->shares_local ? 0 : round_up(layout.local_span, 128) + 64;
    layout.local = end, end += layout.local_stride * threads + round_up(layout.local_span, 64);
    layout.size = end;
    return layout;
}

static void number_threads(struct block *block, const u32 size[3])
{
    for (u32 i = 0; i < block->threads; i++) {
        struct warp *warp = &block->warps[i / LANES];
        warp->x[i % LANES] = i % size[0];
        warp->y[i % LANES] = i / size[0] % size[1];
        warp->z[i % LANES] = i / size[0] / size[1];
    }
}

static struct block *make_block(struct running_worker *worker)
{
    struct run *run = worker->run;
    const struct kernel *kernel = run->kernel;
    struct layout layout = lay_out(run);
    char *memory = take_buffer(layout.size);
    if (!memory)
        return NULL;
    struct block *block = (struct block *)memory;
    memset(block, 0, sizeof *block);
    block->launch = &run->launch;
    block->worker = &worker->worker;
    block->threads = run->launch.block[0] * run->launch.block[1] * run->launch.block[2];
    block->warp_count = (block->threads + LANES - 1) / LANES;
    block->warps = (struct warp *)(memory + layout.warps);
    block->barriers = (struct barrier *)(memory + layout.barriers);
    block->saved = memory + layout.saved;
    block->shared = (char *)round_up((size_t)(memory + layout.shared), SHARED_ALIGNMENT);
    block->shared_size = kernel->shared_size + run->launch.dynamic_shared;
    block->local = memory + layout.local;
    block->local_stride = layout.local_stride;
    block->local_span = layout.local_span;
    for (u32 i = 0; i < block->warp_count; i++) {
        struct warp *warp = &block->warps[i];
        memset(warp, 0, sizeof *warp);
        warp->block = block;
        warp->number = i;
        warp->first = i * LANES;
        warp->saved = block->saved + (size_t)i * kernel->saved_size;
        char *fragments = memory + layout.fragments + (size_t)i * 2 * FRAGMENT_WORDS * LANES * sizeof(u32);
        warp->operands = (u32(*)[LANES])fragments;
        warp->results = warp->operands + FRAGMENT_WORDS;
    }
    number_threads(block, run->launch.block);
    if (kernel->mode == MODE_FIBERS && !make_fibers(block)) {
        return_buffer(memory);
        return NULL;
    }
    return block;
}

static void free_block(struct block *block)
{
    if (block->fibers)
        free_fibers(block);
    return_buffer(block);
}

static void begin_block(struct block *block, u64 number)
{
    struct run *run = running(block->worker)->run;
    const u32 *grid = run->launch.grid;
    block->number = number;
    block->index[0] = (u32)(number % grid[0]);
    block->index[1] = (u32)(number / grid[0] % grid[1]);
    block->index[2] = (u32)(number / grid[0] / grid[1]);
    block->alive = block->threads;
    block->idle_rounds = 0;
    /* Shared memory has any content at first. Here it has always the same. A masked store of nothing to a page that was never
     * touched, as in glibc's memset, takes longer than many a block. */
    if (block->shared_size > 0)
        memset(block->shared, run->request->fills_with_nan ? 0xff : 0, block->shared_size);
    for (u32 i = 0; i < block->warp_count; i++) {
        u32 lanes = block->threads - i * LANES;
        block->warps[i].alive = lanes >= LANES ? ~0u : (1u << lanes) - 1;
    }
    if (run->kernel->mode != MODE_BLOCK)
        begin_lanes(block);
}

static void run_whole_blocks(struct running_worker *worker, struct block *block)
{
    struct run *run = worker->run;
    u64 number;
    worker->worker.block = block;
    while (!run->stops && (number = run->next_block++) < run->block_count) {
        begin_block(block, number);
        run->kernel->run_block(block);
        run->ended_blocks++;
    }
}

/* The blocks that a worker has begun. */
struct residents {
    struct block **blocks;
    u32 count, capacity;
};

static bool add_next_block(struct running_worker *worker, struct residents *residents, struct block *reused)
{
    struct run *run = worker->run;
    if (residents->count == residents->capacity) {
        u32 capacity = residents->capacity ? 2 * residents->capacity : 16;
        struct block **blocks = capacity <= MAX_RESIDENT ? realloc(residents->blocks, capacity * sizeof *blocks) : NULL;
        if (!blocks)
            return false;
        residents->blocks = blocks;
        residents->capacity = capacity;
    }
    if (!reused && run->next_block >= run->block_count)
        return false;
    struct block *block = reused ? reused : make_block(worker);
    u64 number = block ? run->next_block++ : run->block_count;
    if (number >= run->block_count) {
        if (block)
            free_block(block);
        return false;
    }
    begin_block(block, number);
    residents->blocks[residents->count++] = block;
    return true;
}

static bool begin_next_block(struct running_worker *worker, struct residents *residents, struct block *reused)
{
    begin_uninterrupted(&worker->worker);
    bool is_added = add_next_block(worker, residents, reused);
    end_uninterrupted(&worker->worker);
    return is_added;
}

/* Runs blocks whose threads may wait for those of other blocks: a block in which threads only poll makes way for the others,
 * also for those that no worker has begun. */
static void run_interleaved_blocks(struct running_worker *worker, struct residents *residents)
{
    struct run *run = worker->run;
    u32 at = 0, idle = 0;
    if (!begin_next_block(worker, residents, NULL))
        return;
    while (residents->count > 0 && !run->stops) {
        at = at < residents->count ? at : 0;
        struct block *block = residents->blocks[at];
        worker->worker.block = block;
        block->idle_rounds = block->polling_rounds = 0;
        while (block->alive > 0 && block->idle_rounds < IDLE_ROUNDS && block->polling_rounds < POLLING_ROUNDS && !run->stops)
            block->idle_rounds = run_round(block) ? 0 : block->idle_rounds + 1;
        if (block->alive == 0) {
            run->ended_blocks++;
            residents->blocks[at] = residents->blocks[--residents->count];
            begin_next_block(worker, residents, block);
            idle = 0;
        } else if (begin_next_block(worker, residents, NULL)) {
            at = residents->count - 1;
            idle = 0;
        } else {
            at++;
            if (++idle > residents->count)
                sched_yield();
        }
    }
}

static void run_worker(struct running_worker *worker)
{
    struct run *run = worker->run;
    struct block *volatile whole = NULL;
    struct residents residents = {0};
    enter_worker(worker);
    if (sigsetjmp(worker->escape, 0) == 0) {
        worker->is_running = true; /* from now on the watchdog's signal has a place to escape to */
        if (run->kernel->mode != MODE_BLOCK) {
            run_interleaved_blocks(worker, &residents);
        } else {
            begin_uninterrupted(&worker->worker);
            whole = make_block(worker);
            end_uninterrupted(&worker->worker);
            if (whole)
                run_whole_blocks(worker, whole);
        }
    }
    leave_worker(worker);
    if (whole)
        free_block(whole);
    for (u32 i = 0; i < residents.count; i++)
        free_block(residents.blocks[i]);
    free(residents.blocks);
}

static void find_stack_end(struct running_worker *worker)
{
    pthread_attr_t attributes;
    void *low;
    size_t size;
    worker->worker.stack_end = NULL;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &low, &size) == 0)
        worker->worker.stack_end = (char *)low + STACK_RESERVE;
    pthread_attr_destroy(&attributes);
}

static void *run_thread(void *argument)
{
    /* Kernels round and keep subnormal numbers as a GPU does, whatever the program has set for the CPU. */
    enum { DEFAULT_CONTROL = 0x1F80 };
    struct running_worker *worker = argument;
    const u32 control = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(DEFAULT_CONTROL);
    worker->thread = pthread_self();
    if (worker->run->kernel->calls_functions)
        find_stack_end(worker);
    run_worker(worker);
    __builtin_ia32_ldmxcsr(control);
    return NULL;
}

static u32 count_workers(const struct run *run)
{
    const struct sim_kernel_run *request = run->request;
    u64 threads = run->block_count * request->block[0] * request->block[1] * request->block[2];
    u32 count = request->cpu_count < MAX_WORKERS ? request->cpu_count : MAX_WORKERS;
    if (threads < SMALL_LAUNCH || count < 1 || request->accesses) /* one thread records accesses without locks */
        return 1;
    return count < run->block_count ? count : (u32)run->block_count;
}

static struct running_worker *make_worker(struct run *run)
{
    size_t size = sizeof(struct running_worker) + run->kernel->range_groups * sizeof(struct range);
    struct running_worker *worker = calloc(1, size);
    if (!worker)
        return NULL;
    if (run->request->accesses && !(worker->record = new_access_record(run->kernel))) {
        free(worker);
        return NULL;
    }
    worker->run = run;
    worker->worker.launch = &run->launch;
    worker->worker.find_range = find_range;
    worker->worker.ranges = (struct range *)(worker + 1);
    for (u32 i = 0; i < run->kernel->range_groups; i++)
        worker->worker.ranges[i] = NO_RANGE;
    return worker;
}

/* Starts a thread of the CPU that takes no signals of the program. */
static bool start_thread(struct running_worker *worker, pthread_t *thread)
{
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = pthread_create(thread, &attributes, run_thread, worker) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return is_started;
}

static void run_workers(struct run *run)
{
    /* The stack of the caller's thread may be small. */
    bool needs_own_stack = run->kernel->is_recursive;
    pthread_t threads[MAX_WORKERS];
    u32 started = 0;
    for (u32 i = needs_own_stack ? 0 : 1; i < run->worker_count; i++)
        started += start_thread(run->workers[i], &threads[started]);
    if (!needs_own_stack)
        run_thread(run->workers[0]);
    else if (started == 0)
        note_failure(run, KERNEL_FAILED, "the host has no memory for a stack");
    for (u32 i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}

EXPORT int sim_kernel_run(const struct sim_kernel_run *request, char *message, uint32_t message_size)
{
    struct run run = {
        .launch = {
            .kernel = request->kernel,
            .grid = {request->grid[0], request->grid[1], request->grid[2]},
            .block = {request->block[0], request->block[1], request->block[2]},
            .dynamic_shared = request->dynamic_shared,
            .is_cooperative = request->is_cooperative,
            .parameters = request->parameters,
            .variables = request->variables,
        },
        .kernel = request->kernel,
        .request = request,
        .block_count = (u64)request->grid[0] * request->grid[1] * request->grid[2],
        .deadline = now() + (int64_t)request->timeout_ms * MILLISECOND,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .grid_workspace = {sizeof run.grid_workspace},
    };
    u32 count = count_workers(&run);
    for (u32 i = 0; i < count && (run.workers[i] = make_worker(&run)); i++)
        run.worker_count++;
    if (run.worker_count == 0) {
        snprintf(message, message_size, "the host has no memory");
        return KERNEL_FAILED;
    }
    begin_faults();
    watch(&run);
    run_workers(&run);
    unwatch(&run);
    if (!run.stops && run.ended_blocks < run.block_count)
        note_failure(&run, KERNEL_FAILED, "the host has no memory for a block of the kernel");
    end_faults();
    fflush(stdout);
    if (request->accesses) {
        collect_accesses(run.workers[0]->record, request->accesses);
        free_access_record(run.workers[0]->record);
    }
    for (u32 i = 0; i < run.worker_count; i++)
        free(run.workers[i]);
    snprintf(message, message_size, "%s", run.message);
    return run.error;
}
