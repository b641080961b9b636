/* libcuda.so.1: charging of memory. Pinned memory is charged to the host, other memory to its device. */
#include "driver.h"

bool charge(enum sim_memory_type type, int device, uint64_t bytes)
{
    if (type == SIM_PINNED_MEMORY)
        return sim_state_charge(driver_state, SIM_HOST, SIM_WHOLE_GPU, bytes, false) == 0;
    const struct sim_device *charged = &devices[device];
    bool is_done = sim_state_charge(driver_state, charged->gpu, charged->instance, bytes, is_beyond_memory(device)) == 0;
    if (!is_done && goes_beyond_memory(device, bytes))
        is_done = sim_state_charge(driver_state, charged->gpu, charged->instance, bytes, true) == 0;
    if (is_done)
        note_growth(type);
    return is_done;
}

void release(enum sim_memory_type type, int device, uint64_t bytes)
{
    if (type == SIM_PINNED_MEMORY)
        sim_state_release(driver_state, SIM_HOST, SIM_WHOLE_GPU, bytes);
    else
        sim_state_release(driver_state, devices[device].gpu, devices[device].instance, bytes);
}
