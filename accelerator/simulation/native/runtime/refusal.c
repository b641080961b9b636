/* The CUDA runtime: launches of kernels that do not run.
 *
 * On a machine that computes, kernel overrides in Python do the work of torch's ops. A launch that arrives here would
 * leave memory uncomputed, so it fails and prints the name of the kernel. */
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"

RENEWED_LOCK(lock)

/* Whether torch has loaded the plug-in with the kernel overrides, and the plug-in's problem with them, or NULL. */
static bool is_plugin_loaded;
static char *missing;

EXPORT void accelerator_simulation_plugin_loaded(const char *problem)
{
    pthread_mutex_lock(&lock);
    is_plugin_loaded = true;
    free(missing);
    missing = problem ? strdup(problem) : NULL;
    pthread_mutex_unlock(&lock);
}

/* Prints once why torch did not load the plug-in, if this program uses torch from Python. */
static void explain_missing_plugin(void)
{
    static bool is_explained;
    if (is_plugin_loaded || is_explained || !dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD))
        return;
    is_explained = true;
    const char *autoload = getenv("TORCH_DEVICE_BACKEND_AUTOLOAD"), *path = getenv("PYTHONPATH");
    fprintf(stderr, "torch did not load the plug-in with the simulated kernels: ");
    if (autoload && strcmp(autoload, "1") != 0)
        fprintf(stderr, "TORCH_DEVICE_BACKEND_AUTOLOAD is '%s'\n", autoload);
    else if (!path || !strstr(path, "/simulation/_plugin"))
        fprintf(stderr, "PYTHONPATH lacks the plug-in's folder\n");
    else
        fprintf(stderr, "this Python does not search PYTHONPATH, as with -I or -E\n");
}

cudaError_t refuse_kernel(const void *function)
{
    const char *name = take_kernel_name(function);
    if (!name)
        return ERROR_NOT_SUPPORTED;
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    char *(*demangle)(const char *, char *, size_t *, int *) =
        (char *(*)(const char *, char *, size_t *, int *))(library ? dlsym(library, "__cxa_demangle") : NULL);
    int status = -1;
    char *readable = demangle ? demangle(name, NULL, NULL, &status) : NULL;
    pthread_mutex_lock(&lock);
    fprintf(stderr, "kernel %s is not simulated%s%s\n", status == 0 ? readable : name, missing ? ": " : "",
            missing ? missing : "");
    explain_missing_plugin();
    pthread_mutex_unlock(&lock);
    free(readable);
    return ERROR_NOT_SUPPORTED;
}
