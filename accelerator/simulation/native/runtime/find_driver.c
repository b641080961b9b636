/* The CUDA runtime: finding and loading the simulated driver. */
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/same_build.h"
#include "interface/settings.h"

const struct sim_driver *driver;

/* The driver is missing if a wrapper replaces LD_LIBRARY_PATH instead of adding to it. */
static void hint_at_replaced_path(void)
{
    const char *path = getenv("LD_LIBRARY_PATH");
    if (getenv(SETTING_GPUS) && (!path || !strstr(path, "/" SIM_LIBRARIES_FOLDER)))
        fprintf(stderr, "accelerator: the simulated driver was not found, because something has replaced LD_LIBRARY_PATH;"
                        " extend it instead: LD_LIBRARY_PATH=...:$LD_LIBRARY_PATH\n");
}

/* Returns NULL without a driver of this build. */
static const struct sim_driver *find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    const struct sim_driver *(*table)(void) = NULL;
    if (library)
        *(void **)&table = dlsym(library, SIM_DRIVER_SYMBOL);
    const char *boundary = table ? (const char *)dlsym(library, "accelerator_simulation_boundary") : NULL;
    const char *problem = table ? find_other_build(boundary, (const void *)table) : NULL;
    if (problem)
        fprintf(stderr, "accelerator: %s\n", problem);
    else if (table)
        return table();
    else
        hint_at_replaced_path();
    return NULL;
}

/* Takes no lock: a thread in the constructor of a library has the loader's, and would wait for this one's.
 * ThreadSanitizer takes the exchange of a thread that comes second for a write, which it is not. */
__attribute__((no_sanitize("thread")))
cudaError_t load_driver(void)
{
    const struct sim_driver *none = NULL, *found;
    if (!__atomic_load_n(&driver, __ATOMIC_ACQUIRE) && (found = find_driver()))
        __atomic_compare_exchange_n(&driver, &none, found, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return driver ? SUCCESS : ERROR_INSUFFICIENT_DRIVER;
}
