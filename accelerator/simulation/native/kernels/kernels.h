/* The functions of the library that runs translated kernels. */
#ifndef ACCELERATOR_SIM_KERNELS_H
#define ACCELERATOR_SIM_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

struct kernel;

/* Memory that a kernel may access. */
struct sim_kernel_memory {
    uint64_t low, size;
    const char *kind; /* for reports: "device memory" */
    int device;       /* -1: the host's */
};

struct sim_kernel_run {
    const struct kernel *kernel;
    uint32_t grid[3], block[3];
    uint32_t dynamic_shared;
    bool is_cooperative;
    bool fills_with_nan;
    const char *parameters;
    char *const *variables;
    uint32_t cpu_count;
    uint64_t timeout_ms;
    /* Finds the memory at an address; returns false if there is none that kernels may access. */
    bool (*find_memory)(uint64_t address, struct sim_kernel_memory *memory);
    /* Finds the memory that ends before an address or begins after it, whatever is nearer; returns false without any. */
    bool (*find_nearest)(uint64_t address, struct sim_kernel_memory *memory);
};

/* Runs a kernel. Returns 0, or CUDA's error with a sentence that says why. */
int sim_kernel_run(const struct sim_kernel_run *request, char *message, uint32_t message_size);

/* Connects a kernel that has been loaded; returns why it cannot run, or NULL. */
const char *sim_kernel_connect(const struct kernel *kernel);

#endif
