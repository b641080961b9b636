/* The CUDA runtime: each device's default memory pool, which PyTorch's cudaMallocAsync backend uses.
 *
 * A freed block stays in the pool, for an allocation of about its size, while the pool holds no more than its release
 * threshold. */
#include "runtime.h"

#include <pthread.h>

#include "common/arrays.h"

struct level {
    uint64_t now, highest;
};

struct pool {
    uint64_t threshold;
    uint64_t reuse[3]; /* can be set and read, without effect */
    struct level reserved, used;
    struct sorted spares; /* freed blocks by size */
};

static struct pool pools[SIM_MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void raise_level(struct level *level, uint64_t bytes)
{
    level->now += bytes;
    if (level->now > level->highest)
        level->highest = level->now;
}

static void trim(struct pool *pool, uint64_t keep)
{
    while (pool->spares.count > 0 && pool->reserved.now > keep) {
        struct sorted_item spare = sorted_remove(&pool->spares, pool->spares.count - 1);
        driver->free_idle(spare.value);
        pool->reserved.now -= spare.key;
    }
}

/* Reuses a freed block that is not much larger than requested, or gets memory from the driver. */
static cudaError_t allocate(struct pool *pool, void **address, size_t size)
{
    size_t index = sorted_index(&pool->spares, size);
    if (index < pool->spares.count && pool->spares.items[index].key - size <= size / 4) {
        struct sorted_item spare = sorted_remove(&pool->spares, index);
        driver->set_idle(spare.value, false);
        raise_level(&pool->used, spare.key); /* the block's size: freeing it takes as much off */
        *address = spare.value;
        return SUCCESS;
    }
    cudaError_t error = driver->cuMemAlloc((uintptr_t *)address, size);
    if (error == ERROR_OUT_OF_MEMORY && pool->spares.count > 0) {
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

static cudaError_t allocate_from(const char *function, struct pool *pool, void **address, size_t size, void *handle)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    RETURN_UNLESS(address && find_stream(handle, device), fail(address ? ERROR_INVALID_HANDLE : ERROR_INVALID_VALUE));
    *address = NULL;
    if (!pool)
        pool = &pools[device->ordinal];
    REQUIRE(is_pool(pool) && pool - pools < visible_device_count());
    if (pool != &pools[device->ordinal])
        return fail(ERROR_NOT_SUPPORTED); /* memory of another device than the stream's */
    if (size == 0)
        return SUCCESS;
    RETURN_UNLESS(size <= device->memory, fail(ERROR_OUT_OF_MEMORY));
    pthread_mutex_lock(&lock);
    cudaError_t error = allocate(pool, address, round_up(size));
    pthread_mutex_unlock(&lock);
    return finish(error);
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, void *handle)
{
    return allocate_from(__func__, NULL, address, size, handle);
}

EXPORT cudaError_t cudaMallocFromPoolAsync(void **address, size_t size, struct pool *pool, void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return pool ? allocate_from(__func__, pool, address, size, handle) : fail(ERROR_INVALID_VALUE);
}

void reset_pool(int ordinal)
{
    pthread_mutex_lock(&lock);
    free(pools[ordinal].spares.items);
    pools[ordinal] = (struct pool){0};
    pthread_mutex_unlock(&lock);
}

cudaError_t pool_free(const struct sim_memory *memory)
{
    struct pool *pool = memory->pool;
    pthread_mutex_lock(&lock);
    bool was_in_use = driver->set_idle(memory->base, true);
    if (was_in_use) {
        pool->used.now -= memory->size;
        if (!sorted_insert(&pool->spares, memory->size, memory->base)) {
            driver->free_idle(memory->base);
            pool->reserved.now -= memory->size;
        }
        trim(pool, pool->threshold);
    }
    pthread_mutex_unlock(&lock);
    return was_in_use ? SUCCESS : ERROR_INVALID_VALUE;
}

EXPORT cudaError_t cudaFreeAsync(void *address, void *handle)
{
    struct sim_memory memory;
    ENTER_CONTEXT(device);
    RETURN_UNLESS(find_stream(handle, device), fail(ERROR_INVALID_HANDLE));
    if (!address)
        return SUCCESS;
    if (!driver->find_memory(address, &memory) || memory.base != address)
        return fail(ERROR_INVALID_VALUE);
    RETURN_IF_ERROR(finish(wait_for_pending(&find_stream(handle, device)->pending, device->ordinal))); /* other streams may get the block */
    IF_RACES(race_hooks->at_free(memory.base, memory.size));
    return finish(memory.pool ? pool_free(&memory) : driver->cuMemFree((uintptr_t)address));
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(struct pool **pool, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_UNLESS(ordinal >= 0 && ordinal < visible_device_count(), fail(ERROR_INVALID_DEVICE));
    REQUIRE(pool);
    *pool = &pools[ordinal];
    return SUCCESS;
}

/* The default pool is the only one. */
EXPORT cudaError_t cudaDeviceGetMemPool(struct pool **pool, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaDeviceGetDefaultMemPool(pool, ordinal);
}

EXPORT cudaError_t cudaDeviceSetMemPool(int ordinal, struct pool *pool)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(check_device(ordinal));
    return finish(pool == &pools[ordinal] ? SUCCESS : ERROR_INVALID_VALUE);
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
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(is_pool(pool) && value);
    uint64_t *bytes = value;
    cudaError_t error = SUCCESS;
    pthread_mutex_lock(&lock);
    if (attribute == RELEASE_THRESHOLD)
        *bytes = pool->threshold;
    else if (attribute == RESERVED_NOW)
        *bytes = pool->reserved.now;
    else if (attribute == RESERVED_HIGHEST)
        *bytes = pool->reserved.highest;
    else if (attribute == USED_NOW)
        *bytes = pool->used.now;
    else if (attribute == USED_HIGHEST)
        *bytes = pool->used.highest;
    else if (attribute >= REUSE_FOLLOWS_EVENTS && attribute <= REUSE_INTERNAL_DEPENDENCIES)
        *(int *)value = (int)pool->reuse[attribute - REUSE_FOLLOWS_EVENTS];
    else
        error = ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return finish(error);
}

EXPORT cudaError_t cudaMemPoolSetAttribute(struct pool *pool, int attribute, void *value)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(is_pool(pool) && value);
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

/* Does nothing: all devices can access each other's memory. */
EXPORT cudaError_t cudaMemPoolSetAccess(struct pool *pool, const void *descriptions, size_t count)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)descriptions, (void)count;
    return finish(is_pool(pool) ? SUCCESS : ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaMemPoolTrimTo(struct pool *pool, size_t keep)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(is_pool(pool));
    pthread_mutex_lock(&lock);
    trim(pool, keep);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
