/* Arrays that grow, and arrays ordered by a key. */
#ifndef ACCELERATOR_SIM_ARRAYS_H
#define ACCELERATOR_SIM_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Makes space for at least `count` items of the given size. Returns false, and changes nothing, without memory. */
static inline bool array_reserve(void **items, size_t *capacity, size_t count, size_t item_size)
{
    if (count <= *capacity)
        return true;
    size_t larger = *capacity ? 2 * *capacity : 16;
    larger = larger < count ? count : larger;
    void *moved = realloc(*items, larger * item_size);
    if (!moved)
        return false;
    *items = moved;
    *capacity = larger;
    return true;
}

struct sorted_item {
    uintptr_t key;
    void *value;
};

struct sorted {
    struct sorted_item *items; /* by ascending key */
    size_t count, capacity;
};

/* The index of the first item whose key is at least `key`; the count if there is none. */
static inline size_t sorted_index(const struct sorted *sorted, uintptr_t key)
{
    size_t low = 0, high = sorted->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sorted->items[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The item with the largest key that is at most `key`, or NULL. */
static inline struct sorted_item *sorted_at_or_below(const struct sorted *sorted, uintptr_t key)
{
    size_t index = key == UINTPTR_MAX ? sorted->count : sorted_index(sorted, key + 1);
    return index > 0 ? &sorted->items[index - 1] : NULL;
}

static inline bool sorted_insert(struct sorted *sorted, uintptr_t key, void *value)
{
    if (!array_reserve((void **)&sorted->items, &sorted->capacity, sorted->count + 1, sizeof *sorted->items))
        return false;
    size_t index = sorted_index(sorted, key);
    memmove(&sorted->items[index + 1], &sorted->items[index], (sorted->count - index) * sizeof *sorted->items);
    sorted->items[index] = (struct sorted_item){key, value};
    sorted->count++;
    return true;
}

static inline struct sorted_item sorted_remove(struct sorted *sorted, size_t index)
{
    struct sorted_item item = sorted->items[index];
    sorted->count--;
    memmove(&sorted->items[index], &sorted->items[index + 1], (sorted->count - index) * sizeof *sorted->items);
    return item;
}

#endif
