/* The CUDA runtime: entry points that are not simulated: each name of exported/runtime.h that no other file defines is refused. */
#include "runtime.h"

#include <stdio.h>

#include "common/fork.h"
#include "common/stubs.h"

RENEWED_LOCK(lock)

/* Says once of each function that it is not simulated. */
CALLED_BY_STUBS static cudaError_t refuse_by_name(const char *function, const char *what)
{
    enum { MAX_FUNCTIONS = 512 };
    static const char *reported[MAX_FUNCTIONS];
    static size_t count;
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < count && strcmp(reported[i], function) != 0)
        i++;
    const bool is_new = i == count && count < MAX_FUNCTIONS;
    if (is_new)
        reported[count++] = function;
    pthread_mutex_unlock(&lock);
    if (is_new)
        fprintf(stderr, "accelerator: %s is not simulated%s\n", function, what);
    return ERROR_NOT_SUPPORTED;
}

cudaError_t refuse_arrays(const char *function)
{
    return refuse_by_name(function, " for arrays of textures");
}

CALLED_BY_STUBS static cudaError_t refuse(const char *function)
{
    RETURN_IF_ERROR(enter(function));
    return fail(refuse_by_name(function, ""));
}

#define NAME(name)                                                                                                     \
    STUB cudaError_t name(void)                                                                                        \
    {                                                                                                                  \
        return refuse(__func__);                                                                                       \
    }

/* The names that only one major version has. */
#if CUDART == 12
#define NAME_12 NAME
#define NAME_13(name)
#define VARIANT_12 VARIANT
#define VARIANT_13(name, function)
#else
#define NAME_12(name)
#define NAME_13 NAME
#define VARIANT_12(name, function)
#define VARIANT_13 VARIANT
#endif

#include "exported/runtime.h"
