/* The CUDA runtime: finding and loading the simulated driver. */
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"
#include "common/same_build.h"
#include "interface/settings.h"

const struct sim_driver *driver;

RENEWED_LOCK(loading)

/* The driver is missing if a wrapper replaces LD_LIBRARY_PATH instead of adding to it. */
static void hint_at_replaced_path(void)
{
    const char *path = getenv("LD_LIBRARY_PATH");
    if (getenv(SETTING_GPUS) && (!path || !strstr(path, "/" SIM_LIBRARIES_FOLDER)))
        fprintf(stderr, "accelerator: the simulated driver was not found, because something has replaced LD_LIBRARY_PATH;"
                        " extend it instead: LD_LIBRARY_PATH=...:$LD_LIBRARY_PATH\n");
}

cudaError_t load_driver(void)
{
    pthread_mutex_lock(&loading);
    if (!driver) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        const struct sim_driver *(*table)(void) = NULL;
        if (library)
            *(void **)&table = dlsym(library, SIM_DRIVER_SYMBOL);
        const char *boundary = table ? (const char *)dlsym(library, "accelerator_simulation_boundary") : NULL;
        const char *problem = table ? find_other_build(boundary, (const void *)table) : NULL;
        if (problem)
            fprintf(stderr, "accelerator: %s\n", problem);
        else if (table)
            driver = table();
        else
            hint_at_replaced_path();
    }
    pthread_mutex_unlock(&loading);
    return driver ? SUCCESS : ERROR_INSUFFICIENT_DRIVER;
}
