/* Buffers for blocks and stacks, which run.c fills. The system maps their pages when they are first used, so they are used again. */
#include <sys/mman.h>

#include "library.h"

struct buffer {
    size_t size; /* with this header */
    struct buffer *next;
    char padding[48];
};
_Static_assert(sizeof(struct buffer) == 64, "what follows the header is aligned to a cache line");

enum { SMALLEST_BUFFER = 64 << 10, MAX_KEPT = 16 };
static struct buffer *kept;
static u32 kept_count;
static pthread_mutex_t buffer_lock = PTHREAD_MUTEX_INITIALIZER;

void *take_buffer(size_t size)
{
    size += sizeof(struct buffer);
    size = size < SMALLEST_BUFFER ? SMALLEST_BUFFER : (size + 4095) & ~(size_t)4095;
    pthread_mutex_lock(&buffer_lock);
    struct buffer **link = &kept;
    while (*link && ((*link)->size < size || (*link)->size > 4 * size))
        link = &(*link)->next;
    struct buffer *buffer = *link;
    if (buffer) {
        *link = buffer->next;
        kept_count--;
    }
    pthread_mutex_unlock(&buffer_lock);
    if (!buffer) {
        buffer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (buffer == MAP_FAILED)
            return NULL;
        buffer->size = size;
    }
    return buffer + 1;
}

void return_buffer(void *memory)
{
    if (!memory)
        return;
    struct buffer *buffer = (struct buffer *)memory - 1;
    pthread_mutex_lock(&buffer_lock);
    bool is_kept = kept_count < MAX_KEPT;
    if (is_kept) {
        buffer->next = kept;
        kept = buffer;
        kept_count++;
    }
    pthread_mutex_unlock(&buffer_lock);
    if (!is_kept)
        munmap(buffer, buffer->size);
}
