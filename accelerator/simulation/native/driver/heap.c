/* libcuda.so.1: the heap of each device, and device memory that processes share (CUDA IPC).
 *
 * A heap is an anonymous sparse file. Each block of device memory maps a part of the file. An importing process opens
 * the file under /proc and maps the same part. Parts are never reused, so the handle of a freed block cannot refer to a
 * newer one. The page before each block is for its id. The export writes the id; freeing the block clears the page. */
#include <string.h>

#include "driver.h"
#include "common/memory_file.h"

enum { HANDLE_MAGIC = 0x53494d34 };

struct heap {
    struct memory_file file;
    uint64_t end; /* offset after the last part */
};

/* Guarded by the memory lock. */
static struct heap heaps[SIM_MAX_GPUS];

static bool create_file(struct heap *heap)
{
    heap->end = 0;
    return memory_file_create(&heap->file, "cuda-memory");
}

/* Maps a new part at an address of a page, which is more than the 256 bytes that CUDA promises. */
void *heap_map(int device, size_t size, struct heap_part *part)
{
    struct heap *heap = &heaps[device];
    bool is_in_file = memory_file_is_open(&heap->file) || create_file(heap);
    uint64_t offset = heap->end + PAGE;
    is_in_file = is_in_file && memory_file_resize(&heap->file, offset + size);
    /* If the file cannot be created or grown, the memory is private to this process and cannot be exported. */
    int file = is_in_file ? heap->file.descriptor : -1;
    int flags = is_in_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, is_in_file ? (off_t)offset : 0);
    if (base == MAP_FAILED)
        return NULL;
    *part = (struct heap_part){0};
    if (is_in_file) {
        heap->end = offset + size;
        *part = (struct heap_part){heap->file.inode, offset};
    }
    return base;
}

void heap_unmap(int device, void *base, size_t size, const struct heap_part *part)
{
    /* A hole frees the pages even if another process maps them. After close(file), the last munmap() frees them. */
    const struct heap *heap = &heaps[device];
    if (memory_file_is_open(&heap->file) && heap->file.inode == part->inode)
        fallocate(heap->file.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(part->offset - PAGE), (off_t)(size + PAGE));
    munmap(base, size);
}

struct handle {
    uint32_t magic;
    short gpu, instance;
    struct memory_file_name file;
    uint64_t size;
};
_Static_assert(sizeof(struct handle) <= sizeof(struct sim_ipc_handle), "a handle must fit into CUDA's IPC handle");

int export_memory(const void *address, struct sim_ipc_handle *handle)
{
    memory_lock();
    const struct block *block = block_find(address);
    CUresult result = ERROR_INVALID_VALUE;
    if (block && block->memory.type == SIM_DEVICE_MEMORY && !block->memory.is_idle) {
        const struct sim_device *device = &devices[block->memory.device];
        const struct heap *heap = &heaps[block->memory.device];
        struct handle exported = {
            .magic = HANDLE_MAGIC,
            .gpu = (short)device->gpu,
            .instance = (short)device->instance,
            .size = block->memory.size,
        };
        bool is_exported = block->part.inode != 0 && heap->file.inode == block->part.inode &&
                           memory_file_export(&heap->file, block->memory.id, block->part.offset - PAGE, &exported.file);
        result = is_exported ? SUCCESS : ERROR_OPERATING_SYSTEM;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &exported, sizeof exported);
    }
    memory_unlock();
    return result;
}

static int find_device(int gpu, int instance)
{
    for (int i = 0; i < device_count; i++)
        if (devices[i].gpu == gpu && devices[i].instance == instance)
            return i;
    return -1;
}

static CUresult map_exported(const struct handle *handle, void **base)
{
    int file = memory_file_open(&handle->file);
    if (file < 0)
        return ERROR_INVALID_HANDLE;
    *base = mmap(NULL, round_to_pages(handle->size), PROT_READ | PROT_WRITE, MAP_SHARED, file,
                 (off_t)(handle->file.id_offset + PAGE));
    close(file);
    return *base == MAP_FAILED ? ERROR_MAP_FAILED : SUCCESS;
}

int import_memory(const struct sim_ipc_handle *handle, void **address)
{
    struct handle exported;
    memcpy(&exported, handle, sizeof exported);
    if (exported.magic != HANDLE_MAGIC)
        return ERROR_INVALID_VALUE;
    if (exported.file.pid == getpid())
        return ERROR_INVALID_CONTEXT;
    int device = find_device(exported.gpu, exported.instance);
    if (device < 0)
        return ERROR_INVALID_DEVICE;
    void *base;
    RETURN_IF_ERROR(map_exported(&exported, &base));

    memory_lock();
    struct block *block = block_insert(SIM_IMPORTED_MEMORY, base, exported.size, device);
    memory_unlock();
    if (!block) {
        munmap(base, round_to_pages(exported.size));
        return ERROR_OUT_OF_MEMORY;
    }
    *address = base;
    return SUCCESS;
}

int close_imported(void *address)
{
    memory_lock();
    struct block *block = block_find(address);
    bool is_imported = block && block->memory.base == address && block->memory.type == SIM_IMPORTED_MEMORY;
    if (is_imported) {
        size_t size = round_to_pages(block->memory.size);
        block_remove(block);
        munmap(address, size);
    }
    memory_unlock();
    return is_imported ? SUCCESS : ERROR_INVALID_VALUE;
}
