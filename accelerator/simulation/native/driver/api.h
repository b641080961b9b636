/* The entry points in the table for the runtime. */
#ifndef ACCELERATOR_SIM_DRIVER_API_H
#define ACCELERATOR_SIM_DRIVER_API_H

#include "driver.h"

#define DECLARE_FUNCTION(name, exported, parameters) CUresult exported parameters;
SIM_DRIVER_FUNCTIONS(DECLARE_FUNCTION)
#undef DECLARE_FUNCTION

#endif
