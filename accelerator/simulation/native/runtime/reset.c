/* The CUDA runtime: ends the primary context of a device for all threads. The next call makes a new one. */
#include "runtime.h"

EXPORT cudaError_t cudaDeviceReset(void)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(unsafe_call());
    const int ordinal = chosen_device();
    RETURN_IF_ERROR(finish(unless_broken(ordinal)));
    RETURN_IF_ERROR(finish(wait_for_device(&driver->devices[ordinal])));
    RETURN_IF_ERROR(finish(reset_context(ordinal)));
    reset_pool(ordinal);
    reset_peer_access(ordinal);
    return SUCCESS;
}

#if CUDART == 12
EXPORT cudaError_t cudaThreadExit(void)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaDeviceReset();
}
#endif
