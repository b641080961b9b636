#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "file_limit.h"
#include "process.h"

static const char magic[8] = "ACCSIM\n";
enum { VERSION = 1 };

/* A row is free while its pid is 0. Writers hold the lock; readers do not need it. */
struct row {
    _Atomic pid_t pid;
    _Atomic uint64_t image; /* identifies the program: exec starts another one, which holds no memory */
    _Atomic int gpu;
    _Atomic int instance;
    _Atomic int contexts;
    _Atomic uint64_t memory;
};

/* The part of the configuration that the rows depend on. All processes of a machine must agree on it. */
struct machine {
    int gpu_count;
    struct {
        uint64_t memory;
        int instances;
    } gpus[SIM_MAX_GPUS];
};

struct sim_state {
    char magic[8]; /* written last, when the state is ready */
    uint32_t version, size;
    struct machine machine;
    pthread_mutex_t lock;
    _Atomic int row_count; /* rows at or above it were never used */
    struct row rows[SIM_MAX_PROCESSES];
};

static struct sim_state own_state;
static struct sim_state *opened;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static struct machine this_machine(void)
{
    const struct sim_config *config = sim_config();
    struct machine machine;
    memset(&machine, 0, sizeof machine); /* also the padding, for memcmp */
    machine.gpu_count = config->gpu_count;
    for (int i = 0; i < config->gpu_count; i++) {
        machine.gpus[i].memory = config->gpus[i].memory;
        machine.gpus[i].instances = config->gpus[i].instances;
    }
    return machine;
}

static void prepare(struct sim_state *state)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    /* A process may be killed while it holds the lock. */
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    state->machine = this_machine();
    state->version = VERSION;
    state->size = sizeof *state;
    memcpy(state->magic, magic, sizeof magic);
}

static const char *state_path(void)
{
    const char *path = getenv(SETTING_STATE);
    return path && *path ? path : NULL;
}

/* Why the file cannot hold this machine's state, or NULL. */
static const char *find_problem(const struct sim_state *state)
{
    struct machine machine = this_machine();
    if (memcmp(state->magic, magic, sizeof magic) != 0)
        return "it is another program's file";
    if (state->version != VERSION || state->size != sizeof *state)
        return "it is from another version of accelerator";
    if (memcmp(&state->machine, &machine, sizeof machine) != 0)
        return "it belongs to a machine with other GPUs, MIG instances or memory sizes";
    return NULL;
}

/* A write to a page that a full file system has no space for would be a SIGBUS. */
static int reserve_file(int file, off_t size)
{
    int error;
    if (!is_within_file_limit((uint64_t)size))
        return EFBIG;
    do
        error = posix_fallocate(file, 0, size);
    while (error == EINTR);
    if (error != 0 && ftruncate(file, 0) != 0) /* may have grown */
        return errno;
    return error;
}

/* Maps a new state or one of the same machine, and changes no other file. The caller holds the file's lock. */
static const char *map_locked(int file, struct sim_state **state)
{
    struct stat status;
    if (fstat(file, &status) != 0)
        return strerror(errno);
    if (!S_ISREG(status.st_mode))
        return "it is not a regular file";
    bool is_new = status.st_size == 0;
    if (!is_new && status.st_size < (off_t)sizeof **state)
        return "it is another program's file";
    if (is_new) {
        int error = reserve_file(file, sizeof **state);
        if (error != 0)
            return file_error_text(error);
    }
    *state = mmap(NULL, sizeof **state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (*state == MAP_FAILED)
        return strerror(errno);
    /* A process may have been killed between reserve_file and prepare. */
    static const char no_magic[sizeof magic];
    if (is_new || (status.st_size == sizeof **state && memcmp((*state)->magic, no_magic, sizeof no_magic) == 0))
        prepare(*state);
    const char *problem = find_problem(*state);
    if (problem)
        munmap(*state, sizeof **state);
    return problem;
}

static const char *map_file(const char *path, struct sim_state **state)
{
    /* O_NONBLOCK: opening a FIFO must not wait for its other end. */
    int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (file < 0)
        return errno == ELOOP ? "it is a symbolic link" : strerror(errno);
    flock(file, LOCK_EX);
    const char *problem = map_locked(file, state);
    flock(file, LOCK_UN);
    close(file);
    return problem;
}

struct sim_state *sim_state_open(void)
{
    static bool is_reported;
    const char *problem = NULL;
    pthread_mutex_lock(&opening);
    if (!opened && state_path()) {
        struct sim_state *state;
        problem = map_file(state_path(), &state);
        if (!problem)
            opened = state;
        else if (!is_reported)
            fprintf(stderr, "accelerator: the state of the simulated machine cannot be kept in %s: %s\n", state_path(), problem);
        is_reported = problem != NULL;
    } else if (!opened) {
        prepare(&own_state);
        opened = &own_state;
    }
    pthread_mutex_unlock(&opening);
    return opened;
}

struct sim_state *sim_state_find(void)
{
    if (state_path())
        return sim_state_open();
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!driver)
        return NULL;
    struct sim_state *(*driver_state)(void);
    *(void **)&driver_state = dlsym(driver, "accelerator_sim_state");
    dlclose(driver);
    return driver_state ? driver_state() : NULL;
}

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

int sim_state_charge(struct sim_state *state, int gpu, int instance, uint64_t bytes)
{
    uint64_t capacity = sim_memory_size(gpu, instance);
    lock(state);
    uint64_t used = recorded(state, gpu, instance);
    if (bytes > capacity - used) {
        drop_dead_rows(state);
        used = recorded(state, gpu, instance);
    }
    struct row *row = bytes <= capacity - used ? own_row(state, gpu, instance) : NULL;
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
