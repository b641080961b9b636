/* Memory that kernels access: checks, and the heap of device code. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

/* The heaps of device code: malloc and free in kernels. Blocks live until device code frees them. */
static struct allocation {
    u64 low, size;
    int device;
} *heap;
static size_t heap_count, heap_capacity, *heap_used;
static int heap_devices;
static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;

/* The bytes of a device's heap that are in use; NULL without memory for this count. */
static size_t *used_of(int device)
{
    size_t *more = device < heap_devices ? NULL : realloc(heap_used, ((size_t)device + 1) * sizeof *more);
    if (more) {
        memset(more + heap_devices, 0, (size_t)(device + 1 - heap_devices) * sizeof *more);
        heap_used = more;
        heap_devices = device + 1;
    }
    return device < heap_devices ? &heap_used[device] : NULL;
}

u64 allocate(struct worker *worker, u64 size)
{
    const struct sim_kernel_run *request = running(worker)->run->request;
    begin_uninterrupted(worker);
    pthread_mutex_lock(&heap_lock);
    char *memory = NULL;
    size_t *used = used_of(request->device);
    if (used && size > 0 && *used <= request->heap_limit && size <= request->heap_limit - *used) {
        if (heap_count == heap_capacity) {
            size_t capacity = heap_capacity ? 2 * heap_capacity : 64;
            struct allocation *larger = realloc(heap, capacity * sizeof *heap);
            heap = larger ? larger : heap;
            heap_capacity = larger ? capacity : heap_capacity;
        }
        if (heap_count < heap_capacity && (memory = aligned_alloc(16, (size + 15) / 16 * 16))) {
            heap[heap_count++] = (struct allocation){(u64)memory, size, request->device};
            *used += size;
        }
    }
    pthread_mutex_unlock(&heap_lock);
    end_uninterrupted(worker);
    return (u64)memory;
}

void release(struct worker *worker, u64 address)
{
    bool is_found = address == 0;
    begin_uninterrupted(worker);
    pthread_mutex_lock(&heap_lock);
    for (size_t i = 0; i < heap_count && !is_found; i++)
        if (heap[i].low == address) {
            is_found = true;
            heap_used[heap[i].device] -= heap[i].size;
            heap[i] = heap[--heap_count];
            free((void *)address);
        }
    pthread_mutex_unlock(&heap_lock);
    end_uninterrupted(worker);
    if (!is_found)
        fail_kernel(worker, KERNEL_ILLEGAL_ADDRESS, "it frees %#llx, which malloc has not returned", (unsigned long long)address);
}

static bool find_in_heap(struct worker *worker, u64 address, struct span *span)
{
    bool is_found = false;
    begin_uninterrupted(worker);
    pthread_mutex_lock(&heap_lock);
    for (size_t i = 0; i < heap_count && !is_found; i++)
        if (address - heap[i].low < heap[i].size) {
            *span = (struct span){heap[i].low, heap[i].size};
            is_found = true;
        }
    pthread_mutex_unlock(&heap_lock);
    end_uninterrupted(worker);
    return is_found;
}

static bool is_inside(u64 address, u64 low, u64 size, struct span *span)
{
    *span = (struct span){low, size};
    return address - low < size;
}

/* Memory that belongs to the launch: generic addresses may lie there. */
static bool find_in_launch(const struct worker *worker, u64 address, struct span *span)
{
    const struct block *block = worker->block;
    const struct launch *launch = worker->launch;
    const struct run *run = running((struct worker *)worker)->run;
    u64 local_size = block->local_stride * (block->threads - 1) + block->local_span;
    return is_inside(address, (u64)block->shared, block->shared_size, span) ||
           is_inside(address, (u64)block->local, local_size, span) ||
           is_inside(address, (u64)launch->parameters, launch->kernel->parameter_size, span) ||
           (launch->is_cooperative && is_inside(address, (u64)run->grid_workspace, sizeof run->grid_workspace, span));
}

/* Memory of the device, or of the host if kernels may access it. */
static bool find_global(struct worker *worker, u64 address, struct span *span)
{
    struct running_worker *me = running(worker);
    for (u32 i = 0; i < me->recent_count; i++)
        if (address - me->recent[i].low < me->recent[i].size) {
            *span = me->recent[i];
            return true;
        }
    struct sim_kernel_memory memory;
    begin_uninterrupted(worker);
    bool is_found = me->run->request->find_memory(me->run->request->device, address, &memory);
    end_uninterrupted(worker);
    if (!is_found)
        return find_in_heap(worker, address, span);
    *span = (struct span){memory.low, memory.size};
    me->recent[me->recent_count < RECENT_SPANS ? me->recent_count++ : address / 4096 % RECENT_SPANS] = *span;
    return true;
}

bool is_global(struct worker *worker, u64 address)
{
    struct span span;
    return find_global(worker, address, &span);
}

static const struct access *access_of(const struct worker *worker, u32 access)
{
    return &worker->launch->kernel->accesses[access];
}

/* "ld.global.f32 %f1, [%rd4] at kernel.cu:12" */
static void describe_access(const struct access *access, char *text, size_t size)
{
    const char *file = strrchr(access->file, '/');
    if (access->line > 0)
        snprintf(text, size, "%s (%s:%u)", access->text, file ? file + 1 : access->file, access->line);
    else
        snprintf(text, size, "%s", access->text);
}

static void describe_nearest(const struct running_worker *worker, u64 address, char *text, size_t size)
{
    struct sim_kernel_memory memory;
    if (!worker->run->request->find_nearest(address, &memory)) {
        snprintf(text, size, "; no memory is allocated");
        return;
    }
    u64 end = memory.low + memory.size;
    bool is_after = address >= end;
    char device[32] = "";
    if (memory.device >= 0)
        snprintf(device, sizeof device, " of device %d", memory.device);
    if (address >= memory.low && !is_after)
        snprintf(text, size, ", in %llu bytes of %s%s at %#llx", (unsigned long long)memory.size, memory.kind, device,
                 (unsigned long long)memory.low);
    else
        snprintf(text, size, ", %llu bytes %s %llu bytes of %s%s at %#llx",
                 (unsigned long long)(is_after ? address - end : memory.low - address), is_after ? "after" : "before",
                 (unsigned long long)memory.size, memory.kind, device, (unsigned long long)memory.low);
}

struct range find_range(struct worker *worker, u32 group, u64 address, u32 size_log2, u32 access)
{
    u64 size = 1ull << size_log2;
    char instruction[256], nearest[256];
    struct span span = {0};
    const bool is_in_launch = find_in_launch(worker, address, &span);
    const bool is_found = is_in_launch || find_global(worker, address, &span);
    u64 low = (span.low + size - 1) & ~(size - 1);
    if (is_found && !(address & (size - 1)) && address + size <= span.low + span.size) {
        if (is_in_launch || !running(worker)->record)
            return worker->ranges[group] = (struct range){low, (span.low + span.size - low - size) >> size_log2};
        begin_uninterrupted(worker);
        note_access(running(worker)->record, address, size, access);
        end_uninterrupted(worker);
        return worker->ranges[group] = NO_RANGE; /* the next access comes here too */
    }
    describe_access(access_of(worker, access), instruction, sizeof instruction);
    if (is_found && address & (size - 1))
        fail_kernel(worker, KERNEL_MISALIGNED, "%s accesses %llu bytes at %#llx, which is no multiple of %llu", instruction,
             (unsigned long long)size, (unsigned long long)address, (unsigned long long)size);
    begin_uninterrupted(worker);
    describe_nearest(running(worker), address, nearest, sizeof nearest);
    end_uninterrupted(worker);
    fail_kernel(worker, KERNEL_ILLEGAL_ADDRESS, "%s accesses %llu bytes at %#llx%s", instruction, (unsigned long long)size,
         (unsigned long long)address, nearest);
}

enum { SHARED_WINDOW = 16 << 20 }; /* bytes of addresses; beyond it, a GPU takes an instruction as illegal */

void fail_offset(struct worker *worker, const char *space, u64 offset, u64 size, u32 access_size, u32 access)
{
    char instruction[256];
    describe_access(access_of(worker, access), instruction, sizeof instruction);
    if (offset < size && offset % access_size != 0)
        fail_kernel(worker, KERNEL_MISALIGNED, "%s accesses %u bytes at %llu in %s memory, which is no multiple of %u", instruction,
             access_size, (unsigned long long)offset, space, access_size);
    bool is_in_window = strcmp(space, "shared") != 0 || (u32)offset + SIM_RESERVED_SHARED < SHARED_WINDOW;
    fail_kernel(worker, is_in_window ? KERNEL_ILLEGAL_ADDRESS : KERNEL_ILLEGAL_INSTRUCTION,
         "%s accesses %u bytes at %lld in %llu bytes of %s memory", instruction, access_size, (long long)offset,
         (unsigned long long)size, space);
}
