/* libcuda.so.1: blocks, the ranges of addresses that CUDA knows, ordered by address. */
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>

#include "common/arrays.h"

static struct sorted blocks; /* by address */
static uint64_t last_id;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void memory_lock(void)
{
    pthread_mutex_lock(&lock);
}

void memory_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

struct block *block_find(const void *address)
{
    struct sorted_item *item = sorted_at_or_below(&blocks, (uintptr_t)address);
    struct block *block = item ? item->value : NULL;
    return block && (const char *)address < block->memory.base + block->memory.size ? block : NULL;
}

struct block *block_insert(enum sim_memory_type type, void *base, size_t size, int device)
{
    struct block *block = calloc(1, sizeof *block);
    if (!block || !sorted_insert(&blocks, (uintptr_t)base, block)) {
        free(block);
        return NULL;
    }
    block->memory = (struct sim_memory){type, base, size, device, ++last_id, NULL, false, 0};
    return block;
}

void block_remove(struct block *block)
{
    sorted_remove(&blocks, sorted_index(&blocks, (uintptr_t)block->memory.base));
    free(block);
}

struct block *block_of(int device)
{
    for (size_t i = 0; i < blocks.count; i++) {
        struct block *block = blocks.items[i].value;
        const bool is_shared = block->memory.type == SIM_MANAGED_MEMORY && device_count > 1;
        if (block->memory.device == device && block->memory.type != SIM_MAPPED_MEMORY && !is_shared)
            return block;
    }
    return NULL;
}

bool block_overlaps(const void *address, size_t size)
{
    struct sorted_item *item = sorted_at_or_below(&blocks, (uintptr_t)address + size - 1);
    const struct block *block = item ? item->value : NULL;
    return block && block->memory.base + block->memory.size > (const char *)address;
}

int find_memory(const void *address, struct sim_memory *memory)
{
    memory_lock();
    struct block *block = block_find(address);
    bool is_in_use = block && !block->memory.is_idle;
    if (is_in_use)
        *memory = block->memory;
    memory_unlock();
    return is_in_use;
}

static uintptr_t distance(const struct sim_memory *memory, uintptr_t address)
{
    uintptr_t low = (uintptr_t)memory->base, end = low + memory->size;
    return address < low ? low - address : address >= end ? address - end : 0;
}

int find_nearest(const void *address, struct sim_memory *memory)
{
    bool is_found = false;
    memory_lock();
    size_t index = sorted_index(&blocks, (uintptr_t)address);
    for (size_t i = index > 0 ? index - 1 : 0; i <= index && i < blocks.count; i++) {
        const struct block *block = blocks.items[i].value;
        if (!is_found || distance(&block->memory, (uintptr_t)address) < distance(memory, (uintptr_t)address))
            *memory = block->memory;
        is_found = true;
    }
    memory_unlock();
    return is_found;
}

void set_pool(void *address, void *pool)
{
    memory_lock();
    struct block *block = block_find(address);
    if (block)
        block->memory.pool = pool;
    memory_unlock();
}

bool set_idle(void *address, bool is_idle)
{
    memory_lock();
    struct block *block = block_find(address);
    bool changes = block && block->memory.is_idle != is_idle;
    if (changes)
        block->memory.is_idle = is_idle;
    memory_unlock();
    return changes;
}
