/* Accounts of the simulated machine: each process's memory and contexts on each GPU, its pinned memory, and how much there is. */
#include <stdbool.h>
#include <unistd.h>

#include "process.h"
#include "state.h"
#include "state_layout.h"

static void lock(struct sim_state *state)
{
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&state->lock);
}

static void unlock(struct sim_state *state)
{
    pthread_mutex_unlock(&state->lock);
}

/* Identifies the program that the process runs; 0 without the permission to know. */
static uint64_t image_of(const struct process *process)
{
    return process->stack_start ? process->stack_start ^ process->code_start << 1 : 0;
}

static uint64_t own_image(void)
{
    static _Atomic uint64_t image; /* a forked child has the same */
    struct process process;
    if (image == 0 && read_process(getpid(), &process))
        image = image_of(&process);
    return image;
}

static bool is_alive(const struct row *row)
{
    struct process process;
    if (row->pid == getpid())
        return row->image == own_image();
    if (!read_process(row->pid, &process))
        return false;
    uint64_t image = image_of(&process);
    return image == 0 || row->image == 0 || image == row->image;
}

static bool row_matches(const struct row *row, int gpu, int instance)
{
    return row->gpu == gpu && (instance == SIM_ANY_INSTANCE || row->instance == instance);
}

static void clear(struct row *row)
{
    row->memory = 0;
    row->contexts = 0;
    row->pid = 0;
}

static void drop_dead_rows(struct sim_state *state)
{
    for (int i = 0; i < state->row_count; i++)
        if (state->rows[i].pid != 0 && !is_alive(&state->rows[i]))
            clear(&state->rows[i]);
}

static struct row *claim(struct sim_state *state, int gpu, int instance)
{
    struct row *row = NULL;
    for (int i = 0; i < state->row_count && !row; i++)
        if (state->rows[i].pid == 0)
            row = &state->rows[i];
    if (!row && state->row_count < SIM_MAX_PROCESSES)
        row = &state->rows[state->row_count++];
    if (!row)
        return NULL;
    row->gpu = gpu;
    row->instance = instance;
    row->image = own_image();
    row->pid = getpid();
    return row;
}

/* Returns NULL before the process is first charged and after it has dropped its rows. */
static struct row *find_own_row(struct sim_state *state, int gpu, int instance)
{
    pid_t self = getpid();
    for (int i = 0; i < state->row_count; i++)
        if (state->rows[i].pid == self && row_matches(&state->rows[i], gpu, instance))
            return &state->rows[i];
    return NULL;
}

static struct row *own_row(struct sim_state *state, int gpu, int instance)
{
    struct row *row = find_own_row(state, gpu, instance);
    if (!row)
        row = claim(state, gpu, instance);
    if (!row) {
        drop_dead_rows(state);
        row = claim(state, gpu, instance);
    }
    return row;
}

/* Sums the recorded memory, including that of ended processes. */
static uint64_t recorded(struct sim_state *state, int gpu, int instance)
{
    uint64_t sum = 0;
    for (int i = 0; i < state->row_count; i++)
        if (state->rows[i].pid != 0 && row_matches(&state->rows[i], gpu, instance))
            sum += state->rows[i].memory;
    return sum;
}

/* An instance has an eighth of its GPU's memory. */
uint64_t sim_memory_size(int gpu, int instance)
{
    if (gpu == SIM_HOST)
        return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t memory = sim_config()->gpus[gpu].memory;
    return instance == SIM_WHOLE_GPU ? memory : memory / 8;
}

static bool has_space(struct sim_state *state, int gpu, int instance, uint64_t bytes, bool may_exceed)
{
    const uint64_t capacity = sim_memory_size(gpu, instance) * (may_exceed ? SIM_EXCESS : 1);
    const uint64_t used = recorded(state, gpu, instance);
    return used <= capacity && bytes <= capacity - used;
}

int sim_state_charge(struct sim_state *state, int gpu, int instance, uint64_t bytes, bool may_exceed)
{
    lock(state);
    bool fits = has_space(state, gpu, instance, bytes, may_exceed);
    if (!fits) {
        drop_dead_rows(state);
        fits = has_space(state, gpu, instance, bytes, may_exceed);
    }
    struct row *row = fits ? own_row(state, gpu, instance) : NULL;
    if (row)
        row->memory += bytes;
    unlock(state);
    return row ? 0 : -1;
}

void sim_state_release(struct sim_state *state, int gpu, int instance, uint64_t bytes)
{
    lock(state);
    struct row *row = find_own_row(state, gpu, instance);
    if (row)
        row->memory -= bytes;
    unlock(state);
}

void sim_state_add_context(struct sim_state *state, int gpu, int instance, int change)
{
    lock(state);
    struct row *row = change > 0 ? own_row(state, gpu, instance) : find_own_row(state, gpu, instance);
    if (row)
        row->contexts += change;
    unlock(state);
}

void sim_state_drop_self(struct sim_state *state)
{
    pid_t self = getpid();
    lock(state);
    for (int i = 0; i < state->row_count; i++)
        if (state->rows[i].pid == self)
            clear(&state->rows[i]);
    unlock(state);
}

uint64_t sim_state_used(struct sim_state *state, int gpu, int instance)
{
    uint64_t sum = 0;
    for (int i = 0; state && i < state->row_count; i++) {
        struct row *row = &state->rows[i];
        if (row->pid != 0 && row_matches(row, gpu, instance) && is_alive(row))
            sum += row->memory;
    }
    return sum;
}

struct sim_memory_figures sim_state_memory(struct sim_state *state, int gpu, int instance)
{
    bool is_instance = instance != SIM_WHOLE_GPU;
    struct sim_memory_figures memory = {.total = sim_memory_size(gpu, instance)};
    memory.used = sim_state_used(state, gpu, is_instance ? instance : SIM_ANY_INSTANCE);
    if (memory.used > memory.total)
        memory.used = memory.total;
    memory.free = memory.total - memory.used;
    return memory;
}

int sim_state_processes(struct sim_state *state, int gpu, int instance, struct sim_usage *rows, int capacity)
{
    int count = 0;
    for (int i = 0; state && i < state->row_count; i++) {
        struct row *row = &state->rows[i];
        pid_t pid = row->pid;
        if (pid == 0 || !row_matches(row, gpu, instance) || (row->contexts == 0 && row->memory == 0) || !is_alive(row))
            continue;
        if (count < capacity)
            rows[count] = (struct sim_usage){pid, row->gpu, row->instance, row->contexts, row->memory};
        count++;
    }
    return count;
}
