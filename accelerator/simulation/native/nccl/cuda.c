/* NCCL: calls to the simulated CUDA runtime.
 *
 * This library does not link a runtime: both major versions are preloaded, and only the one that the program uses knows its
 * streams. */
#include "nccl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/same_build.h"

struct runtime {
    int major;
    int (*cudaGetDevice)(int *device);
    int (*cudaSetDevice)(int device);
    int (*cudaMalloc)(void **address, size_t size);
    int (*cudaFree)(void *address);
    const struct sim_pending *pending;
    int (*cudaUserObjectCreate)(void **object, void *argument, void (*destroy)(void *), unsigned references, unsigned flags);
    int (*cudaUserObjectRelease)(void *object, unsigned count);
    int (*cudaGraphRetainUserObject)(void *graph, void *object, unsigned count, unsigned flags);
    const char *(*cudaGetErrorString)(int error);
    union {
        int (*of_12)(void *stream, int *status, unsigned long long *id, void **graph, void ***nodes, size_t *count);
        int (*of_13)(void *stream, int *status, unsigned long long *id, void **graph, void ***nodes, void **edges,
                     size_t *count);
    } capture_info;
};

static struct runtime runtime;
static const char *problem; /* or NULL */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *find(const char *name, const char *node)
{
    void *function = dlvsym(RTLD_DEFAULT, name, node);
    if (!function)
        problem = "the simulated CUDA runtime is not in this process";
    return function;
}

static bool is_used(const char *node)
{
    bool (*used)(void);
    *(void **)&used = dlvsym(RTLD_DEFAULT, "accelerator_sim_runtime_is_used", node);
    return used && used();
}

static void load_runtime(void)
{
    /* A program that has not used CUDA yet is assumed to use the newer runtime. */
    bool is_12 = is_used("libcudart.so.12") && !is_used("libcudart.so.13");
    const char *node = is_12 ? "libcudart.so.12" : "libcudart.so.13";
    runtime.major = is_12 ? 12 : 13;
#define FIND(NAME) *(void **)&runtime.NAME = find(#NAME, node)
    FIND(cudaGetDevice);
    FIND(cudaSetDevice);
    FIND(cudaMalloc);
    FIND(cudaFree);
    FIND(cudaUserObjectCreate);
    FIND(cudaUserObjectRelease);
    FIND(cudaGraphRetainUserObject);
    FIND(cudaGetErrorString);
#undef FIND
    if (is_12)
        *(void **)&runtime.capture_info = find("cudaStreamGetCaptureInfo_v2", node);
    else
        *(void **)&runtime.capture_info = find("cudaStreamGetCaptureInfo", node);
    const struct sim_pending *(*pending)(void);
    *(void **)&pending = find(SIM_PENDING_SYMBOL, node);
    const char *other_build = pending ? find_other_build(find("accelerator_simulation_boundary", node), (void *)pending) : NULL;
    if (other_build)
        problem = strdup(other_build);
    else
        runtime.pending = pending ? pending() : NULL;
}

static ncclResult_t need_runtime(void)
{
    pthread_once(&once, load_runtime);
    return problem ? fail(ncclSystemError, "%s", problem) : ncclSuccess;
}

static ncclResult_t check(int error, const char *function)
{
    if (error == 0)
        return ncclSuccess;
    return fail(ncclUnhandledCudaError, "%s: %s", function, runtime.cudaGetErrorString(error));
}

/* Never NULL while there is a communicator. */
const struct sim_pending *pending_runtime(void)
{
    return runtime.pending;
}

void format_uuid(const struct gpu_identity *gpu, char text[UUID_TEXT_SIZE])
{
    int length = snprintf(text, UUID_TEXT_SIZE, "%s", gpu->is_instance ? "MIG" : "GPU");
    for (int i = 0; i < UUID_SIZE; i++)
        length += snprintf(text + length, (size_t)(UUID_TEXT_SIZE - length), "%s%02x",
                           i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", gpu->uuid[i]);
}

ncclResult_t current_device(int *device, struct gpu_identity *gpu)
{
    RETURN_IF_ERROR(need_runtime());
    ncclResult_t result = check(runtime.cudaGetDevice(device), "cudaGetDevice");
    if (result != ncclSuccess)
        return result;
    int (*of_gpu)(unsigned char *, int) = NULL, (*of_instance)(unsigned char *, int) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD); /* the runtime has loaded it */
    if (driver) {
        *(void **)&of_gpu = dlsym(driver, "cuDeviceGetUuid");
        *(void **)&of_instance = dlsym(driver, "cuDeviceGetUuid_v2");
        dlclose(driver);
    }
    unsigned char uuid[UUID_SIZE];
    *gpu = (struct gpu_identity){0};
    if (!of_gpu || !of_instance || of_gpu(uuid, *device) != 0 || of_instance(gpu->uuid, *device) != 0)
        return fail(ncclUnhandledCudaError, "the driver does not report the UUID of device %d", *device);
    gpu->is_instance = memcmp(gpu->uuid, uuid, UUID_SIZE) != 0;
    /* Processes without a state are on one machine. */
    const char *state = getenv(SETTING_STATE);
    struct stat status;
    if (state && *state && stat(state, &status) == 0) {
        gpu->state_device = status.st_dev;
        gpu->state_inode = status.st_ino;
    }
    return ncclSuccess;
}

ncclResult_t use_device(int device)
{
    RETURN_IF_ERROR(need_runtime());
    return check(runtime.cudaSetDevice(device), "cudaSetDevice");
}

ncclResult_t get_capture_info(void *stream, struct capture_info *info)
{
    enum { CAPTURING = 1, INVALIDATED = 2 };
    int status = 0;
    size_t count = 0;
    *info = (struct capture_info){0};
    if ((uintptr_t)stream <= 2)
        return ncclSuccess; /* the legacy stream cannot capture */
    RETURN_IF_ERROR(need_runtime());
    int error = runtime.major == 12 ? runtime.capture_info.of_12(stream, &status, &info->id, &info->graph, NULL, &count)
                                    : runtime.capture_info.of_13(stream, &status, &info->id, &info->graph, NULL, NULL, &count);
    if (error == 0 && status == INVALIDATED)
        return fail(ncclUnhandledCudaError, "the capture of the stream is not valid any more");
    if (status != CAPTURING)
        info->id = 0;
    return check(error, "cudaStreamGetCaptureInfo");
}

ncclResult_t capture_call(void *stream, int device, const struct capture_info *info, void (*function)(void *),
                          void (*release)(void *), void *argument)
{
    enum { NO_DESTRUCTOR_SYNC = 1, MOVE = 1 };
    void *object;
    /* From here on the graph owns the argument. */
    int error = runtime.cudaUserObjectCreate(&object, argument, release, 1, NO_DESTRUCTOR_SYNC);
    if (error != 0) {
        release(argument);
        return check(error, "cudaUserObjectCreate");
    }
    error = runtime.cudaGraphRetainUserObject(info->graph, object, 1, MOVE);
    if (error != 0) {
        runtime.cudaUserObjectRelease(object, 1);
        return check(error, "cudaGraphRetainUserObject");
    }
    return check(runtime.pending->capture(stream, device, function, argument), "capture");
}

ncclResult_t device_malloc(void **address, size_t size)
{
    RETURN_IF_ERROR(need_runtime());
    return check(runtime.cudaMalloc(address, size), "cudaMalloc");
}

ncclResult_t device_free(void *address)
{
    RETURN_IF_ERROR(need_runtime());
    return check(runtime.cudaFree(address), "cudaFree");
}
