/* Race detection: for which stream torch's allocator has taken memory. */
#include "races.h"

static struct sorted allocations; /* by address: the index, plus 1, of torch's current stream */

/* torch's allocator takes memory for its current stream, and gives it to that stream alone. */
void race_at_allocation(const void *address, int device)
{
    struct race_stream *stream = race_storages ? race_runtime->find_stream(race_storages->current_stream(device), device) : NULL;
    size_t index = 0;
    if (!stream)
        return;
    pthread_mutex_lock(&race_lock);
    clock_of(&present, stream, &index);
    sorted_insert(&allocations, (uintptr_t)address, (void *)(index + 1));
    pthread_mutex_unlock(&race_lock);
}

int stream_of_memory(uintptr_t address)
{
    struct sim_memory memory;
    const struct sorted_item *found = sorted_at_or_below(&allocations, address);
    const bool is_found = found && race_runtime->find_memory((const void *)address, &memory) && (uintptr_t)memory.base == found->key;
    return is_found ? (int)(uintptr_t)found->value - 1 : -1;
}

void forget_allocation(uintptr_t address)
{
    const size_t index = sorted_index(&allocations, address);
    if (index < allocations.count && allocations.items[index].key == address)
        sorted_remove(&allocations, index);
}
