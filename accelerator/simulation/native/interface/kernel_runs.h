/* What runtime/ and ptx/ share: translated kernels, and their launches. */
#ifndef ACCELERATOR_SIM_KERNEL_RUNS_H
#define ACCELERATOR_SIM_KERNEL_RUNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kernel; /* translated and compiled */

enum { SIM_RESERVED_SHARED = 1 << 10 }; /* bytes that CUDA takes of a block's shared memory, at its beginning */

/* A global or constant variable that a kernel uses. */
struct sim_kernel_variable {
    const char *name;
    uint64_t size;
};

/* Bytes of a variable's initial value that are bytes of another one's address. */
struct sim_relocation {
    uint64_t offset;
    uint32_t target; /* its number in the table */
    uint64_t addend;
    uint32_t shift, size;
};

/* A row of a program's table of variables, which ends with an empty one. */
struct sim_program_variable {
    const char *name;
    uint64_t size;
    const uint8_t *initial; /* the first bytes; the others are 0 */
    uint64_t initial_size;
    const struct sim_relocation *relocations;
    uint32_t relocation_count;
    bool is_constant, is_managed;
};

struct sim_kernel_facts {
    const uint32_t (*parameters)[2]; /* offset and size of each */
    uint32_t parameter_count, parameter_size;
    const struct sim_kernel_variable *variables;
    uint32_t variable_count;
    uint32_t shared_size; /* without what a launch adds */
    uint32_t local_size, constant_size;
    uint32_t thread_limit, required_block[3]; /* 0 if there are none */
    uint32_t ptx_version; /* the architecture of the PTX, as 80 for 8.0 */
    bool uses_clusters;
};

/* Memory that a kernel may access. */
struct sim_kernel_memory {
    uint64_t low, size;
    const char *kind; /* for reports: "device memory" */
    int device;       /* -1: the host's */
};

/* Accesses that are atomic, volatile or ordered race with none of these. */
enum sim_access_kind { SIM_READ, SIM_WRITE, SIM_ATOMIC_READ, SIM_ATOMIC_WRITE, SIM_ACCESS_KINDS };

/* Bytes that a kernel has accessed. */
struct sim_kernel_access {
    uint64_t low, size;
    uint32_t kind;
    bool is_part; /* only a part of them */
};

struct sim_kernel_accesses {
    struct sim_kernel_access *items; /* the caller frees them */
    size_t count;
};

struct sim_kernel_run {
    const struct kernel *kernel;
    uint32_t grid[3], block[3];
    uint32_t dynamic_shared;
    bool is_cooperative;
    bool fills_with_nan; /* shared memory */
    int device;
    const char *parameters;
    char *const *variables;
    uint64_t stack_limit, heap_limit; /* bytes of each thread, of the device */
    uint32_t cpu_count;
    uint64_t timeout_ms; /* in which no block ends */
    const char *timeout_setting; /* what sets it */
    /* Finds the memory at an address; returns false if there is none that kernels of the device may access. */
    bool (*find_memory)(int device, uint64_t address, struct sim_kernel_memory *memory);
    /* Finds the memory that holds an address or is nearest to it, accessible or not; returns false without any. */
    bool (*find_nearest)(uint64_t address, struct sim_kernel_memory *memory);
    struct sim_kernel_accesses *accesses; /* of global memory, which the run records; or NULL */
};

/* Runs a kernel. Returns 0, or CUDA's error with a sentence that says why. */
int sim_kernel_run(const struct sim_kernel_run *request, char *message, uint32_t message_size);

/* Connects a kernel that has been loaded, and describes it. Returns false if another version has translated it. */
bool sim_kernel_connect(const struct kernel *kernel, struct sim_kernel_facts *facts);

#endif
