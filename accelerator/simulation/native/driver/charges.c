/* libcuda.so.1: charging of memory. Pinned memory is charged to the host, other memory to its device. */
#include "driver.h"

bool charge(enum sim_memory_type type, int device, uint64_t bytes)
{
    if (type == SIM_PINNED_MEMORY)
        return sim_state_charge(driver_state, SIM_HOST, SIM_WHOLE_GPU, bytes) == 0;
    return sim_state_charge(driver_state, devices[device].gpu, devices[device].instance, bytes) == 0;
}

void release(enum sim_memory_type type, int device, uint64_t bytes)
{
    if (type == SIM_PINNED_MEMORY)
        sim_state_release(driver_state, SIM_HOST, SIM_WHOLE_GPU, bytes);
    else
        sim_state_release(driver_state, devices[device].gpu, devices[device].instance, bytes);
}
