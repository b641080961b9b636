/* What a kernel accesses, byte by byte, for race detection. One thread of the CPU runs all blocks of such a launch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

enum { PAGE_BITS = 12, PAGE_WORDS = (1 << PAGE_BITS) / 64, MOST_SPANS = 256 };

/* The bytes of a page that one kind of accesses has touched. */
struct page {
    u64 key; /* the page's number, and the kind in the lowest bits */
    u64 bits[PAGE_WORDS];
};

struct access_record {
    unsigned char *kinds; /* of each instruction: an enum sim_access_kind, maybe with IS_PAIR */
    struct page **pages;  /* a hash table */
    size_t count, capacity;
    struct page *last[SIM_ACCESS_KINDS];
    u64 pair; /* the address of the first half of a pair, or 0 */
};

/* Of a bulk copy or of a matrix, the first and the last address are located. */
enum { KIND_BITS = 2, IS_PAIR = 1 << KIND_BITS };
_Static_assert(SIM_ACCESS_KINDS == 1 << KIND_BITS, "a key has as many bits");

static unsigned char kind_of(const char *text)
{
    static const struct {
        const char *opcode;
        unsigned char kind;
    } opcodes[] = {
        {"st", SIM_WRITE},
        {"wmma.store", SIM_WRITE | IS_PAIR},
        {"atom", SIM_ATOMIC_WRITE},
        {"red", SIM_ATOMIC_WRITE},
        {"wmma.load", SIM_READ | IS_PAIR},
        {"cp.reduce.async.bulk", SIM_ATOMIC_WRITE | IS_PAIR},
        {"cp.async.bulk.global", SIM_WRITE | IS_PAIR},
        {"cp.async.bulk", SIM_READ | IS_PAIR},
    };
    const char *opcode = text + (*text == '@' ? strcspn(text, " ") : 0);
    opcode += strspn(opcode, " ");
    unsigned char kind = SIM_READ;
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++)
        if (strncmp(opcode, opcodes[i].opcode, strlen(opcodes[i].opcode)) == 0) {
            kind = opcodes[i].kind;
            break;
        }
    char words[64];
    snprintf(words, sizeof words, "%.*s", (int)strcspn(opcode, " "), opcode);
    const bool is_strong = strstr(words, ".volatile") || strstr(words, ".relaxed") || strstr(words, ".acquire") ||
                           strstr(words, ".release");
    return is_strong && kind <= SIM_WRITE ? kind + SIM_ATOMIC_READ : kind;
}

struct access_record *new_access_record(const struct kernel *kernel)
{
    struct access_record *record = calloc(1, sizeof *record);
    if (!record || !(record->kinds = calloc(kernel->access_count + 1, 1))) {
        free(record);
        return NULL;
    }
    for (u32 i = 0; i < kernel->access_count; i++)
        record->kinds[i] = kind_of(kernel->accesses[i].text);
    return record;
}

void free_access_record(struct access_record *record)
{
    for (size_t i = 0; i < record->capacity; i++)
        free(record->pages[i]);
    free(record->pages);
    free(record->kinds);
    free(record);
}

static struct page **slot_of(struct access_record *record, u64 key)
{
    size_t index = (size_t)(key * 0x9e3779b97f4a7c15 >> 20) & (record->capacity - 1);
    while (record->pages[index] && record->pages[index]->key != key)
        index = (index + 1) & (record->capacity - 1);
    return &record->pages[index];
}

static bool grow(struct access_record *record)
{
    struct page **old = record->pages;
    const size_t old_capacity = record->capacity, capacity = old_capacity ? 2 * old_capacity : 1024;
    struct page **pages = calloc(capacity, sizeof *pages);
    if (!pages)
        return false;
    record->pages = pages;
    record->capacity = capacity;
    for (size_t i = 0; i < old_capacity; i++)
        if (old[i])
            *slot_of(record, old[i]->key) = old[i];
    free(old);
    return true;
}

/* Without memory, returns NULL, and the access is not recorded. */
static struct page *page_of(struct access_record *record, u64 key, unsigned kind)
{
    if (record->last[kind] && record->last[kind]->key == key)
        return record->last[kind];
    if (2 * record->count >= record->capacity && !grow(record))
        return NULL;
    struct page **slot = slot_of(record, key);
    if (!*slot && (*slot = calloc(1, sizeof **slot))) {
        (*slot)->key = key;
        record->count++;
    }
    return record->last[kind] = *slot;
}

void note_access(struct access_record *record, u64 address, u64 size, u32 access)
{
    const unsigned kind = record->kinds[access] & (IS_PAIR - 1);
    if (record->kinds[access] & IS_PAIR) {
        const u64 first = record->pair;
        record->pair = first ? 0 : address;
        if (!first)
            return;
        size += first < address ? address - first : first - address;
        address = first < address ? first : address;
    }
    while (size > 0) {
        const u64 offset = address & ((1 << PAGE_BITS) - 1), bit = offset % 64;
        struct page *page = page_of(record, address >> PAGE_BITS << KIND_BITS | kind, kind);
        const u64 count = size < 64 - bit ? size : 64 - bit;
        if (page)
            page->bits[offset / 64] |= (count == 64 ? ~0ull : (1ull << count) - 1) << bit;
        address += count;
        size -= count;
    }
}

static int compare_keys(const void *first, const void *second)
{
    const u64 a = (*(struct page *const *)first)->key, b = (*(struct page *const *)second)->key;
    const u64 kinds = SIM_ACCESS_KINDS - 1;
    return (a & kinds) != (b & kinds) ? ((a & kinds) > (b & kinds)) - ((a & kinds) < (b & kinds)) : (a > b) - (a < b);
}

/* Adds bytes to the spans, or to the last one if it is of the kind and no further away than the gap. */
static bool add_span(struct sim_kernel_accesses *spans, size_t *capacity, u64 low, u64 size, unsigned kind, u64 gap, bool is_part)
{
    struct sim_kernel_access *last = spans->count ? &spans->items[spans->count - 1] : NULL;
    if (last && last->kind == kind && low - (last->low + last->size) <= gap) {
        last->is_part |= is_part || low != last->low + last->size;
        last->size = low + size - last->low;
        return true;
    }
    if (spans->count == *capacity) {
        struct sim_kernel_access *larger = realloc(spans->items, (*capacity = 2 * *capacity + 64) * sizeof *larger);
        if (!larger)
            return false;
        spans->items = larger;
    }
    spans->items[spans->count++] = (struct sim_kernel_access){low, size, kind, is_part};
    return true;
}

/* Joins spans, the nearest first, until they are few: of those, only a part is accessed. */
static void join_spans(struct sim_kernel_accesses *spans)
{
    for (u64 gap = 16; spans->count > MOST_SPANS && gap; gap *= 2) {
        struct sim_kernel_accesses joined = {spans->items, 0};
        size_t capacity = spans->count;
        for (size_t i = 0; i < spans->count; i++) {
            const struct sim_kernel_access span = spans->items[i];
            add_span(&joined, &capacity, span.low, span.size, span.kind, gap, span.is_part);
        }
        spans->count = joined.count;
    }
}

void collect_accesses(struct access_record *record, struct sim_kernel_accesses *spans)
{
    struct page **pages = calloc(record->count + 1, sizeof *pages);
    size_t count = 0, capacity = 0;
    bool has_room = pages != NULL;
    for (size_t i = 0; i < record->capacity && has_room; i++)
        if (record->pages[i])
            pages[count++] = record->pages[i];
    if (count)
        qsort(pages, count, sizeof *pages, compare_keys);
    for (size_t i = 0; i < count && has_room; i++)
        for (u64 word = 0; word < PAGE_WORDS && has_room; word++)
            for (u64 bits = pages[i]->bits[word], bit = 0; bits && has_room;) {
                bit = (u64)__builtin_ctzll(bits);
                const u64 rest = ~(bits >> bit), size = rest ? (u64)__builtin_ctzll(rest) : 64;
                const u64 low = (pages[i]->key >> KIND_BITS << PAGE_BITS) + word * 64 + bit;
                has_room = add_span(spans, &capacity, low, size, pages[i]->key & (SIM_ACCESS_KINDS - 1), 0, false);
                bits = bit + size >= 64 ? 0 : bits >> (bit + size) << (bit + size);
            }
    free(pages);
    join_spans(spans);
}
