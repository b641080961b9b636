/* The CUDA runtime: launches of kernels of the program that do not run: their error, and the words of all refusals.
 *
 * On a machine that computes, kernel overrides in Python do the work of torch's ops. A launch that arrives here would
 * leave memory uncomputed, so it fails and prints the name of the kernel. */
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"
#include "interface/settings.h"

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

/* Returns why torch did not load the plug-in, if this program uses torch from Python; else NULL. */
static const char *missing_plugin_reason(char *text, size_t size)
{
    if (is_plugin_loaded || !dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD))
        return NULL;
    const char *autoload = getenv("TORCH_DEVICE_BACKEND_AUTOLOAD"), *path = getenv("PYTHONPATH");
    const char *problem = "this Python does not search PYTHONPATH, as with -I or -E";
    char variable[100];
    if (autoload && strcmp(autoload, "1") != 0) {
        snprintf(variable, sizeof variable, "TORCH_DEVICE_BACKEND_AUTOLOAD is '%s'", autoload);
        problem = variable;
    } else if (!path || !strstr(path, "/simulation/_inside/entry_point")) {
        problem = "PYTHONPATH lacks the plug-in's folder";
    }
    snprintf(text, size, "torch did not load the plug-in with the simulated kernels: %s", problem);
    return text;
}

char *demangle(const char *name)
{
    if (strncmp(name, "_Z", 2) != 0) /* such as `a`, which would be the code of a type */
        return NULL;
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    char *(*function)(const char *, char *, size_t *, int *) =
        (char *(*)(const char *, char *, size_t *, int *))(library ? dlsym(library, "__cxa_demangle") : NULL);
    int status;
    return function ? function(name, NULL, NULL, &status) : NULL; /* NULL for a name that is not mangled */
}

/* Read once: other threads must not read the environment while the program writes it. */
static bool refuses_kernels(void)
{
    static _Atomic int is_set = -1;
    if (is_set < 0) {
        const char *value = getenv(SETTING_KERNELS);
        is_set = value && strcmp(value, "refuse") == 0;
    }
    return is_set;
}

const char *refusal_of_launch(bool has_clusters)
{
    if (refuses_kernels())
        return SETTING_KERNELS " refuses kernels that are not torch's own";
    return has_clusters ? "clusters of blocks are not simulated" : NULL;
}

cudaError_t report_refusal(const char *mangled, const char *problem, bool is_reported)
{
    char text[300];
    char *readable = demangle(mangled);
    pthread_mutex_lock(&lock);
    const char *reason = missing ? missing : missing_plugin_reason(text, sizeof text);
    reason = reason ? reason : problem && *problem ? problem : NULL;
    const cudaError_t error = driver->refuse_launch(readable ? readable : mangled, reason, is_reported);
    pthread_mutex_unlock(&lock);
    free(readable);
    return error;
}

cudaError_t refuse_kernel(const void *function, const char *reason)
{
    bool is_reported;
    const char *name = name_to_report(function, &is_reported);
    return report_refusal(name ? name : "without a name", reason, is_reported);
}
