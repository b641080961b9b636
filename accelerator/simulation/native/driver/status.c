/* libcuda.so.1: whether the driver is initialized, and the state of the machine. */
#include "driver.h"

_Atomic int driver_status = ERROR_NOT_INITIALIZED;
struct sim_state *driver_state;

SIM_EXPORT struct sim_state *accelerator_sim_state(void)
{
    return driver_state;
}
