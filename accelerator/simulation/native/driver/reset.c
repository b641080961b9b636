/* libcuda.so.1: ends the primary context of a device, whoever uses it, with its memory and limits. */
#include "driver.h"
#include "api.h"

SIM_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    RETURN_IF_ERROR(wait_for_pending_on_device(device));
    free_blocks_of(device);
    end_context(device);
    return SUCCESS;
}
