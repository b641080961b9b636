/* The layout of the state, which processes share: for state.c and accounts.c. */
#ifndef ACCELERATOR_SIM_STATE_LAYOUT_H
#define ACCELERATOR_SIM_STATE_LAYOUT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "config.h"

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

#endif
