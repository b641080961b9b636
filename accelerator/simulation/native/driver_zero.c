/* libcuda.so.1: filling memory with zeros. Whole pages are given back instead of written, and read as zeros from then on:
 * a simulated GPU may be much larger than the host. */
#define _GNU_SOURCE
#include "driver.h"

#include <string.h>
#include <sys/mman.h>

/* Below this it is cheaper to write than to have the pages mapped anew. */
enum { PAGE = 4096, WORTH_IT = 1 << 20 };

/* Whether the pages were given back. Which way there is depends on what is mapped there: a file that several mappings may
 * show, or private memory. */
static bool give_back(char *pages, size_t size)
{
    if (madvise(pages, size, MADV_REMOVE) == 0)
        return true;
    struct sim_memory memory;
    bool is_private = find_memory(pages, &memory) && pages + size <= memory.base + memory.size &&
                      (memory.type == SIM_DEVICE_MEMORY || memory.type == SIM_MANAGED_MEMORY);
    return is_private && !is_shared(pages) && madvise(pages, size, MADV_DONTNEED) == 0;
}

SIM_EXPORT void accelerator_simulation_zero(void *address, size_t size)
{
    char *start = address, *end = start + size;
    char *first = (char *)(((uintptr_t)start + PAGE - 1) / PAGE * PAGE), *last = (char *)((uintptr_t)end / PAGE * PAGE);
    if (size < WORTH_IT || !give_back(first, (size_t)(last - first))) {
        memset(start, 0, size);
        return;
    }
    memset(start, 0, (size_t)(first - start));
    memset(last, 0, (size_t)(end - last));
}
