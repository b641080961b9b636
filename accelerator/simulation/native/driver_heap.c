/* libcuda.so.1: the heap of each device, and device memory that processes share (CUDA IPC).
 *
 * A heap is an anonymous sparse file. Each block of device memory maps a part of the file. An importing process opens
 * the file under /proc and maps the same part. Parts are never reused, so the handle of a freed block cannot refer to a
 * newer one. The page before each block is for its id. The export writes the id; freeing the block clears the page. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"

enum { PAGE = 4096, HANDLE_MAGIC = 0x53494d33 };

struct heap {
    int file;
    dev_t file_system;
    ino_t inode;
    uint64_t end; /* offset after the last part */
};

/* Guarded by the memory lock. An inode of 0: the file does not exist yet. */
static struct heap heaps[SIM_MAX_GPUS];

static bool has_file(const struct heap *heap)
{
    /* A program may have closed this descriptor with all others, and the system may have reused its number. */
    struct stat status;
    return heap->inode != 0 && fstat(heap->file, &status) == 0 && status.st_dev == heap->file_system &&
           status.st_ino == heap->inode;
}

static bool create_file(struct heap *heap)
{
    struct stat status;
    int file = memfd_create("cuda-memory", MFD_CLOEXEC);
    if (file < 0)
        return false;
    if (fstat(file, &status) != 0) {
        close(file);
        return false;
    }
    *heap = (struct heap){file, status.st_dev, status.st_ino, 0};
    return true;
}

/* A file that grows beyond RLIMIT_FSIZE raises SIGXFSZ, which ends most programs. */
static bool is_within_file_limit(uint64_t size)
{
    struct rlimit limit;
    return size <= INT64_MAX && getrlimit(RLIMIT_FSIZE, &limit) == 0 && size <= limit.rlim_cur;
}

void *heap_map(int device, size_t size, struct heap_part *part)
{
    struct heap *heap = &heaps[device];
    bool is_in_file = has_file(heap) || create_file(heap);
    uint64_t offset = heap->end + PAGE;
    is_in_file = is_in_file && is_within_file_limit(offset + size) &&
                 ftruncate(heap->file, (off_t)(offset + size)) == 0;
    /* If the file cannot be created or grown, the memory is private to this process and cannot be exported. */
    int file = is_in_file ? heap->file : -1;
    int flags = is_in_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, is_in_file ? (off_t)offset : 0);
    if (base == MAP_FAILED)
        return NULL;
    *part = (struct heap_part){0};
    if (is_in_file) {
        heap->end = offset + size;
        *part = (struct heap_part){heap->inode, offset};
    }
    return base;
}

void heap_unmap(int device, void *base, size_t size, const struct heap_part *part)
{
    /* A hole frees the pages even if another process maps them. After close(file), the last munmap() frees them. */
    const struct heap *heap = &heaps[device];
    if (has_file(heap) && heap->inode == part->inode)
        fallocate(heap->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(part->offset - PAGE), (off_t)(size + PAGE));
    munmap(base, size);
}

struct handle {
    uint32_t magic;
    int pid;
    int file;
    short gpu, instance;
    uint64_t inode, offset, size, id;
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
            .pid = getpid(),
            .file = heap->file,
            .gpu = (short)device->gpu,
            .instance = (short)device->instance,
            .inode = block->part.inode,
            .offset = block->part.offset,
            .size = block->memory.size,
            .id = block->memory.id,
        };
        bool is_id_written = block->part.inode != 0 && has_file(heap) && heap->inode == block->part.inode &&
                         pwrite(heap->file, &exported.id, sizeof exported.id, (off_t)(exported.offset - PAGE)) ==
                             sizeof exported.id;
        result = is_id_written ? SUCCESS : ERROR_OPERATING_SYSTEM;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &exported, sizeof exported);
    }
    memory_unlock();
    return result;
}

/* Whether the file is the heap that the handle names, and its block was not freed. Only memfds have seals. */
static bool has_live_block(int file, const struct handle *handle)
{
    struct stat status;
    uint64_t id;
    return fstat(file, &status) == 0 && status.st_ino == handle->inode && fcntl(file, F_GET_SEALS) >= 0 &&
           pread(file, &id, sizeof id, (off_t)(handle->offset - PAGE)) == sizeof id && id == handle->id;
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
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->file);
    int file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return ERROR_INVALID_HANDLE;
    CUresult result = ERROR_INVALID_HANDLE;
    if (has_live_block(file, handle)) {
        *base = mmap(NULL, round_to_pages(handle->size), PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)handle->offset);
        result = *base == MAP_FAILED ? ERROR_MAP_FAILED : SUCCESS;
    }
    close(file);
    return result;
}

int import_memory(const struct sim_ipc_handle *handle, void **address)
{
    struct handle exported;
    memcpy(&exported, handle, sizeof exported);
    if (exported.magic != HANDLE_MAGIC)
        return ERROR_INVALID_VALUE;
    if (exported.pid == getpid())
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
