/* The CUDA runtime: symbols, which are the __device__ and __constant__ variables of a program. */
#include "runtime.h"

#include <stdlib.h>

#include "common/fork.h"

struct symbol {
    const void *host_variable;
    size_t size;
    void *copies[SIM_MAX_GPUS]; /* one for each device, allocated when it is first used */
    struct symbol *next;
};

static struct symbol *symbols;
RENEWED_LOCK(lock) /* a forked child may load libraries, which register symbols */

EXPORT void __cudaRegisterVar(void **handle, char *host_variable, char *device_address, const char *name, int external,
                              size_t size, int constant, int global)
{
    (void)handle, (void)device_address, (void)name, (void)external, (void)constant, (void)global;
    struct symbol *symbol = calloc(1, sizeof *symbol);
    if (!symbol)
        return;
    symbol->host_variable = host_variable;
    symbol->size = size;
    pthread_mutex_lock(&lock);
    symbol->next = symbols;
    symbols = symbol;
    pthread_mutex_unlock(&lock);
}

static cudaError_t find_or_allocate(void **address, size_t *size, const void *host_variable, int device)
{
    cudaError_t error = SUCCESS;
    pthread_mutex_lock(&lock);
    struct symbol *symbol = symbols;
    while (symbol && symbol->host_variable != host_variable)
        symbol = symbol->next;
    if (symbol && !symbol->copies[device]) {
        error = driver->cuMemAlloc((uintptr_t *)&symbol->copies[device], symbol->size);
        if (error == SUCCESS)
            driver->fill_with_zeros(symbol->copies[device], symbol->size);
    }
    if (symbol && error == SUCCESS) {
        *address = symbol->copies[device];
        *size = symbol->size;
    }
    pthread_mutex_unlock(&lock);
    return symbol ? error : ERROR_INVALID_SYMBOL;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    size_t size;
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!address)
        return fail(ERROR_INVALID_VALUE);
    return finish(find_or_allocate(address, &size, symbol, device->ordinal));
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, int direction);

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t count, size_t offset, int direction)
{
    void *address;
    size_t size;
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    RETURN_IF_ERROR(finish(find_or_allocate(&address, &size, symbol, device->ordinal)));
    if (offset > size || count > size - offset)
        return fail(ERROR_INVALID_VALUE);
    return cudaMemcpy((char *)address + offset, source, count, direction);
}
