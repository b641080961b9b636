/* The state of the simulated machine: its file, or its place in the driver. accounts.c reads and writes its rows. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "faults.h"
#include "file_limit.h"
#include "fork.h"
#include "state_layout.h"

static const char magic[8] = "ACCSIM\n";
enum { VERSION = 3 };

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
    const char *faults = getenv(SETTING_FAULTS);
    const char *problem = faults ? faults_add(&state->faults, faults, sim_config()->node, state->machine.gpu_count) : NULL;
    if (problem)
        fprintf(stderr, "accelerator: %s\n", problem);
    state->version = VERSION;
    state->size = sizeof *state;
    memcpy(state->magic, magic, sizeof magic);
}

/* Read once in a process: other threads must not read the environment while the program writes it. */
static char *own_path;
static pthread_once_t path_once = PTHREAD_ONCE_INIT;

static void read_path(void)
{
    const char *value = getenv(SETTING_STATE);
    own_path = value && *value ? strdup(value) : NULL;
}

const char *sim_state_path(void)
{
    pthread_once(&path_once, read_path);
    return own_path;
}

/* NVML opens the state in forked children too, and a process may fork one for a test, with a state of its own. What has used the
 * parent's still may. */
static void forget_file(void)
{
    pthread_mutex_init(&opening, NULL);
    if (opened != &own_state)
        opened = NULL;
    path_once = (pthread_once_t)PTHREAD_ONCE_INIT;
}
IN_FORKED_CHILD(forget_file)

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

static const char *map_file(struct sim_state **state)
{
    /* O_NONBLOCK: opening a FIFO must not wait for its other end. */
    int file = open(sim_state_path(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (file < 0)
        return errno == ELOOP ? "it is a symbolic link" : strerror(errno);
    int error;
    do
        error = flock(file, LOCK_EX) == 0 ? 0 : errno;
    while (error == EINTR);
    const char *problem = error ? strerror(error) : map_locked(file, state);
    flock(file, LOCK_UN);
    close(file);
    return problem;
}

struct sim_state *sim_state_open(void)
{
    static bool is_reported;
    const char *problem = NULL;
    pthread_mutex_lock(&opening);
    if (!opened && sim_state_path()) {
        struct sim_state *state;
        problem = map_file(&state);
        if (!problem)
            opened = state;
        else if (!is_reported)
            fprintf(stderr, "accelerator: the state of the simulated machine cannot be kept in %s: %s\n", sim_state_path(), problem);
        is_reported = problem != NULL;
    } else if (!opened) {
        prepare(&own_state);
        opened = &own_state;
    }
    pthread_mutex_unlock(&opening);
    return opened;
}

const char *sim_state_attach(const char *path, struct sim_state **state)
{
    const char *problem = NULL;
    int file = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat status;
    if (file < 0)
        return strerror(errno);
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != sizeof **state)
        problem = "it is not the state of a machine, or another version's";
    else if ((*state = mmap(NULL, sizeof **state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED)
        problem = strerror(errno);
    else if (memcmp((*state)->magic, magic, sizeof magic) != 0 || (*state)->version != VERSION || (*state)->size != sizeof **state) {
        problem = "it is not the state of a machine, or another version's";
        munmap(*state, sizeof **state);
    }
    close(file);
    return problem;
}

void sim_state_detach(struct sim_state *state)
{
    munmap(state, sizeof *state);
}

int sim_state_gpu_count(const struct sim_state *state)
{
    return state->machine.gpu_count;
}

struct fault_table *sim_state_faults(struct sim_state *state)
{
    return &state->faults;
}
