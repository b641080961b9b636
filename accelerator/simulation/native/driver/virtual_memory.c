/* libcuda.so.1: virtual memory management (cuMemCreate, cuMemMap, ...), which PyTorch's expandable segments use.
 *
 * Physical memory is an anonymous file, which can be mapped several times and shared as a descriptor. It is charged to its
 * device once, until its last handle is released and its last mapping removed. */
#include "driver.h"

#include <stdlib.h>

#include "common/arrays.h"
#include "common/memory_file.h"

enum { GRANULARITY = 2 << 20, FILE_DESCRIPTOR_HANDLE = 1, ON_DEVICE = 1 };
enum { NO_ACCESS = 0, READ = 1, READ_AND_WRITE = 3 };

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

/* Handles are numbers that are never reused, so that a released one is recognized. */
struct physical {
    uintptr_t handle;
    int handle_users, mappings;
    struct memory_file file;
    size_t size;
    bool is_charged; /* not if another process created it */
    struct properties properties;
};

/* Both are guarded by the memory lock. */
static struct sorted physicals;    /* by handle */
static struct sorted reservations; /* by address; the value is the size */

static bool is_granular(uint64_t size)
{
    return size % GRANULARITY == 0;
}

static struct physical *find_physical(void *handle)
{
    size_t index = sorted_index(&physicals, (uintptr_t)handle);
    bool exists = index < physicals.count && physicals.items[index].key == (uintptr_t)handle;
    return exists ? physicals.items[index].value : NULL;
}

/* Finds memory whose handle can still be used. */
static struct physical *find_held(void *handle)
{
    struct physical *physical = find_physical(handle);
    return physical && physical->handle_users > 0 ? physical : NULL;
}

static void free_if_unused(struct physical *physical)
{
    if (physical->handle_users + physical->mappings > 0)
        return;
    if (physical->is_charged)
        release(SIM_MAPPED_MEMORY, physical->properties.location.id, physical->size);
    memory_file_close(&physical->file);
    sorted_remove(&physicals, sorted_index(&physicals, physical->handle));
    free(physical);
}

/* Returns the reservation that holds the whole range, or NULL. */
static struct sorted_item *find_reservation(CUdeviceptr address, size_t size)
{
    struct sorted_item *item = sorted_at_or_below(&reservations, address);
    if (!item || address - item->key > (size_t)item->value)
        return NULL;
    return size <= (size_t)item->value - (address - item->key) ? item : NULL;
}

bool is_reserved(const void *address, size_t size)
{
    struct sorted_item *item = sorted_at_or_below(&reservations, (uintptr_t)address + (size > 0 ? size - 1 : 0));
    return (item && item->key + (size_t)item->value > (uintptr_t)address) || is_in_arena(address, size);
}

SIM_EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const struct properties *properties, int option)
{
    enum { MINIMUM = 0, RECOMMENDED = 1 };
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(granularity && properties && option >= MINIMUM && option <= RECOMMENDED);
    *granularity = GRANULARITY;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, uint64_t flags)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)hint;
    REQUIRE(address && size != 0 && is_granular(size) && (alignment & (alignment - 1)) == 0 && flags == 0);
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    size_t mapped;
    RETURN_UNLESS(!__builtin_add_overflow(size, alignment, &mapped), ERROR_OUT_OF_MEMORY);
    /* Reserve too much, then unmap what lies before the first aligned address and after the end. */
    char *base = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    RETURN_UNLESS(base != MAP_FAILED, ERROR_OUT_OF_MEMORY);
    size_t in_front = (alignment - (uintptr_t)base % alignment) % alignment;
    if (in_front > 0)
        munmap(base, in_front);
    if (alignment > in_front)
        munmap(base + in_front + size, alignment - in_front);
    memory_lock();
    bool is_recorded = sorted_insert(&reservations, (uintptr_t)base + in_front, (void *)size);
    memory_unlock();
    if (!is_recorded) {
        munmap(base + in_front, size);
        return ERROR_OUT_OF_MEMORY;
    }
    *address = (CUdeviceptr)(base + in_front);
    return SUCCESS;
}

/* Frees a whole reservation without mappings. */
SIM_EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    RETURN_IF_ERROR(enter(__func__));
    memory_lock();
    struct sorted_item *item = find_reservation(address, size);
    bool fits = item && item->key == address && (size_t)item->value == size && !block_overlaps((void *)address, size);
    if (fits) {
        munmap((void *)address, size);
        sorted_remove(&reservations, (size_t)(item - reservations.items));
    }
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

static CUresult new_physical(const struct memory_file *file, size_t size, const struct properties *properties, bool is_charged, void **handle)
{
    static uintptr_t last_handle;
    struct physical *physical = calloc(1, sizeof *physical);
    RETURN_UNLESS(physical, ERROR_OUT_OF_MEMORY);
    memory_lock();
    *physical = (struct physical){++last_handle, 1, 0, *file, size, is_charged, *properties};
    bool is_recorded = sorted_insert(&physicals, physical->handle, physical);
    if (is_recorded)
        *handle = (void *)physical->handle;
    else
        free(physical);
    memory_unlock();
    return is_recorded ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

static bool fill_file(int file, size_t size)
{
    if (!sim_config()->fills_with_nan)
        return true;
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (pages == MAP_FAILED)
        return false;
    fill_new_memory(pages, size);
    munmap(pages, size);
    return true;
}

SIM_EXPORT CUresult cuMemCreate(void **handle, size_t size, const struct properties *properties, uint64_t flags)
{
    enum { PINNED = 1 };
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(properties);
    int device = properties->location.id;
    RETURN_IF_ERROR(enter_device(__func__, device));
    if (!handle || size == 0 || !is_granular(size) || flags != 0 || properties->location.type != ON_DEVICE ||
        properties->type != PINNED)
        return ERROR_INVALID_VALUE;
    RETURN_UNLESS(!(properties->handle_types & ~FILE_DESCRIPTOR_HANDLE), ERROR_NOT_SUPPORTED);
    RETURN_UNLESS(charge(SIM_MAPPED_MEMORY, device, size), ERROR_OUT_OF_MEMORY);

    static bool is_explained;
    if (!is_within_file_limit(size) && !is_explained) {
        is_explained = true;
        fprintf(stderr, "accelerator: cuMemCreate of %zu bytes fails: %s\n", size, file_error_text(EFBIG));
    }
    CUresult result = ERROR_OUT_OF_MEMORY;
    struct memory_file file;
    if (memory_file_create(&file, "cuda-physical") && memory_file_resize(&file, size) &&
        fill_file(file.descriptor, size))
        result = new_physical(&file, size, properties, true, handle);
    if (result != SUCCESS) {
        memory_file_close(&file);
        release(SIM_MAPPED_MEMORY, device, size);
    }
    return result;
}

SIM_EXPORT CUresult cuMemRelease(void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    memory_lock();
    struct physical *physical = find_held(handle);
    if (physical) {
        physical->handle_users--;
        free_if_unused(physical);
    }
    memory_unlock();
    return physical ? SUCCESS : ERROR_INVALID_VALUE;
}

static CUresult map_physical(CUdeviceptr address, struct physical *physical)
{
    RETURN_UNLESS(memory_file_is_open(&physical->file), ERROR_OPERATING_SYSTEM);
    /* Inaccessible until cuMemSetAccess. */
    void *base = mmap((void *)address, physical->size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file.descriptor, 0);
    RETURN_UNLESS(base != MAP_FAILED, ERROR_OUT_OF_MEMORY);
    struct block *block = block_insert(SIM_MAPPED_MEMORY, base, physical->size, physical->properties.location.id);
    RETURN_UNLESS(block, ERROR_OUT_OF_MEMORY);
    block->physical = physical;
    physical->mappings++;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    RETURN_IF_ERROR(enter(__func__));
    memory_lock();
    CUresult result = ERROR_INVALID_VALUE;
    struct physical *physical = find_held(handle);
    if (physical && is_granular(address) && offset == 0 && size == physical->size && flags == 0 &&
        find_reservation(address, size) && !block_overlaps((void *)address, size))
        result = map_physical(address, physical);
    memory_unlock();
    end_of_allocation();
    return result;
}

/* Whether the range consists of whole mapped blocks. */
static bool is_whole_blocks(const char *start, size_t size)
{
    if (size == 0 || size > UINTPTR_MAX - (uintptr_t)start)
        return false;
    uintptr_t reached = (uintptr_t)start, end = reached + size;
    while (reached < end) {
        const struct block *block = block_find((void *)reached);
        if (!block || block->memory.type != SIM_MAPPED_MEMORY || (uintptr_t)block->memory.base != reached)
            return false;
        reached += block->memory.size;
    }
    return reached == end;
}

static void unmap_block(struct block *block)
{
    struct physical *physical = block->physical;
    /* The addresses stay reserved. */
    mmap(block->memory.base, block->memory.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    block_remove(block);
    physical->mappings--;
    free_if_unused(physical);
}

SIM_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    RETURN_IF_ERROR(enter(__func__));
    char *start = (char *)address;
    memory_lock();
    bool fits = is_whole_blocks(start, size);
    for (size_t done = 0, part; fits && done < size; done += part) {
        struct block *block = block_find(start + done);
        part = block->memory.size;
        unmap_block(block);
    }
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

static CUresult read_accesses(const struct access *accesses, size_t count, int *protection)
{
    REQUIRE(accesses && count != 0);
    for (size_t i = 0; i < count; i++) {
        int flags = accesses[i].flags;
        REQUIRE(accesses[i].location.type == ON_DEVICE && (flags == NO_ACCESS || flags == READ || flags == READ_AND_WRITE));
        RETURN_UNLESS(is_device(accesses[i].location.id), ERROR_INVALID_DEVICE);
        *protection |= flags == NO_ACCESS ? PROT_NONE : flags == READ ? PROT_READ : PROT_READ | PROT_WRITE;
    }
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const struct access *accesses, size_t count)
{
    int protection = PROT_NONE;
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(read_accesses(accesses, count, &protection));
    memory_lock();
    bool fits = is_whole_blocks((char *)address, size);
    if (fits)
        mprotect((void *)address, size, protection);
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuMemExportToShareableHandle(void *target, void *handle, int handle_type, uint64_t flags)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(target && flags == 0);
    RETURN_UNLESS(handle_type == FILE_DESCRIPTOR_HANDLE, ERROR_NOT_SUPPORTED);
    memory_lock();
    struct physical *physical = find_held(handle);
    bool is_open = physical && memory_file_is_open(&physical->file);
    int file = is_open ? fcntl(physical->file.descriptor, F_DUPFD_CLOEXEC, 0) : -1;
    memory_unlock();
    REQUIRE(physical);
    RETURN_UNLESS(file >= 0, ERROR_OPERATING_SYSTEM);
    *(int *)target = file;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemImportFromShareableHandle(void **handle, void *os_handle, int handle_type)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_UNLESS(handle_type == FILE_DESCRIPTOR_HANDLE, ERROR_NOT_SUPPORTED);
    struct stat status;
    int descriptor = (int)(intptr_t)os_handle;
    if (!handle || !is_anonymous_file(descriptor) || fstat(descriptor, &status) != 0 || status.st_size == 0 ||
        !is_granular((uint64_t)status.st_size))
        return ERROR_INVALID_VALUE;
    struct memory_file file;
    RETURN_UNLESS(memory_file_from(&file, fcntl(descriptor, F_DUPFD_CLOEXEC, 0)), ERROR_OPERATING_SYSTEM);
    struct sim_device *device = current_context();
    struct properties properties = {1, FILE_DESCRIPTOR_HANDLE, {ON_DEVICE, device ? device->ordinal : 0}, NULL, {0}};
    CUresult result = new_physical(&file, (size_t)status.st_size, &properties, false, handle);
    if (result != SUCCESS)
        memory_file_close(&file);
    return result;
}

SIM_EXPORT CUresult cuMemRetainAllocationHandle(void **handle, void *address)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(handle);
    memory_lock();
    struct block *block = block_find(address);
    bool fits = block && block->memory.type == SIM_MAPPED_MEMORY;
    if (fits) {
        struct physical *physical = block->physical;
        physical->handle_users++;
        *handle = (void *)physical->handle;
    }
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(struct properties *properties, void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    memory_lock();
    struct physical *physical = properties ? find_held(handle) : NULL;
    if (physical)
        *properties = physical->properties;
    memory_unlock();
    return physical ? SUCCESS : ERROR_INVALID_VALUE;
}
