/* libcuda.so.1: device memory and pinned memory: allocating, unmapping what is freed, how much is free.
 *
 * Both are host memory that is mapped lazily, so a simulated GPU takes only as much host memory as is written. The free
 * memory is computed from the recorded charges. One address space holds everything, as under CUDA's unified addressing. */
#include "driver.h"
#include "api.h"

#include <sys/mman.h>

static int heap_of(enum sim_memory_type type, int device)
{
    return type == SIM_DEVICE_MEMORY ? device : HOST_HEAP;
}

/* Maps memory and records it. The caller holds the lock. */
static struct block *map_memory(enum sim_memory_type type, size_t size, int device)
{
    struct heap_part part = {0};
    size_t mapped = round_to_pages(size);
    void *base = heap_map(heap_of(type, device), mapped, &part);
    struct block *block = base ? block_insert(type, base, size, device) : NULL;
    if (block) {
        block->part = part;
        block->charged = mapped;
    } else if (base) {
        heap_unmap(heap_of(type, device), base, mapped, &part);
    }
    return block;
}

/* Charges pinned memory to the host and other memory to the current device. */
static CUresult allocate(enum sim_memory_type type, size_t size, unsigned flags, void **address)
{
    int device = current_context()->ordinal;
    RETURN_UNLESS(charge(type, device, round_to_pages(size)), ERROR_OUT_OF_MEMORY);
    memory_lock();
    struct block *block = map_memory(type, size, device);
    if (block) {
        block->memory.flags = flags;
        *address = block->memory.base;
    }
    memory_unlock();
    if (!block) {
        release(type, device, round_to_pages(size));
        return ERROR_OUT_OF_MEMORY;
    }
    if (type == SIM_DEVICE_MEMORY)
        fill_new_memory(*address, size);
    return SUCCESS;
}

/* The caller holds the lock. */
static void free_block(struct block *block)
{
    const struct sim_memory *memory = &block->memory;
    const size_t size = round_to_pages(memory->size);
    if (memory->type == SIM_IMPORTED_MEMORY)
        munmap(memory->base, size);
    else if (memory->type != SIM_REGISTERED_MEMORY)
        heap_unmap(heap_of(memory->type, memory->device), memory->base, size, &block->part);
    if (block->charged)
        release(memory->type, memory->device, block->charged);
    block_remove(block);
}

/* Frees the block that begins at the address, if it has one of the two types and is idle or in use as `is_idle` says. */
static CUresult deallocate(void *address, enum sim_memory_type type, enum sim_memory_type other_type, bool is_idle)
{
    memory_lock();
    struct block *block = block_find(address);
    bool fits = block && block->memory.base == address && block->memory.is_idle == is_idle &&
                (block->memory.type == type || block->memory.type == other_type);
    if (fits)
        free_block(block);
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

void free_blocks_of(int device)
{
    memory_lock();
    for (struct block *block; (block = block_of(device));)
        free_block(block);
    memory_unlock();
}

int free_idle(void *address)
{
    return deallocate(address, SIM_DEVICE_MEMORY, SIM_DEVICE_MEMORY, true);
}

SIM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(address && size != 0);
    if (size > largest_allocation(current_context()))
        return ERROR_OUT_OF_MEMORY; /* also keeps the rounding below from overflowing */
    return allocate(SIM_DEVICE_MEMORY, size, 0, (void **)address);
}

SIM_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__));
    enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2 };
    REQUIRE(address && size != 0 && (flags == ATTACH_GLOBAL || flags == ATTACH_HOST));
    RETURN_UNLESS(size <= largest_allocation(current_context()), ERROR_OUT_OF_MEMORY);
    return allocate(SIM_MANAGED_MEMORY, size, flags, (void **)address);
}

SIM_EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    RETURN_IF_ERROR(enter(__func__));
    struct sim_memory memory;
    if (find_memory((void *)address, &memory) && memory.pool)
        return memory.base == (void *)address ? free_to_pool(&memory) : ERROR_INVALID_VALUE;
    return deallocate((void *)address, SIM_DEVICE_MEMORY, SIM_MANAGED_MEMORY, false);
}

SIM_EXPORT CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__));
    enum { ALL_FLAGS = 7 };
    REQUIRE(address && size != 0 && !(flags & ~ALL_FLAGS));
    RETURN_UNLESS(size <= SIZE_MAX / 2, ERROR_OUT_OF_MEMORY);
    return allocate(SIM_PINNED_MEMORY, size, flags, address);
}

SIM_EXPORT CUresult cuMemFreeHost(void *address)
{
    RETURN_IF_ERROR(enter(__func__));
    return deallocate(address, SIM_PINNED_MEMORY, SIM_PINNED_MEMORY, false);
}

SIM_EXPORT CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__));
    enum { ALL_FLAGS = 15 };
    REQUIRE(address && size != 0 && size <= UINTPTR_MAX - (uintptr_t)address && !(flags & ~ALL_FLAGS));
    memory_lock();
    CUresult result = SUCCESS;
    const bool is_taken = block_overlaps(address, size);
    if ((is_reserved(address, size) && !(is_taken && is_in_arena(address, size))) || !is_mapped_memory(address, size))
        result = ERROR_INVALID_VALUE;
    else if (is_taken)
        result = ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (!block_insert(SIM_REGISTERED_MEMORY, address, size, current_context()->ordinal))
        result = ERROR_OUT_OF_MEMORY;
    memory_unlock();
    return result;
}

SIM_EXPORT CUresult cuMemHostUnregister(void *address)
{
    RETURN_IF_ERROR(enter(__func__));
    memory_lock();
    struct block *block = block_find(address);
    bool fits = block && block->memory.base == address && block->memory.type == SIM_REGISTERED_MEMORY;
    if (fits)
        block_remove(block);
    memory_unlock();
    return fits ? SUCCESS : ERROR_HOST_MEMORY_NOT_REGISTERED;
}

SIM_EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(free && total);
    struct sim_device *device = current_context();
    struct sim_memory_figures memory = sim_state_memory(driver_state, device->gpu, device->instance);
    *total = memory.total;
    *free = memory.free;
    return SUCCESS;
}
