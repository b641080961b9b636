/* What the files of the runtime share that run kernels from their PTX. */
#ifndef ACCELERATOR_SIM_IMAGES_H
#define ACCELERATOR_SIM_IMAGES_H

#include <pthread.h>

#include "interface/kernel_runs.h"
#include "runtime.h"

/* What a user can do about a kernel that cannot run. */
#define REMEDY "give its op a CPU kernel (torch.library), or use --no-compute, where kernels do nothing"

/* images.c */
enum compression { PART_PLAIN, PART_LZ4, PART_ZSTD }; /* as in _ptx/images.py */

/* The PTX of a module. */
struct part {
    const char *data;
    uint64_t size, text_size;
    uint32_t compression;
};

/* A kernel of a program. */
struct ptx_kernel {
    struct ptx_kernel *next;
    struct program *program;
    char *name, *readable; /* the second one without mangling, once it is needed */
    pthread_mutex_t lock; /* held while it is translated */
    bool is_tried;                  /* with a result that stays */
    bool is_reported;               /* that it cannot run */
    atomic_bool is_launch_reported; /* that a launch was wrong */
    char *problem;                  /* why it cannot run, or NULL */
    void *library; /* that contains its code */
    const struct kernel *code;
    struct sim_kernel_facts facts;
    _Atomic int dynamic_limit;                     /* that the program has set, or 0 */
    _Atomic(char **) variables[SIM_MAX_GPUS];     /* addresses, in the order of the kernel's table */
    unsigned resets[SIM_MAX_GPUS];                /* of the device before it got these variables */
};

/* What an image is for GPUs of one architecture: its PTX, linked. */
struct program {
    struct program *next;
    struct image *image;
    int architecture; /* 90 for 9.0 */
    struct part *parts;
    size_t part_count;
    struct part machine_code; /* beside the PTX; its data may be NULL */
    char *problem; /* why it has no parts; "" if nothing is known of it */
    bool is_damaged, is_code; /* it has machine code */
    uint64_t key[2];
    pthread_mutex_t lock; /* guards what follows */
    struct ptx_kernel *kernels;
    bool has_table;
    char *table_problem;
    void *table_library;
    const struct sim_program_variable *table;
    char **addresses[SIM_MAX_GPUS]; /* of the table's variables */
    unsigned resets[SIM_MAX_GPUS];  /* of the device before it got these */
    void (*free_kernels)(struct program *program); /* and variables; NULL before there are any */
};

struct image {
    const void *data;
    const void *const *prelinked; /* fat binaries of which it was linked, or NULL */
    bool is_gone;                 /* its library was unloaded */
    void *copy;                   /* of a module: the program may free what it has loaded */
    _Atomic int references;       /* of the program or module, of launches under way and of graphs */
    struct program *programs;
};

struct image *new_image(const void *data); /* NULL without memory */
/* Copies the image, of which there are at most `limit` bytes. */
cudaError_t own_image(struct image *image, size_t limit);
void image_retain(struct image *image);
void image_release(struct image *image); /* frees the kernels and variables with the last reference */
bool has_kernel(const struct part *part, const char *name); /* of a part that is not compressed */
struct program *find_program(struct image *image, const struct sim_device *device);
void add_to_key(uint64_t key[2], const void *data, size_t size);

/* ptx_cache.c. Returns a loaded library: of one kernel, or of the program's variables if the name is empty. If that is
 * impossible, returns NULL and says why, and whether it stays so: another call may have the file or memory that this one lacks. */
void *load_translation(const struct program *program, const char *kernel, char **problem, bool *is_final);

/* ptx_kernels.c */
struct ptx_kernel *find_ptx_kernel(struct image *image, const char *name, const struct sim_device *device); /* NULL without memory */
cudaError_t translate(struct ptx_kernel *kernel); /* ERROR_NOT_SUPPORTED with a problem */
/* Finds a variable of an image on a device, and allocates it. Returns ERROR_NOT_FOUND if the PTX has none of this name, and
 * ERROR_NOT_SUPPORTED if there is no PTX that says so. */
cudaError_t find_variable(struct image *image, const char *name, const struct sim_device *device, void **address, size_t *size);

cudaError_t launch_ptx_kernel(struct stream *stream, struct ptx_kernel *kernel, const struct sim_launch *shape,
                              void **arguments);
/* Says once of a kernel how a launch was configured that fails: CUDA's error names neither. */
void report_launch(struct ptx_kernel *kernel, const struct sim_launch *shape, cudaError_t error);
size_t largest_shared_memory(const struct sim_device *device); /* of a block, if its kernel asks for it */
int resident_blocks(const struct sim_device *device, const struct ptx_kernel *kernel, uint64_t threads, size_t dynamic_shared);

/* ptx_kernels.c: attributes as the driver numbers them, of a kernel that runs; NULL for one that does not */
cudaError_t read_attribute(const struct ptx_kernel *kernel, const struct sim_device *device, int attribute, int *value);
cudaError_t set_attribute(struct ptx_kernel *kernel, const struct sim_device *device, int attribute, int value);

/* registration.c. Finds the image of a kernel by its host function, or NULL. The caller releases it. */
struct image *retain_kernel_image(const void *function, const char **name);

/* functions.c. Finds a kernel of the program, or NULL. The caller releases its image. */
struct ptx_kernel *find_registered(const void *function, const struct sim_device *device);

/* ptx_check.c. Returns what CUDA's compiler would of a text, and writes why it is wrong into the log. */
cudaError_t check_ptx(const char *text, size_t size, char *log, size_t log_size);

/* machine_code.c. Reads what ptxas has counted of a kernel; leaves the resources as they are if the code does not say it. */
struct resources {
    int registers, local_size;
};
void read_resources(const struct part *machine_code, const char *kernel, struct resources *resources);

#endif
