/* libcuda.so.1: names and texts of errors. */
#include "driver.h"

/* A program that asks what the error of a launch means has read it: this interface has no call like cudaGetLastError(). */
static void note_read_error(CUresult code)
{
    if (code == ERROR_NOT_SUPPORTED && pending_refusal != 0)
        read_refusal(NULL, 0);
}

SIM_EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
    note_read_error(code);
    const struct sim_error *error = sim_find_error(code);
    REQUIRE(name);
    *name = error ? error->driver_name : NULL;
    return error ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
    note_read_error(code);
    const struct sim_error *error = sim_find_error(code);
    REQUIRE(text);
    *text = error ? error->text : NULL;
    return error ? SUCCESS : ERROR_INVALID_VALUE;
}
