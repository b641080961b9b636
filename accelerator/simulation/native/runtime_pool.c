/* The CUDA runtime: each device's default memory pool, on which PyTorch's cudaMallocAsync backend rests.
 *
 * A freed block stays in the pool, for the next allocation of about its size, as long as the pool holds no more than its
 * release threshold. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct spare {
    void *base;
    size_t size;
};

struct level {
    uint64_t now, highest;
};

struct pool {
    uint64_t threshold;
    uint64_t reuse[3]; /* stored for those who ask, without effect */
    struct level reserved, used;
    struct spare *spares; /* ordered by size */
    size_t spare_count, spare_capacity;
};

static struct pool pools[SIM_MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void raise_level(struct level *level, uint64_t bytes)
{
    level->now += bytes;
    if (level->now > level->highest)
        level->highest = level->now;
}

static size_t spares_smaller_than(const struct pool *pool, size_t size)
{
    size_t low = 0, high = pool->spare_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (pool->spares[middle].size < size)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void take_out(struct pool *pool, size_t place)
{
    pool->spare_count--;
    memmove(&pool->spares[place], &pool->spares[place + 1], (pool->spare_count - place) * sizeof *pool->spares);
}

static bool put_in(struct pool *pool, void *base, size_t size)
{
    if (pool->spare_count == pool->spare_capacity) {
        size_t capacity = pool->spare_capacity ? 2 * pool->spare_capacity : 64;
        struct spare *grown = realloc(pool->spares, capacity * sizeof *grown);
        if (!grown)
            return false;
        pool->spares = grown;
        pool->spare_capacity = capacity;
    }
    size_t place = spares_smaller_than(pool, size);
    memmove(&pool->spares[place + 1], &pool->spares[place], (pool->spare_count - place) * sizeof *pool->spares);
    pool->spares[place] = (struct spare){base, size};
    pool->spare_count++;
    return true;
}

static void trim(struct pool *pool, uint64_t keep)
{
    while (pool->spare_count > 0 && pool->reserved.now > keep) {
        struct spare spare = pool->spares[--pool->spare_count];
        driver->cuMemFree((uintptr_t)spare.base);
        pool->reserved.now -= spare.size;
    }
}

/* Takes a spare block that is not much larger than asked for, or gets memory from the driver. */
static cudaError_t allocate(struct pool *pool, void **address, size_t size)
{
    size_t place = spares_smaller_than(pool, size);
    if (place < pool->spare_count && pool->spares[place].size - size <= size / 4) {
        struct spare spare = pool->spares[place];
        take_out(pool, place);
        raise_level(&pool->used, spare.size);
        *address = spare.base;
        return SUCCESS;
    }
    cudaError_t error = driver->cuMemAlloc((uintptr_t *)address, size);
    if (error == ERROR_OUT_OF_MEMORY && pool->spare_count > 0) {
        trim(pool, 0);
        error = driver->cuMemAlloc((uintptr_t *)address, size);
    }
    if (error == SUCCESS) {
        driver->set_pool(*address, pool);
        raise_level(&pool->reserved, size);
        raise_level(&pool->used, size);
    }
    return error;
}

static bool is_pool(const struct pool *pool)
{
    return pool >= pools && pool < pools + SIM_MAX_GPUS;
}

static size_t round_up(size_t size)
{
    enum { UNIT = 512 };
    return (size + UNIT - 1) / UNIT * UNIT;
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, void *handle)
{
    ENTER_CONTEXT(device);
    if (!address || !find_stream(handle, device))
        return fail(address ? ERROR_INVALID_HANDLE : ERROR_INVALID_VALUE);
    *address = NULL;
    if (size == 0)
        return SUCCESS;
    if (size > device->memory)
        return fail(ERROR_OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    cudaError_t error = allocate(&pools[device->ordinal], address, round_up(size));
    pthread_mutex_unlock(&lock);
    return finish(error);
}

cudaError_t pool_free(const struct sim_memory *memory)
{
    struct pool *pool = memory->pool;
    pthread_mutex_lock(&lock);
    pool->used.now -= memory->size;
    if (!put_in(pool, memory->base, memory->size)) {
        driver->cuMemFree((uintptr_t)memory->base);
        pool->reserved.now -= memory->size;
    }
    trim(pool, pool->threshold);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT cudaError_t cudaFreeAsync(void *address, void *handle)
{
    struct sim_memory memory;
    ENTER_CONTEXT(device);
    if (!find_stream(handle, device))
        return fail(ERROR_INVALID_HANDLE);
    if (!address)
        return SUCCESS;
    if (!driver->find_memory(address, &memory) || memory.base != address)
        return fail(ERROR_INVALID_VALUE);
    RETURN_IF_ERROR(wait_for_pending(&find_stream(handle, device)->pending)); /* other streams may get the block */
    return finish(memory.pool ? pool_free(&memory) : driver->cuMemFree((uintptr_t)address));
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(struct pool **pool, int ordinal)
{
    ENTER();
    if (ordinal < 0 || ordinal >= visible_device_count())
        return fail(ERROR_INVALID_DEVICE);
    *pool = &pools[ordinal];
    return SUCCESS;
}

enum pool_attribute {
    REUSE_FOLLOWS_EVENTS = 1,
    REUSE_INTERNAL_DEPENDENCIES = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_NOW = 5,
    RESERVED_HIGHEST = 6,
    USED_NOW = 7,
    USED_HIGHEST = 8,
};

EXPORT cudaError_t cudaMemPoolGetAttribute(struct pool *pool, int attribute, void *value)
{
    ENTER();
    if (!is_pool(pool) || !value)
        return fail(ERROR_INVALID_VALUE);
    uint64_t *number = value;
    cudaError_t error = SUCCESS;
    pthread_mutex_lock(&lock);
    if (attribute == RELEASE_THRESHOLD)
        *number = pool->threshold;
    else if (attribute == RESERVED_NOW)
        *number = pool->reserved.now;
    else if (attribute == RESERVED_HIGHEST)
        *number = pool->reserved.highest;
    else if (attribute == USED_NOW)
        *number = pool->used.now;
    else if (attribute == USED_HIGHEST)
        *number = pool->used.highest;
    else if (attribute >= REUSE_FOLLOWS_EVENTS && attribute <= REUSE_INTERNAL_DEPENDENCIES)
        *(int *)value = (int)pool->reuse[attribute - REUSE_FOLLOWS_EVENTS];
    else
        error = ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return finish(error);
}

EXPORT cudaError_t cudaMemPoolSetAttribute(struct pool *pool, int attribute, void *value)
{
    ENTER();
    if (!is_pool(pool) || !value)
        return fail(ERROR_INVALID_VALUE);
    cudaError_t error = SUCCESS;
    pthread_mutex_lock(&lock);
    if (attribute == RELEASE_THRESHOLD)
        pool->threshold = *(uint64_t *)value;
    else if (attribute == RESERVED_HIGHEST && *(uint64_t *)value == 0)
        pool->reserved.highest = pool->reserved.now;
    else if (attribute == USED_HIGHEST && *(uint64_t *)value == 0)
        pool->used.highest = pool->used.now;
    else if (attribute >= REUSE_FOLLOWS_EVENTS && attribute <= REUSE_INTERNAL_DEPENDENCIES)
        pool->reuse[attribute - REUSE_FOLLOWS_EVENTS] = (uint64_t)(*(int *)value);
    else
        error = ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return finish(error);
}

/* Every device can reach every other here. */
EXPORT cudaError_t cudaMemPoolSetAccess(struct pool *pool, const void *descriptions, size_t count)
{
    ENTER();
    (void)descriptions, (void)count;
    return finish(is_pool(pool) ? SUCCESS : ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaMemPoolTrimTo(struct pool *pool, size_t keep)
{
    ENTER();
    if (!is_pool(pool))
        return fail(ERROR_INVALID_VALUE);
    pthread_mutex_lock(&lock);
    trim(pool, keep);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
