/* libcuda.so.1: charges of memory to GPUs and to the host, and how far a rehearsed program may go beyond its GPU. Pinned
 * memory is charged to the host, other memory to its device.
 *
 * A rehearsed program that needs more than a GPU has goes on, so that it can be said how much it needs. The first refusal is
 * real: torch's allocator then frees what it has cached, and asks again. The second is not. */
#include "driver.h"
#include "api.h"

struct excess {
    _Atomic bool is_noted;
    uint64_t requested, free; /* by the allocation that did not fit, and for it */
};

static struct excess excesses[SIM_MAX_GPUS]; /* by device */
static _Thread_local struct {
    int device; /* of the last allocation if it was refused, plus one; else 0 */
    uint64_t bytes;
} refused;

/* How often this process has got device memory. Python compares it after each op. */
SIM_EXPORT _Atomic uint64_t accelerator_simulation_growths;

/* Called when the device has less memory left. */
static bool goes_beyond_memory(int device, uint64_t bytes)
{
    if (!sim_config()->is_rehearsed)
        return false;
    bool is_second = refused.device == device + 1 && refused.bytes == bytes;
    refused.device = is_second ? 0 : device + 1;
    refused.bytes = bytes;
    if (is_second) {
        struct excess *excess = &excesses[device];
        excess->requested = bytes;
        excess->free = sim_state_memory(driver_state, devices[device].gpu, devices[device].instance).free;
        excess->is_noted = true;
    }
    return is_second;
}

void end_of_allocation(void)
{
    refused.device = 0;
}

size_t largest_allocation(const struct sim_device *device)
{
    return sim_config()->is_rehearsed ? SIM_EXCESS * device->memory : device->memory;
}

bool charge(enum sim_memory_type type, int device, uint64_t bytes)
{
    if (type == SIM_PINNED_MEMORY)
        return sim_state_charge(driver_state, SIM_HOST, SIM_WHOLE_GPU, bytes, false) == 0;
    const struct sim_device *charged = &devices[device];
    bool is_done = sim_state_charge(driver_state, charged->gpu, charged->instance, bytes, excesses[device].is_noted) == 0;
    if (!is_done && !excesses[device].is_noted && goes_beyond_memory(device, bytes))
        is_done = sim_state_charge(driver_state, charged->gpu, charged->instance, bytes, true) == 0;
    if (is_done)
        accelerator_simulation_growths++;
    if (is_done && type != SIM_MAPPED_MEMORY) /* of which an allocation takes several pieces, and maps them at its end */
        end_of_allocation();
    return is_done;
}

void release(enum sim_memory_type type, int device, uint64_t bytes)
{
    if (type == SIM_PINNED_MEMORY)
        sim_state_release(driver_state, SIM_HOST, SIM_WHOLE_GPU, bytes);
    else
        sim_state_release(driver_state, devices[device].gpu, devices[device].instance, bytes);
}

/* Python asks whether a device's memory was exceeded, and by which allocation. */
SIM_EXPORT int accelerator_simulation_excess(int device, uint64_t *requested, uint64_t *free)
{
    if (device < 0 || device >= device_count || !excesses[device].is_noted)
        return 0;
    *requested = excesses[device].requested;
    *free = excesses[device].free;
    return 1;
}
