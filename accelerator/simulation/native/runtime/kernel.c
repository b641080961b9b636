/* The CUDA runtime: kernels compiled into the program. Only three of them run.
 *
 * On a machine that computes, kernel overrides in Python do the work of torch's ops. A launch that arrives here would
 * leave memory uncomputed, so it fails and prints the name of the kernel. Other machines launch kernels that do nothing.
 *
 * Loading a library calls the registration functions tens of thousands of times; they must initialize nothing. */
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/arrays.h"

struct dim3 {
    unsigned x, y, z;
};

/* Libraries register their kernels in any thread. Guards all tables of this file. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void reset_kernel_lock(void)
{
    pthread_mutex_init(&lock, NULL);
}

/* The kernels that run: torch.cuda._sleep launches one that spins for a number of clock cycles (WORK_KERNEL), others check
 * for NaN and stop a stream. Their instances, by the addresses of their host functions. */
enum { MAX_SIMULATED_KERNELS = 64, MAX_THREADS_PER_BLOCK = 1024 };
struct simulated_kernel {
    const void *function;
    enum work_type type;
    const struct float_type *checked; /* of a check for NaN */
};
static struct simulated_kernel simulated_kernels[MAX_SIMULATED_KERNELS];
static int simulated_kernel_count;

static const struct simulated_kernel *find_simulated_kernel(const void *function)
{
    const struct simulated_kernel *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < simulated_kernel_count && !found; i++)
        if (simulated_kernels[i].function == function)
            found = &simulated_kernels[i];
    pthread_mutex_unlock(&lock);
    return found;
}

/* void at::cuda::(anonymous namespace)::spin_kernel(long); the compiler names the namespace after the file and its hash. */
static bool is_spin_kernel(const char *name)
{
    static const char start[] = "_ZN2at4cuda", file[] = "_Sleep_cu_", end[] = "11spin_kernelEl";
    size_t length = strlen(name);
    return length >= sizeof end && strncmp(name, start, sizeof start - 1) == 0 && strstr(name, file) &&
           strcmp(name + length - (sizeof end - 1), end) == 0;
}

static bool computes(void)
{
    static int is_set = -1;
    if (is_set < 0) {
        const char *value = getenv("ACCELERATOR_SIM_COMPUTE");
        is_set = value && strcmp(value, "1") == 0;
    }
    return is_set;
}

/* Reads which kernel this is from its mangled name. Returns false for kernels that do not run. */
static bool recognize(const char *name, struct simulated_kernel *kernel)
{
    kernel->checked = nan_check_type(name);
    kernel->type = WORK_KERNEL;
    if (kernel->checked)
        kernel->type = WORK_NAN_CHECK;
    else if (strcmp(name, "_ZN4c10d4cuda6detail14kernel_barrierEPim") == 0)
        kernel->type = WORK_BARRIER;
    return kernel->type != WORK_KERNEL || is_spin_kernel(name);
}

static struct work work_of(const struct simulated_kernel *kernel, void **arguments)
{
    struct work work = {.type = WORK_KERNEL};
    if (!kernel)
        return work;
    if (kernel->type == WORK_KERNEL) {
        work.kernel.duration = *(const int64_t *)arguments[0] > 0 ? *(const int64_t *)arguments[0] : 0;
    } else if (kernel->type == WORK_BARRIER) {
        work.type = WORK_BARRIER;
        work.barrier.value = *(_Atomic int32_t *const *)arguments[0];
        work.barrier.timeout_ms = *(const uint64_t *)arguments[1];
    } else if (computes()) { /* without computation, the memory does not hold what the program sends */
        work.type = WORK_NAN_CHECK;
        work.nan_check.type = kernel->checked;
        work.nan_check.data = *(const char *const *)arguments[0];
        work.nan_check.count = *(const size_t *)arguments[1];
    }
    return work;
}

/* The names of all kernels, for the message about one that does not run. The texts belong to the program. */
static struct {
    const void *function;
    const char *name;
} *kernels;
static size_t kernel_count, kernel_capacity;

static void record_name(const void *function, const char *name)
{
    if (!array_reserve((void **)&kernels, &kernel_capacity, kernel_count + 1, sizeof *kernels))
        return; /* the kernel fails without a message */
    kernels[kernel_count].function = function;
    kernels[kernel_count++].name = name;
}

/* Whether torch has loaded the plug-in with the kernel overrides, and the plug-in's problem with them, or NULL. */
static bool is_plugin_loaded;
static char *missing;

EXPORT void accelerator_simulation_plugin_loaded(const char *problem)
{
    pthread_mutex_lock(&lock);
    is_plugin_loaded = true;
    free(missing);
    missing = problem ? strdup(problem) : NULL;
    pthread_mutex_unlock(&lock);
}

/* Prints once why torch did not load the plug-in, if this program uses torch from Python. */
static void explain_missing_plugin(void)
{
    static bool is_explained;
    if (is_plugin_loaded || is_explained || !dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD))
        return;
    is_explained = true;
    const char *autoload = getenv("TORCH_DEVICE_BACKEND_AUTOLOAD"), *path = getenv("PYTHONPATH");
    fprintf(stderr, "torch did not load the plug-in with the simulated kernels: ");
    if (autoload && strcmp(autoload, "1") != 0)
        fprintf(stderr, "TORCH_DEVICE_BACKEND_AUTOLOAD is '%s'\n", autoload);
    else if (!path || !strstr(path, "/simulation/_plugin"))
        fprintf(stderr, "PYTHONPATH lacks the plug-in's folder\n");
    else
        fprintf(stderr, "this Python does not search PYTHONPATH, as with -I or -E\n");
}

static cudaError_t refuse(const void *function)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < kernel_count; i++)
        if (kernels[i].function == function && kernels[i].name) {
            const char *name = kernels[i].name;
            kernels[i].name = NULL; /* each kernel is reported once */
            void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
            char *(*demangle)(const char *, char *, size_t *, int *) =
                (char *(*)(const char *, char *, size_t *, int *))(library ? dlsym(library, "__cxa_demangle") : NULL);
            int status = -1;
            char *readable = demangle ? demangle(name, NULL, NULL, &status) : NULL;
            fprintf(stderr, "kernel %s is not simulated%s%s\n", status == 0 ? readable : name, missing ? ": " : "",
                    missing ? missing : "");
            free(readable);
            explain_missing_plugin();
            break;
        }
    pthread_mutex_unlock(&lock);
    return ERROR_NOT_SUPPORTED;
}

/* The ids of computations whose graphs were destroyed, until the kernel overrides collect them. */
static uint64_t *released;
static size_t released_count, released_capacity;

void computation_released(uint64_t id)
{
    pthread_mutex_lock(&lock);
    if (array_reserve((void **)&released, &released_capacity, released_count + 1, sizeof *released))
        released[released_count++] = id;
    pthread_mutex_unlock(&lock);
}

EXPORT size_t accelerator_simulation_released(uint64_t *ids, size_t capacity)
{
    pthread_mutex_lock(&lock);
    size_t count = released_count < capacity ? released_count : capacity;
    for (size_t i = 0; i < count; i++)
        ids[i] = released[--released_count];
    pthread_mutex_unlock(&lock);
    return count;
}

/* Submits a computation to a stream that captures. */
EXPORT cudaError_t accelerator_simulation_compute(void *handle, bool (*compute)(uint64_t id), uint64_t id)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    struct stream *stream = find_stream(handle, device);
    if (!stream || !compute)
        return fail(stream ? ERROR_INVALID_VALUE : ERROR_INVALID_HANDLE);
    return finish(submit(stream, &(struct work){.type = WORK_COMPUTATION, .computation = {compute, id}}));
}

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *any_binary;
    (void)binary;
    return &any_binary;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

EXPORT char __cudaInitModule(void **handle)
{
    (void)handle;
    return 1;
}

EXPORT void __cudaRegisterFunction(void **handle, const void *function, char *device_function, const char *name,
                                   int thread_limit, void *thread, void *block, void *block_size, void *grid_size,
                                   int *warp_size)
{
    (void)handle, (void)device_function, (void)thread_limit, (void)thread, (void)block, (void)block_size,
        (void)grid_size, (void)warp_size;
    struct simulated_kernel kernel = {.function = function};
    bool runs = recognize(name, &kernel);
    pthread_mutex_lock(&lock);
    if (runs && simulated_kernel_count < MAX_SIMULATED_KERNELS)
        simulated_kernels[simulated_kernel_count++] = kernel;
    else if (computes())
        record_name(function, name);
    pthread_mutex_unlock(&lock);
}

static _Thread_local struct {
    struct dim3 grid, block;
    size_t shared_memory;
    void *stream;
} configurations[8];
static _Thread_local unsigned configuration_count;

EXPORT unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared_memory, void *stream)
{
    if (configuration_count == sizeof configurations / sizeof *configurations)
        return 1;
    configurations[configuration_count].grid = grid;
    configurations[configuration_count].block = block;
    configurations[configuration_count].shared_memory = shared_memory;
    configurations[configuration_count++].stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared_memory, void *stream)
{
    if (configuration_count == 0)
        return fail(ERROR_MISSING_CONFIGURATION);
    *grid = configurations[--configuration_count].grid;
    *block = configurations[configuration_count].block;
    *shared_memory = configurations[configuration_count].shared_memory;
    *(void **)stream = configurations[configuration_count].stream;
    return SUCCESS;
}

static cudaError_t launch(const void *function, struct dim3 grid, struct dim3 block, void **arguments, void *handle,
                          const struct sim_device *device)
{
    struct stream *stream = find_stream(handle, device);
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!stream || stream->device != device->ordinal)
        return ERROR_INVALID_HANDLE;
    if (!function)
        return ERROR_INVALID_DEVICE_FUNCTION;
    if (threads == 0 || threads > MAX_THREADS_PER_BLOCK || grid.x == 0 || grid.y == 0 || grid.z == 0)
        return ERROR_INVALID_CONFIGURATION;
    const struct simulated_kernel *kernel = find_simulated_kernel(function);
    if (!kernel && computes())
        return refuse(function);
    const struct work work = work_of(kernel, arguments);
    return submit(stream, &work);
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                    size_t shared_memory, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    (void)shared_memory;
    return finish(launch(function, grid, block, arguments, stream, device));
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block,
                                               void **arguments, size_t shared_memory, void *stream)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaLaunchKernel(function, grid, block, arguments, shared_memory, stream);
}

/* Code compiled for CUDA 13 fetches a kernel once and launches it. Here a kernel is its host function. */
EXPORT cudaError_t __cudaGetKernel(const void **kernel, const void *function)
{
    *kernel = function;
    return SUCCESS;
}

EXPORT cudaError_t __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
                                      size_t shared_memory, void *stream)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_memory, stream);
}

struct launch_configuration {
    struct dim3 grid, block;
    size_t shared_memory;
    void *stream;
    void *attributes;
    unsigned attribute_count;
};

EXPORT cudaError_t cudaLaunchKernelExC(const struct launch_configuration *configuration, const void *function,
                                       void **arguments)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!configuration)
        return fail(ERROR_INVALID_VALUE);
    return cudaLaunchKernel(function, configuration->grid, configuration->block, arguments,
                            configuration->shared_memory, configuration->stream);
}

struct function_attributes {
    size_t shared_memory, constant_memory, local_memory;
    int threads_per_block;
    int registers;
    int ptx_version, binary_version;
    int caches_globals;
    int dynamic_shared_memory;
    int reserved[24];
};
_Static_assert(sizeof(struct function_attributes) == 144, "as in CUDA's ABI");

EXPORT cudaError_t cudaFuncGetAttributes(struct function_attributes *attributes, const void *function)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!attributes || !function)
        return fail(attributes ? ERROR_INVALID_DEVICE_FUNCTION : ERROR_INVALID_VALUE);
    int version = device->major * 10 + device->minor;
    *attributes = (struct function_attributes){
        .threads_per_block = MAX_THREADS_PER_BLOCK,
        .registers = 32,
        .ptx_version = version,
        .binary_version = version,
        .dynamic_shared_memory = 49152,
    };
    return SUCCESS;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)attribute, (void)value;
    return finish(function ? SUCCESS : ERROR_INVALID_DEVICE_FUNCTION);
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)ordinal;
    return cudaFuncSetAttribute(kernel, attribute, value);
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int block_size, size_t shared_memory,
                                                                          unsigned flags)
{
    enum { THREADS_PER_PROCESSOR = 2048 };
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)shared_memory, (void)flags;
    if (!blocks || !function || block_size <= 0)
        return fail(ERROR_INVALID_VALUE);
    *blocks = THREADS_PER_PROCESSOR / block_size;
    return SUCCESS;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                                 size_t shared_memory)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_memory, 0);
}
