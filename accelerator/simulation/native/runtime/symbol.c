/* The CUDA runtime: symbols, which are the __device__ and __constant__ variables of a program.
 *
 * A variable whose kernels run is a variable of their PTX. Others have memory of their own. */
#include <stdlib.h>

#include "common/fork.h"
#include "images.h"

struct symbol {
    const void *host_variable;
    const char *name; /* in the image */
    struct image *image;
    size_t size;
    void *copies[SIM_MAX_GPUS]; /* one for each device, found or allocated when it is first used */
    unsigned resets[SIM_MAX_GPUS]; /* of the device before it got its copy */
    void **managed;             /* where the host keeps the address of a managed variable, or NULL */
    struct symbol *next;
};

static struct symbol *symbols;
RENEWED_LOCK(lock) /* of the list: a forked child may load libraries, which register symbols */

/* Guards copies. Translation has the loader load a library, and the constructor of another one, for which the loader waits, may
 * register symbols: so this is not the lock of the list. */
static pthread_mutex_t copies_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_symbol(const struct symbol *added)
{
    struct symbol *symbol = malloc(sizeof *symbol);
    if (!symbol)
        return;
    *symbol = *added;
    pthread_mutex_lock(&lock);
    symbol->next = symbols;
    symbols = symbol;
    pthread_mutex_unlock(&lock);
}

/* Symbols are added before the first one, and stay: the rest of the list needs no lock. */
static struct symbol *first_symbol(void)
{
    pthread_mutex_lock(&lock);
    struct symbol *first = symbols;
    pthread_mutex_unlock(&lock);
    return first;
}

EXPORT void __cudaRegisterVar(void **handle, char *host_variable, char *device_address, const char *name, int external,
                              size_t size, int constant, int global)
{
    (void)device_address, (void)external, (void)constant, (void)global;
    add_symbol(&(struct symbol){.host_variable = host_variable, .name = name, .image = (struct image *)handle, .size = size});
}

EXPORT void __cudaRegisterManagedVar(void **handle, void **host_variable, char *device_address, const char *name, int external,
                                     size_t size, int constant, int global)
{
    (void)device_address, (void)external, (void)constant, (void)global;
    add_symbol(&(struct symbol){.host_variable = host_variable, .name = name, .image = (struct image *)handle, .size = size,
                                .managed = host_variable});
}

static cudaError_t allocate(struct symbol *symbol, int device)
{
    uintptr_t *address = (uintptr_t *)&symbol->copies[device];
    cudaError_t error = symbol->managed ? driver->cuMemAllocManaged(address, symbol->size, 1)
                                        : driver->cuMemAlloc(address, symbol->size);
    if (error == SUCCESS)
        driver->fill_with_zeros(symbol->copies[device], symbol->size);
    return error;
}

/* Finds a symbol's memory on a device, which it gets now if it has none. The caller holds the copies' lock. */
static cudaError_t find_copy(struct symbol *symbol, int device)
{
    size_t size;
    void *address;
    const unsigned resets = driver->devices[device].context_resets;
    if (symbol->copies[device] && symbol->resets[device] == resets)
        return SUCCESS;
    if (symbol->resets[device] != resets && symbol->managed && *symbol->managed == symbol->copies[device])
        *symbol->managed = NULL;
    symbol->copies[device] = NULL;
    symbol->resets[device] = resets;
    cudaError_t error = ERROR_NOT_SUPPORTED;
    if (computes() && symbol->image && symbol->image->data)
        error = find_variable(symbol->image, symbol->name, &driver->devices[device], &address, &size);
    if (error == SUCCESS)
        symbol->copies[device] = address;
    else if (error == ERROR_NOT_SUPPORTED || error == ERROR_NOT_FOUND)
        error = allocate(symbol, device); /* no kernel that uses it runs */
    if (error == SUCCESS && symbol->managed && !*symbol->managed)
        *symbol->managed = symbol->copies[device];
    return error;
}

static cudaError_t find_or_allocate(void **address, size_t *size, const void *host_variable, int device)
{
    struct symbol *symbol = first_symbol();
    while (symbol && (symbol->host_variable != host_variable || (symbol->image && symbol->image->is_gone)))
        symbol = symbol->next;
    RETURN_UNLESS(symbol, ERROR_INVALID_SYMBOL);
    pthread_mutex_lock(&copies_lock);
    cudaError_t error = find_copy(symbol, device);
    if (error == SUCCESS) {
        *address = symbol->copies[device];
        *size = symbol->size;
    }
    pthread_mutex_unlock(&copies_lock);
    return error;
}

/* Programs call this before their host code first uses a managed variable. */
EXPORT char __cudaInitModule(void **handle)
{
    struct sim_device *device;
    if (enter_context(__func__, &device) != SUCCESS)
        return 0;
    pthread_mutex_lock(&copies_lock);
    for (struct symbol *symbol = first_symbol(); symbol; symbol = symbol->next)
        if (symbol->image == (struct image *)handle && symbol->managed)
            find_copy(symbol, device->ordinal);
    pthread_mutex_unlock(&copies_lock);
    return 1;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    size_t size;
    ENTER_CONTEXT(device);
    REQUIRE(address);
    return finish(find_or_allocate(address, &size, symbol, device->ordinal));
}

EXPORT cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol)
{
    void *address;
    ENTER_CONTEXT(device);
    REQUIRE(size);
    return finish(find_or_allocate(&address, size, symbol, device->ordinal));
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, int direction);
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, int direction, void *stream);

/* Finds a part of a symbol on the current device. */
static cudaError_t find_part(const char *function, const void *symbol, size_t count, size_t offset, char **part)
{
    void *address;
    size_t size;
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    RETURN_IF_ERROR(finish(find_or_allocate(&address, &size, symbol, device->ordinal)));
    REQUIRE(offset <= size && count <= size - offset);
    *part = (char *)address + offset;
    return SUCCESS;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t count, size_t offset, int direction)
{
    char *part;
    RETURN_IF_ERROR(find_part(__func__, symbol, count, offset, &part));
    return cudaMemcpy(part, source, count, direction);
}

EXPORT cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *source, size_t count, size_t offset, int direction,
                                           void *stream)
{
    char *part;
    RETURN_IF_ERROR(find_part(__func__, symbol, count, offset, &part));
    return cudaMemcpyAsync(part, source, count, direction, stream);
}

EXPORT cudaError_t cudaMemcpyFromSymbol(void *target, const void *symbol, size_t count, size_t offset, int direction)
{
    char *part;
    RETURN_IF_ERROR(find_part(__func__, symbol, count, offset, &part));
    return cudaMemcpy(target, part, count, direction);
}

EXPORT cudaError_t cudaMemcpyFromSymbolAsync(void *target, const void *symbol, size_t count, size_t offset, int direction,
                                             void *stream)
{
    char *part;
    RETURN_IF_ERROR(find_part(__func__, symbol, count, offset, &part));
    return cudaMemcpyAsync(target, part, count, direction, stream);
}
