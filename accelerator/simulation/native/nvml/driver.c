/* What NVML needs of the driver's library: whether it can be loaded, and the state of the machine that it holds. */
#include <dlfcn.h>

#include "common/fork.h"
#include "common/state.h"
#include "nvml.h"

static const char library[] = "libcuda.so.1";

/* nvml_state() must not find the driver that nvml_has_driver() is about to unload. */
RENEWED_LOCK(loading)

bool nvml_has_driver(void)
{
    pthread_mutex_lock(&loading);
    void *driver = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
    if (driver)
        dlclose(driver);
    pthread_mutex_unlock(&loading);
    return driver;
}

struct sim_state *nvml_state(void)
{
    static struct sim_state *of_driver;
    if (sim_state_path())
        return sim_state_open();
    pthread_mutex_lock(&loading);
    void *driver = of_driver ? NULL : dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (driver) {
        struct sim_state *(*state)(void);
        *(void **)&state = dlsym(driver, "accelerator_sim_state");
        of_driver = state ? state() : NULL;
        if (!of_driver) /* else it stays loaded, because NVML reads its state from now on */
            dlclose(driver);
    }
    struct sim_state *found = of_driver;
    pthread_mutex_unlock(&loading);
    return found;
}
