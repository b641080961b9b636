/* Memory in use and contexts of the simulated machine, by process and GPU.
 *
 * With ACCELERATOR_SIM_STATE the table is in that file, which every process of the machine maps. Otherwise it belongs to
 * one process; libcuda.so.1 holds it and NVML finds it there. Rows of ended processes do not count, because a real driver
 * also releases the memory of a process that ends in any way. */
#ifndef ACCELERATOR_SIM_STATE_H
#define ACCELERATOR_SIM_STATE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    SIM_ANY_INSTANCE = -2, /* the GPU together with all its MIG instances */
    SIM_EXCESS = 8, /* times the memory of a GPU is what a rehearsed program may have; docs/rehearsal.md says so, too */
};

struct fault_table;
struct sim_state;

struct sim_usage {
    pid_t pid;
    int gpu;
    int instance; /* SIM_WHOLE_GPU or the number of a MIG instance */
    int contexts;
    uint64_t memory;
};

/* ---- state.c ---- */

/* The file of the state, or NULL if there is none. */
const char *sim_state_path(void);

/* Opens or creates the state, in its file or in this library. Returns NULL, after a line on stderr, if its file cannot be used. */
struct sim_state *sim_state_open(void);

/* Opens the state of a machine that runs, for a process outside. Returns a problem, or NULL. */
const char *sim_state_attach(const char *path, struct sim_state **state);
void sim_state_detach(struct sim_state *state);

struct fault_table *sim_state_faults(struct sim_state *state);
int sim_state_gpu_count(const struct sim_state *state);

/* ---- accounts.c ---- */

/* The memory of programs on a GPU, an instance or the host. */
uint64_t sim_memory_size(int gpu, int instance);

/* Charges `bytes` to this process. Returns -1 when the GPU or instance has less than that left. A rehearsed program may have
 * SIM_EXCESS times the memory there is, so that what it needs can be told. */
int sim_state_charge(struct sim_state *state, int gpu, int instance, uint64_t bytes, bool may_exceed);
void sim_state_release(struct sim_state *state, int gpu, int instance, uint64_t bytes);
void sim_state_add_context(struct sim_state *state, int gpu, int instance, int change);

/* Clears the rows of this process id: when a process opens a state, because the file may hold rows of an older process
 * with the same id, and when it ends. */
void sim_state_drop_self(struct sim_state *state);

/* Bytes in use by all processes. A NULL state means that nothing is in use. */
uint64_t sim_state_used(struct sim_state *state, int gpu, int instance);

struct sim_memory_figures {
    uint64_t total, free, used;
};

/* The memory of programs, which all of them may use. The driver reports these figures; NVML adds the reserve. */
struct sim_memory_figures sim_state_memory(struct sim_state *state, int gpu, int instance);

/* Lists the processes with a context or memory there. Fills at most `capacity` rows and returns the number of processes. */
int sim_state_processes(struct sim_state *state, int gpu, int instance, struct sim_usage *rows, int capacity);

#endif
