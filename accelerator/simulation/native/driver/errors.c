/* libcuda.so.1: names and texts of errors. */
#include "driver.h"

SIM_EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
    const struct sim_error *error = sim_find_error(code);
    if (!name)
        return ERROR_INVALID_VALUE;
    *name = error ? error->driver_name : NULL;
    return error ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
    const struct sim_error *error = sim_find_error(code);
    if (!text)
        return ERROR_INVALID_VALUE;
    *text = error ? error->text : NULL;
    return error ? SUCCESS : ERROR_INVALID_VALUE;
}
