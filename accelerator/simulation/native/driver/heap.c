/* libcuda.so.1: the heap of each device, that of the host, and device memory that processes share (CUDA IPC).
 *
 * A device's heap is an anonymous sparse file. Each block of device memory maps a part of the file. An importing process opens
 * the file under /proc and maps the same part. Parts are never reused, so the handle of a freed block cannot refer to a
 * newer one. The page before each block is for its id. The export writes the id; freeing the block clears the page.
 *
 * A block has a mapping of its own, so that nothing lies behind it, and nothing in its place when it is freed. The system limits
 * the mappings of a process. Of its many blocks, therefore, the later ones share mappings: arenas. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "common/arrays.h"
#include "common/memory_file.h"

enum { HANDLE_MAGIC = 0x53494d34, ARENA_SIZE = 64 << 20 };

struct heap {
    struct memory_file file; /* the host's has none */
    uint64_t end;            /* offset after the last part */
    struct arena *arena;     /* that has space, or NULL */
};

struct arena {
    char *base;
    size_t size, used, block_count;
    struct heap_part part;
};

/* Guarded by the memory lock. */
static struct heap heaps[SIM_MAX_GPUS + 1];
static struct sorted arenas;     /* by address */
static size_t own_mapping_count; /* of blocks outside arenas */

static bool create_file(struct heap *heap)
{
    heap->end = 0;
    return memory_file_create(&heap->file, "cuda-memory");
}

/* Maps a new part at an address of a page, which is more than the 256 bytes that CUDA promises. */
static void *map_part(int number, size_t size, struct heap_part *part)
{
    struct heap *heap = &heaps[number];
    bool is_in_file = number != HOST_HEAP && (memory_file_is_open(&heap->file) || create_file(heap));
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

/* A quarter of the mappings that a process may have: the program needs the others. */
static size_t largest_mapping_count(void)
{
    static size_t count;
    FILE *file = count ? NULL : fopen("/proc/sys/vm/max_map_count", "re");
    if (!count && (!file || fscanf(file, "%zu", &count) != 1))
        count = 65530; /* Linux's own */
    if (file) {
        fclose(file);
        count /= 4;
    }
    return count;
}

static struct arena *find_arena(const void *address)
{
    struct sorted_item *item = sorted_at_or_below(&arenas, (uintptr_t)address);
    struct arena *arena = item ? item->value : NULL;
    return arena && (const char *)address < arena->base + arena->size ? arena : NULL;
}

bool is_in_arena(const void *address, size_t size)
{
    return find_arena((const char *)address + (size > 0 ? size - 1 : 0)) || find_arena(address);
}

static void drop_if_empty(struct arena *arena)
{
    if (arena->block_count > 0)
        return;
    munmap(arena->base, arena->size);
    sorted_remove(&arenas, sorted_index(&arenas, (uintptr_t)arena->base));
    free(arena);
}

static struct arena *new_arena(int number, size_t size)
{
    struct arena *arena = calloc(1, sizeof *arena);
    if (arena && (arena->base = map_part(number, size, &arena->part)) && sorted_insert(&arenas, (uintptr_t)arena->base, arena)) {
        arena->size = size;
        return arena;
    }
    if (arena && arena->base)
        munmap(arena->base, size);
    free(arena);
    return NULL;
}

/* Each block of an arena has a page before it, as each part of the file has. */
static void *map_in_arena(int number, size_t size, struct heap_part *part)
{
    struct heap *heap = &heaps[number];
    if (!heap->arena || heap->arena->size - heap->arena->used < PAGE + size) {
        struct arena *full = heap->arena;
        heap->arena = new_arena(number, PAGE + size > ARENA_SIZE ? PAGE + size : ARENA_SIZE);
        if (full)
            drop_if_empty(full);
        if (!heap->arena)
            return NULL;
    }
    struct arena *arena = heap->arena;
    const size_t start = arena->used + PAGE;
    *part = arena->part;
    if (part->inode)
        part->offset += start;
    arena->used = start + size;
    arena->block_count++;
    return arena->base + start;
}

void *heap_map(int number, size_t size, struct heap_part *part)
{
    if (own_mapping_count >= largest_mapping_count())
        return map_in_arena(number, size, part);
    void *base = map_part(number, size, part);
    own_mapping_count += base != NULL;
    return base;
}

void heap_unmap(int number, void *base, size_t size, const struct heap_part *part)
{
    struct heap *heap = &heaps[number];
    struct arena *arena = find_arena(base);
    if (arena) {
        char *start = (char *)base - PAGE;
        if (madvise(start, size + PAGE, MADV_REMOVE) != 0)
            madvise(start, size + PAGE, MADV_DONTNEED); /* of private memory */
        arena->block_count--;
        if (arena != heap->arena)
            drop_if_empty(arena);
        return;
    }
    /* A hole frees the pages even if another process maps them. After close(file), the last munmap() frees them. */
    if (part->inode && memory_file_is_open(&heap->file) && heap->file.inode == part->inode)
        fallocate(heap->file.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(part->offset - PAGE), (off_t)(size + PAGE));
    munmap(base, size);
    own_mapping_count--;
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
    RETURN_UNLESS(file >= 0, ERROR_INVALID_HANDLE);
    *base = mmap(NULL, round_to_pages(handle->size), PROT_READ | PROT_WRITE, MAP_SHARED, file,
                 (off_t)(handle->file.id_offset + PAGE));
    close(file);
    return *base == MAP_FAILED ? ERROR_MAP_FAILED : SUCCESS;
}

int import_memory(const struct sim_ipc_handle *handle, void **address)
{
    struct handle exported;
    memcpy(&exported, handle, sizeof exported);
    REQUIRE(exported.magic == HANDLE_MAGIC);
    RETURN_UNLESS(exported.file.pid != getpid(), ERROR_INVALID_CONTEXT);
    int device = find_device(exported.gpu, exported.instance);
    RETURN_UNLESS(device >= 0, ERROR_INVALID_DEVICE);
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
