/* The CUDA runtime: the functions that the driver calls. */
#include "images.h"

cudaError_t cudaStreamCreateWithPriority(struct stream **handle, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(void *handle);
cudaError_t cudaStreamQuery(void *handle);
cudaError_t cudaStreamSynchronize(void *handle);
cudaError_t cudaStreamIsCapturing(void *handle, int *status);

static int create_stream(void **handle, unsigned flags, int priority)
{
    return cudaStreamCreateWithPriority((struct stream **)handle, flags, priority);
}

static const struct sim_runtime table = {
    .create_stream = create_stream,
    .destroy_stream = cudaStreamDestroy,
    .query_stream = cudaStreamQuery,
    .synchronize_stream = cudaStreamSynchronize,
    .is_capturing = cudaStreamIsCapturing,
    .wait_for_pending_on_device = wait_for_pending_on_device,
    .wait_for_pending_on_stream = wait_for_pending_on_stream,
    .free_to_pool = pool_free,
    .load_module = load_module,
    .unload_module = unload_module,
    .is_module = is_module,
    .is_function = is_function,
    .check_ptx = check_ptx,
    .find_function = find_function,
    .find_global = find_global,
    .launch_function = launch_function,
    .function_attribute = function_attribute,
    .set_function_attribute = set_function_attribute,
    .function_occupancy = function_occupancy,
    .needs_checks = &accelerator_simulation_needs_checks,
};

/* For the driver, whose callers may use no function of the runtime. */
EXPORT const struct sim_runtime *accelerator_sim_runtime(void)
{
    return enter_slowly(__func__) == SUCCESS ? &table : NULL;
}

/* The initialization hands the table to the driver. */
__attribute__((constructor)) static void set_table(void)
{
    runtime_table = &table;
}
