/* libcuda.so.1: filling memory with zeros or NaN. Whole pages are discarded instead of written, because a simulated GPU may be
 * much larger than the host; a discarded page reads as zeros. */
#include "driver.h"

#include <string.h>
#include <sys/mman.h>

/* Smaller ranges are cheaper to write than to discard and fault in again. */
enum { LEAST_DISCARDED = 1 << 20 };

/* Returns whether the pages were discarded. MADV_REMOVE discards pages of a file, MADV_DONTNEED those of private memory. */
static bool discard(char *pages, size_t size)
{
    if (madvise(pages, size, MADV_REMOVE) == 0)
        return true;
    struct sim_memory memory;
    bool is_private = find_memory(pages, &memory) && pages + size <= memory.base + memory.size &&
                      memory.type == SIM_MANAGED_MEMORY;
    return is_private && madvise(pages, size, MADV_DONTNEED) == 0;
}

SIM_EXPORT void accelerator_simulation_zero(void *address, size_t size)
{
    char *start = address, *end = start + size;
    char *first = (char *)(((uintptr_t)start + PAGE - 1) / PAGE * PAGE), *last = (char *)((uintptr_t)end / PAGE * PAGE);
    if (size < LEAST_DISCARDED || !discard(first, (size_t)(last - first))) {
        memset(start, 0, size);
        return;
    }
    memset(start, 0, (size_t)(first - start));
    memset(last, 0, (size_t)(end - last));
}

void fill_new_memory(void *address, size_t size)
{
    if (sim_config()->fills_with_nan)
        memset(address, 0xff, size); /* a NaN of every floating-point type */
}
