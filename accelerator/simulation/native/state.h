/* Memory in use and contexts of the simulated machine, by process and GPU.
 *
 * With ACCELERATOR_SIM_STATE the table lives in that file and every process of the machine maps it; otherwise it belongs
 * to one process, in libcuda.so.1, where NVML finds it. Rows of processes that are gone do not count: as with a real
 * driver, memory comes back when its process ends, however it ends. */
#ifndef ACCELERATOR_SIM_STATE_H
#define ACCELERATOR_SIM_STATE_H

#include <stdint.h>
#include <sys/types.h>

enum {
    SIM_ANY_INSTANCE = -2, /* the GPU together with all its MIG instances */
};

struct sim_state;

struct sim_usage {
    pid_t pid;
    int gpu;
    int instance; /* SIM_WHOLE_GPU or the number of a MIG instance */
    int contexts;
    uint64_t memory;
};

/* For the driver: the state, opened or created; NULL, and a line on stderr, if its file cannot be used. */
struct sim_state *sim_state_open(void);

/* For NVML: the state if there is one to look at, else NULL. Never loads the driver. */
struct sim_state *sim_state_find(void);

/* Charges `bytes` to this process. Returns -1 when the GPU or instance has less than that left. */
int sim_state_charge(struct sim_state *state, int gpu, int instance, uint64_t bytes);
void sim_state_release(struct sim_state *state, int gpu, int instance, uint64_t bytes);
void sim_state_add_context(struct sim_state *state, int gpu, int instance, int change);

/* Drops what is recorded for this process: at its first use of a state, whose file may know an older process of the same
 * number, and at its end. */
void sim_state_drop_self(struct sim_state *state);

/* Bytes in use by all processes. A NULL state means that nothing is in use. */
uint64_t sim_state_used(struct sim_state *state, int gpu, int instance);

struct sim_memory_figures {
    uint64_t total, reserved, free, used;
};

/* The same for whoever asks, driver or NVML. A GPU's driver keeps some memory for itself: the lesser of 512 MiB and a
 * sixteenth. Nothing keeps a program from using all the memory of a simulated GPU, so the reserve gives way when there
 * is no room for it. */
struct sim_memory_figures sim_state_memory(struct sim_state *state, int gpu, int instance);

/* The processes with a context or memory there: fills at most `capacity` rows and returns how many there are. */
int sim_state_processes(struct sim_state *state, int gpu, int instance, struct sim_usage *rows, int capacity);

#endif
