/* libcuda.so.1: whether a range of addresses is memory that a copy may use. */
#include "driver.h"

#include <sys/mman.h>

bool is_mapped_memory(const void *address, size_t size)
{
    uintptr_t first = (uintptr_t)address / PAGE * PAGE;
    /* Checks the mappings and does nothing else: Linux ignores MS_ASYNC. */
    return msync((void *)first, (uintptr_t)address + size - first, MS_ASYNC) == 0;
}

int is_valid_range(const void *address, size_t size)
{
    if (size > UINTPTR_MAX - (uintptr_t)address)
        return false;
    /* Numbers, because the range may be larger than any object that a pointer may index. */
    uintptr_t reached = (uintptr_t)address, end = reached + size;
    memory_lock();
    struct block *block = block_find(address);
    bool is_known = block != NULL, is_valid = !is_known || !block->memory.is_idle;
    if (!is_known && is_reserved(address, size))
        is_valid = false;
    /* A tensor in an expandable segment may span several mapped blocks. A neighbor of another type is another
     * allocation. */
    while (block && reached < end) {
        bool is_mapped = block->memory.type == SIM_MAPPED_MEMORY;
        reached = (uintptr_t)block->memory.base + block->memory.size;
        block = is_mapped ? block_find((void *)reached) : NULL;
        if (block && block->memory.type != SIM_MAPPED_MEMORY)
            block = NULL;
    }
    memory_unlock();
    return is_valid && (is_known ? reached >= end : size == 0 || is_mapped_memory(address, size));
}
