/* libcuda.so.1: virtual memory management, which PyTorch's expandable segments use.
 *
 * Physical memory is an anonymous file, which can be mapped several times and shared as a descriptor. It is charged to its
 * device once, until its last handle is released and its last mapping removed. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20, FILE_DESCRIPTOR_HANDLE = 1, ON_DEVICE = 1, READ_AND_WRITE = 3 };

struct location {
    int type;
    int id;
};

struct properties {
    int type;
    int handle_types;
    struct location location;
    void *win32_meta_data;
    unsigned char flags[8];
};
_Static_assert(sizeof(struct properties) == 32, "as in CUDA's ABI");

struct access {
    struct location location;
    int flags;
};
_Static_assert(sizeof(struct access) == 12, "as in CUDA's ABI");

struct physical {
    int users; /* handles and mappings */
    int file;
    size_t size;
    bool is_charged; /* not if another process created it */
    struct properties properties;
};

static bool is_granular(uint64_t size)
{
    return size % GRANULARITY == 0;
}

static void drop(struct physical *physical)
{
    if (--physical->users > 0)
        return;
    if (physical->is_charged)
        release(physical->properties.location.id, physical->size);
    close(physical->file);
    free(physical);
}

SIM_EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const struct properties *properties, int option)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)option;
    if (!granularity || !properties)
        return ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, uint64_t flags)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)hint, (void)flags;
    if (!address || size == 0 || !is_granular(size))
        return ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    /* Reserve too much, then unmap what lies before the first aligned address and after the end. */
    char *base = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return ERROR_OUT_OF_MEMORY;
    size_t in_front = (alignment - (uintptr_t)base % alignment) % alignment;
    if (in_front > 0)
        munmap(base, in_front);
    if (alignment > in_front)
        munmap(base + in_front + size, alignment - in_front);
    *address = (CUdeviceptr)(base + in_front);
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    RETURN_IF_ERROR(enter(__func__));
    return munmap((void *)address, size) == 0 ? SUCCESS : ERROR_INVALID_VALUE;
}

static CUresult new_physical(int file, size_t size, const struct properties *properties, bool is_charged, void **handle)
{
    struct physical *physical = calloc(1, sizeof *physical);
    if (!physical)
        return ERROR_OUT_OF_MEMORY;
    *physical = (struct physical){1, file, size, is_charged, *properties};
    *handle = physical;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemCreate(void **handle, size_t size, const struct properties *properties, uint64_t flags)
{
    if (!properties)
        return ERROR_INVALID_VALUE;
    int device = properties->location.id;
    RETURN_IF_ERROR(enter_device(__func__, device));
    if (!handle || size == 0 || !is_granular(size) || flags != 0 || properties->location.type != ON_DEVICE)
        return ERROR_INVALID_VALUE;
    if (properties->handle_types & ~FILE_DESCRIPTOR_HANDLE)
        return ERROR_NOT_SUPPORTED;
    if (charge(device, size) != 0)
        return ERROR_OUT_OF_MEMORY;

    CUresult result = ERROR_OUT_OF_MEMORY;
    int file = memfd_create("cuda-physical", MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, (off_t)size) == 0)
        result = new_physical(file, size, properties, true, handle);
    if (result != SUCCESS) {
        if (file >= 0)
            close(file);
        release(device, size);
    }
    return result;
}

SIM_EXPORT CUresult cuMemRelease(void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!handle)
        return ERROR_INVALID_VALUE;
    memory_lock();
    drop(handle);
    memory_unlock();
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    RETURN_IF_ERROR(enter(__func__));
    struct physical *physical = handle;
    if (!physical || !is_granular(address) || !is_granular(size) || offset != 0 || size != physical->size || flags != 0)
        return ERROR_INVALID_VALUE;

    memory_lock();
    CUresult result = ERROR_INVALID_VALUE;
    if (!block_find((void *)address)) {
        /* Inaccessible until cuMemSetAccess. */
        void *base = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0);
        struct block *block = NULL;
        if (base != MAP_FAILED)
            block = block_insert(SIM_MAPPED_MEMORY, base, size, physical->properties.location.id);
        if (block) {
            block->physical = physical;
            physical->users++;
            result = SUCCESS;
        } else {
            result = ERROR_OUT_OF_MEMORY;
        }
    }
    memory_unlock();
    return result;
}

/* Returns the mapped block at the address if it ends within the range, else NULL. */
static struct block *mapped_block(const char *address, const char *end)
{
    struct block *block = block_find(address);
    bool fits = block && block->memory.type == SIM_MAPPED_MEMORY && block->memory.base == address &&
                block->memory.base + block->memory.size <= end;
    return fits ? block : NULL;
}

SIM_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    RETURN_IF_ERROR(enter(__func__));
    char *reached = (char *)address, *end = reached + size;
    struct block *block;
    memory_lock();
    while (reached < end && (block = mapped_block(reached, end))) {
        size_t part = block->memory.size;
        struct physical *physical = block->physical;
        block_remove(block);
        /* The addresses stay reserved. */
        mmap(reached, part, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop(physical);
        reached += part;
    }
    memory_unlock();
    return reached >= end ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const struct access *accesses, size_t count)
{
    RETURN_IF_ERROR(enter(__func__));
    char *reached = (char *)address, *end = reached + size;
    int protection = PROT_NONE;
    for (size_t i = 0; i < count; i++)
        if (accesses[i].flags != 0)
            protection |= accesses[i].flags == READ_AND_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;

    struct block *block;
    memory_lock();
    while (reached < end && (block = mapped_block(reached, end))) {
        mprotect(reached, block->memory.size, protection);
        reached += block->memory.size;
    }
    memory_unlock();
    return reached >= end ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuMemExportToShareableHandle(void *target, void *handle, int handle_type, uint64_t flags)
{
    RETURN_IF_ERROR(enter(__func__));
    struct physical *physical = handle;
    if (!target || !physical || flags != 0)
        return ERROR_INVALID_VALUE;
    if (handle_type != FILE_DESCRIPTOR_HANDLE)
        return ERROR_NOT_SUPPORTED;
    int file = fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
    if (file < 0)
        return ERROR_OPERATING_SYSTEM;
    *(int *)target = file;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemImportFromShareableHandle(void **handle, void *os_handle, int handle_type)
{
    RETURN_IF_ERROR(enter(__func__));
    if (handle_type != FILE_DESCRIPTOR_HANDLE)
        return ERROR_NOT_SUPPORTED;
    struct stat status;
    int descriptor = (int)(intptr_t)os_handle;
    if (!handle || fstat(descriptor, &status) != 0 || status.st_size == 0)
        return ERROR_INVALID_VALUE;
    int file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (file < 0)
        return ERROR_OPERATING_SYSTEM;
    struct sim_device *device = current_context();
    struct properties properties = {1, FILE_DESCRIPTOR_HANDLE, {ON_DEVICE, device ? device->ordinal : 0}, NULL, {0}};
    CUresult result = new_physical(file, (size_t)status.st_size, &properties, false, handle);
    if (result != SUCCESS)
        close(file);
    return result;
}

SIM_EXPORT CUresult cuMemRetainAllocationHandle(void **handle, void *address)
{
    RETURN_IF_ERROR(enter(__func__));
    memory_lock();
    struct block *block = block_find(address);
    bool fits = block && block->memory.type == SIM_MAPPED_MEMORY;
    if (fits) {
        struct physical *physical = block->physical;
        physical->users++;
        *handle = physical;
    }
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(struct properties *properties, void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!properties || !handle)
        return ERROR_INVALID_VALUE;
    *properties = ((struct physical *)handle)->properties;
    return SUCCESS;
}
