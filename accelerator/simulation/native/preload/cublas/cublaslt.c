/* cuBLASLt in a rehearsal: libraries such as bitsandbytes call it themselves, and it has the static CUDA runtime, which is not
 * simulated. Handles and products succeed and compute nothing. All other calls, and all calls of other processes, reach the real
 * library, whose descriptions of matrices need no GPU. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "interface/settings.h"

#define EXPORT __attribute__((visibility("default")))

enum status { SUCCESS = 0, NOT_INITIALIZED = 1 };

struct heuristic_result { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace_size;
    int status;
    float waves;
    int reserved[4];
};

static bool is_rehearsed(void)
{
    const char *value = getenv(SETTING_COMPUTE);
    return value && strcmp(value, "0") == 0;
}

/* The real library's function, whatever its type. */
static void *real(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

typedef const void *description;

EXPORT enum status cublasLtCreate(void **handle)
{
    static char made;
    enum status (*create)(void **);
    if (!is_rehearsed()) {
        *(void **)&create = real(__func__);
        return create ? create(handle) : NOT_INITIALIZED;
    }
    *handle = &made;
    return SUCCESS;
}

EXPORT enum status cublasLtDestroy(void *handle)
{
    enum status (*destroy)(void *);
    if (is_rehearsed())
        return SUCCESS;
    *(void **)&destroy = real(__func__);
    return destroy ? destroy(handle) : NOT_INITIALIZED;
}

EXPORT enum status cublasLtMatmul(void *handle, description operation, const void *alpha, const void *a, description a_layout,
                                  const void *b, description b_layout, const void *beta, const void *c, description c_layout,
                                  void *d, description d_layout, const void *algorithm, void *workspace, size_t workspace_size,
                                  void *stream)
{
    enum status (*multiply)(void *, description, const void *, const void *, description, const void *, description, const void *,
                            const void *, description, void *, description, const void *, void *, size_t, void *);
    if (is_rehearsed())
        return SUCCESS;
    *(void **)&multiply = real(__func__);
    return multiply ? multiply(handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
                               workspace, workspace_size, stream)
                    : NOT_INITIALIZED;
}

EXPORT enum status cublasLtMatrixTransform(void *handle, description transform, const void *alpha, const void *a,
                                           description a_layout, const void *beta, const void *b, description b_layout, void *c,
                                           description c_layout, void *stream)
{
    enum status (*change)(void *, description, const void *, const void *, description, const void *, const void *, description,
                          void *, description, void *);
    if (is_rehearsed())
        return SUCCESS;
    *(void **)&change = real(__func__);
    return change ? change(handle, transform, alpha, a, a_layout, beta, b, b_layout, c, c_layout, stream) : NOT_INITIALIZED;
}

EXPORT enum status cublasLtMatmulAlgoGetHeuristic(void *handle, description operation, description a, description b,
                                                  description c, description d, description preference, int requested,
                                                  struct heuristic_result *results, int *found)
{
    enum status (*find)(void *, description, description, description, description, description, description, int,
                        struct heuristic_result *, int *);
    if (is_rehearsed()) {
        *found = requested > 0;
        if (*found)
            *results = (struct heuristic_result){0}; /* takes no workspace */
        return SUCCESS;
    }
    *(void **)&find = real(__func__);
    return find ? find(handle, operation, a, b, c, d, preference, requested, results, found) : NOT_INITIALIZED;
}
