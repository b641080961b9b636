/* libcuda.so.1: device memory and pinned memory: allocating, unmapping what is freed, how much is free.
 *
 * Both are host memory that is mapped lazily, so a simulated GPU takes only as much host memory as is written. The free
 * memory is computed from the recorded charges. One address space holds everything, as under CUDA's unified addressing. */
#include "driver.h"

#include <sys/mman.h>

#include "api.h"

static void *map_anonymous(size_t size)
{
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

static void unmap_memory(const struct block *block)
{
    size_t size = round_to_pages(block->memory.size);
    if (block->memory.type == SIM_DEVICE_MEMORY)
        heap_unmap(block->memory.device, block->memory.base, size, &block->part);
    else
        munmap(block->memory.base, size);
}

/* Maps memory and records it. The caller holds the lock. */
static struct block *map_memory(enum sim_memory_type type, size_t size, int device)
{
    struct heap_part part = {0};
    size_t mapped = round_to_pages(size);
    void *base = type == SIM_DEVICE_MEMORY ? heap_map(device, mapped, &part) : map_anonymous(mapped);
    struct block *block = base ? block_insert(type, base, size, device) : NULL;
    if (block) {
        block->part = part;
        block->charged = mapped;
    } else if (base) {
        unmap_memory(&(struct block){.memory = {.type = type, .base = base, .size = size, .device = device}, .part = part});
    }
    return block;
}

/* Charges pinned memory to the host and other memory to the current device. */
static CUresult allocate(enum sim_memory_type type, size_t size, void **address)
{
    int device = current_context()->ordinal;
    if (!charge(type, device, round_to_pages(size)))
        return ERROR_OUT_OF_MEMORY;
    memory_lock();
    struct block *block = map_memory(type, size, device);
    if (block)
        *address = block->memory.base;
    memory_unlock();
    if (!block) {
        release(type, device, round_to_pages(size));
        return ERROR_OUT_OF_MEMORY;
    }
    if (type == SIM_DEVICE_MEMORY)
        fill_new_memory(*address, size);
    return SUCCESS;
}

/* Frees the block that begins at the address, if it has one of the two types and is idle or in use as `is_idle` says. */
static CUresult deallocate(void *address, enum sim_memory_type type, enum sim_memory_type other_type, bool is_idle)
{
    memory_lock();
    struct block *block = block_find(address);
    bool fits = block && block->memory.base == address && block->memory.is_idle == is_idle &&
                (block->memory.type == type || block->memory.type == other_type);
    if (fits) {
        unmap_memory(block);
        release(block->memory.type, block->memory.device, block->charged);
        block_remove(block);
    }
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

int free_idle(void *address)
{
    return deallocate(address, SIM_DEVICE_MEMORY, SIM_DEVICE_MEMORY, true);
}

SIM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    RETURN_IF_ERROR(enter_context(__func__));
    if (!address || size == 0)
        return ERROR_INVALID_VALUE;
    if (size > largest_allocation(current_context()))
        return ERROR_OUT_OF_MEMORY; /* also keeps the rounding below from overflowing */
    return allocate(SIM_DEVICE_MEMORY, size, (void **)address);
}

SIM_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__));
    enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2 };
    if (!address || size == 0 || (flags != ATTACH_GLOBAL && flags != ATTACH_HOST))
        return ERROR_INVALID_VALUE;
    if (size > largest_allocation(current_context()))
        return ERROR_OUT_OF_MEMORY;
    return allocate(SIM_MANAGED_MEMORY, size, (void **)address);
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
    if (!address || size == 0 || (flags & ~ALL_FLAGS))
        return ERROR_INVALID_VALUE;
    if (size > SIZE_MAX / 2)
        return ERROR_OUT_OF_MEMORY;
    return allocate(SIM_PINNED_MEMORY, size, address);
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
    if (!address || size == 0 || size > UINTPTR_MAX - (uintptr_t)address || (flags & ~ALL_FLAGS))
        return ERROR_INVALID_VALUE;
    memory_lock();
    CUresult result = SUCCESS;
    if (is_reserved(address, size) || !is_mapped_memory(address, size))
        result = ERROR_INVALID_VALUE;
    else if (block_overlaps(address, size))
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
    if (!free || !total)
        return ERROR_INVALID_VALUE;
    struct sim_device *device = current_context();
    struct sim_memory_figures memory = sim_state_memory(driver_state, device->gpu, device->instance);
    *total = memory.total;
    *free = memory.free;
    return SUCCESS;
}
