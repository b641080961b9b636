/* libcuda.so.1: device memory between processes.
 *
 * An exported block moves to an anonymous file and keeps its addresses. The handle names the process and the descriptor;
 * the importer opens the file under /proc. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HANDLE_MAGIC = 0x53494d31 };

struct handle {
    uint32_t magic;
    int pid;
    int file;
    int gpu, instance;
    size_t size;
};

_Static_assert(sizeof(struct handle) <= sizeof(struct sim_ipc_handle), "a handle is carried in 64 bytes");

/* Skips zero pages, so that the file takes no more memory than was written. */
static void copy_used_pages(char *target, const char *source, size_t size)
{
    enum { PAGE = 4096 };
    static const char zeros[PAGE];
    for (size_t offset = 0; offset < size; offset += PAGE)
        if (memcmp(source + offset, zeros, PAGE) != 0)
            memcpy(target + offset, source + offset, PAGE);
}

static CUresult move_to_file(struct block *block)
{
    if (block->file >= 0)
        return SUCCESS;
    size_t size = round_to_pages(block->memory.size);
    int file = memfd_create("cuda-memory", MFD_CLOEXEC);
    if (file < 0)
        return ERROR_OPERATING_SYSTEM;
    void *staging = MAP_FAILED;
    if (ftruncate(file, (off_t)size) == 0)
        staging = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (staging == MAP_FAILED) {
        close(file);
        return ERROR_OPERATING_SYSTEM;
    }
    copy_used_pages(staging, block->memory.base, size);
    munmap(staging, size);
    if (mmap(block->memory.base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        close(file);
        return ERROR_OPERATING_SYSTEM;
    }
    block->file = file;
    return SUCCESS;
}

int export_memory(const void *address, struct sim_ipc_handle *handle)
{
    memory_lock();
    struct block *block = block_find(address);
    CUresult result = ERROR_INVALID_VALUE;
    if (block && block->memory.type == SIM_DEVICE_MEMORY)
        result = move_to_file(block);
    if (result == SUCCESS) {
        const struct sim_device *device = &devices[block->memory.device];
        struct handle exported = {HANDLE_MAGIC, getpid(), block->file, device->gpu, device->instance, block->memory.size};
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

    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", exported.pid, exported.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return ERROR_INVALID_VALUE;
    void *base = mmap(NULL, round_to_pages(exported.size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED)
        return ERROR_MAP_FAILED;

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
    bool fits = block && block->memory.base == address && block->memory.type == SIM_IMPORTED_MEMORY;
    if (fits) {
        size_t size = round_to_pages(block->memory.size);
        block_remove(block);
        munmap(address, size);
    }
    memory_unlock();
    return fits ? SUCCESS : ERROR_INVALID_VALUE;
}
