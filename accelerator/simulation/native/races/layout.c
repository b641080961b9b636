/* Race detection: which bytes an access touches, and how many of them another one touches too. */
#include "races.h"

enum { MAXIMUM_PIECES = 1 << 22 };

struct race_layout layout_of_bytes(const void *address, size_t size)
{
    return (struct race_layout){.address = (uintptr_t)address, .item_size = 1, .dims = 1, .sizes = {(int64_t)size}, .strides = {1}};
}

struct race_range layout_range(const struct race_layout *layout)
{
    if (layout->dims < 0)
        return (struct race_range){layout->address, layout->address + (size_t)layout->sizes[0]};
    int64_t last = 0;
    for (int64_t i = 0; i < layout->dims; i++) {
        if (layout->sizes[i] == 0)
            return (struct race_range){layout->address, layout->address};
        last += (layout->sizes[i] - 1) * layout->strides[i];
    }
    return (struct race_range){layout->address, layout->address + (size_t)((last + 1) * layout->item_size)};
}

/* Of the elements that have an address of their own; an expanded dimension repeats addresses. */
size_t layout_bytes(const struct race_layout *layout)
{
    if (layout->dims < 0)
        return (size_t)layout->sizes[0];
    int64_t count = 1;
    for (int64_t i = 0; i < layout->dims; i++)
        count *= layout->strides[i] == 0 && layout->sizes[i] > 0 ? 1 : layout->sizes[i];
    return (size_t)(count * layout->item_size);
}

bool layout_is_dense(const struct race_layout *layout)
{
    const struct race_range range = layout_range(layout);
    return layout_bytes(layout) == range.end - range.start;
}

bool layouts_are_equal(const struct race_layout *first, const struct race_layout *second)
{
    if (first->address != second->address || first->item_size != second->item_size || first->dims != second->dims)
        return false;
    const size_t count = first->dims < 0 ? 1 : (size_t)first->dims;
    return memcmp(first->sizes, second->sizes, count * sizeof *first->sizes) == 0 &&
           (first->dims < 0 || memcmp(first->strides, second->strides, count * sizeof *first->strides) == 0);
}

/* The dimensions by descending stride, those merged that follow one another without a gap. */
struct pieces {
    int dims;
    int64_t sizes[RACE_MAX_DIMS], strides[RACE_MAX_DIMS]; /* in bytes */
    size_t length;                                        /* of a piece */
    size_t count;
};

static struct pieces find_pieces(const struct race_layout *layout)
{
    struct pieces pieces = {.dims = 0, .length = (size_t)layout->item_size, .count = 1};
    for (int64_t i = 0; i < layout->dims; i++) {
        if (layout->sizes[i] == 1 || layout->strides[i] == 0)
            continue;
        int at = pieces.dims++;
        for (; at > 0 && pieces.strides[at - 1] < layout->strides[i] * layout->item_size; at--) {
            pieces.sizes[at] = pieces.sizes[at - 1];
            pieces.strides[at] = pieces.strides[at - 1];
        }
        pieces.sizes[at] = layout->sizes[i];
        pieces.strides[at] = layout->strides[i] * layout->item_size;
    }
    while (pieces.dims > 0 && pieces.strides[pieces.dims - 1] == (int64_t)pieces.length)
        pieces.length *= (size_t)pieces.sizes[--pieces.dims];
    for (int i = 0; i < pieces.dims; i++)
        pieces.count *= (size_t)pieces.sizes[i];
    return pieces;
}

static int compare_ranges(const void *first, const void *second)
{
    const uintptr_t a = ((const struct race_range *)first)->start, b = ((const struct race_range *)second)->start;
    return a < b ? -1 : a > b;
}

/* Returns the pieces in ascending order, without overlaps; NULL if there are too many. */
static struct race_range *list_pieces(const struct race_layout *layout, size_t *count)
{
    const struct pieces pieces = find_pieces(layout);
    struct race_range *ranges = pieces.count <= MAXIMUM_PIECES ? malloc((pieces.count + 1) * sizeof *ranges) : NULL;
    if (!ranges)
        return NULL;
    for (size_t number = 0; number < pieces.count; number++) {
        uintptr_t start = layout->address;
        size_t rest = number;
        for (int i = pieces.dims - 1; i >= 0; i--) {
            start += (rest % (size_t)pieces.sizes[i]) * (size_t)pieces.strides[i];
            rest /= (size_t)pieces.sizes[i];
        }
        ranges[number] = (struct race_range){start, start + pieces.length};
    }
    qsort(ranges, pieces.count, sizeof *ranges, compare_ranges);
    size_t merged = 0;
    for (size_t i = 1; i < pieces.count; i++) {
        if (ranges[i].start > ranges[merged].end)
            ranges[++merged] = ranges[i];
        else if (ranges[i].end > ranges[merged].end)
            ranges[merged].end = ranges[i].end;
    }
    *count = merged + 1;
    return ranges;
}

static size_t overlap_of(struct race_range first, struct race_range second)
{
    const uintptr_t start = first.start > second.start ? first.start : second.start;
    const uintptr_t end = first.end < second.end ? first.end : second.end;
    return start < end ? end - start : 0;
}

size_t layout_overlap(const struct race_layout *first, const struct race_layout *second)
{
    size_t most = overlap_of(layout_range(first), layout_range(second));
    if (most == 0 || first->dims < 0 || second->dims < 0 || (layout_is_dense(first) && layout_is_dense(second)))
        return most;
    size_t first_count = 0, second_count = 0, bytes = 0;
    struct race_range *ranges = list_pieces(first, &first_count), *others = list_pieces(second, &second_count);
    if (ranges && others) {
        for (size_t i = 0, k = 0; i < first_count && k < second_count;) {
            bytes += overlap_of(ranges[i], others[k]);
            if (ranges[i].end < others[k].end)
                i++;
            else
                k++;
        }
    } else
        bytes = most;
    free(ranges);
    free(others);
    return bytes;
}
