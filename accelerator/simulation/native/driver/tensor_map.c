/* libcuda.so.1: tensor maps. A tensor map describes a tensor for the copies of a kernel; it is opaque to the program, and this
 * layout is the simulation's own. */
#include "driver.h"

enum { MAX_RANK = 5, WIDE_MAJOR = 10 };
enum tensor_map_kind { MAP_TILED = 1, MAP_IM2COL, MAP_IM2COL_WIDE };
enum { INTERLEAVE_NONE, INTERLEAVE_16B, INTERLEAVE_32B, INTERLEAVES };
enum { SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_ATOM_32B, SWIZZLE_FLIP_8B, SWIZZLE_ATOM_64B, SWIZZLES };
enum { TYPE_FLOAT16 = 6, TYPE_PACKED = 13, TYPE_U4_ALIGN8B = 13, TYPE_U4_ALIGN16B, TYPE_U6_ALIGN16B, TYPES };
enum { PROMOTIONS = 4, FILLS = 2, MODES = 2 };

struct tensor_map {
    uint8_t kind, type, rank, interleave, swizzle, promotion, fill, mode;
    uint64_t address;
    uint64_t sizes[MAX_RANK];       /* in elements */
    uint64_t strides[MAX_RANK - 1]; /* in bytes */
    uint16_t box[MAX_RANK];         /* of a tile, in elements */
    uint8_t steps[MAX_RANK];
    int16_t lower[MAX_RANK - 2], upper[MAX_RANK - 2]; /* corners of an im2col box */
    uint16_t channels, pixels;
};
_Static_assert(sizeof(struct tensor_map) <= 128, "CUtensorMap has 128 bytes");

/* Bits of an element in shared memory: groups of 16 packed numbers take 8 bytes there, or 16. */
static const unsigned char type_bits[TYPES] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 8, 8};
static const unsigned char swizzle_bytes[SWIZZLES] = {0, 32, 64, 128, 128, 128, 128};

static bool is_padded(const struct tensor_map *map)
{
    return map->type == TYPE_U4_ALIGN16B || map->type == TYPE_U6_ALIGN16B;
}

/* The alignment that addresses and strides have. */
static uint64_t alignment(const struct tensor_map *map)
{
    return map->interleave == INTERLEAVE_32B || is_padded(map) ? 32 : 16;
}

static bool is_valid_swizzle(const struct tensor_map *map)
{
    const int swizzle = map->swizzle;
    if (map->interleave == INTERLEAVE_32B && swizzle != SWIZZLE_32B)
        return false;
    if (map->kind == MAP_IM2COL_WIDE && swizzle != SWIZZLE_64B && swizzle != SWIZZLE_128B && swizzle != SWIZZLE_128B_ATOM_32B)
        return false;
    return !is_padded(map) || swizzle == SWIZZLE_NONE || swizzle == SWIZZLE_128B || swizzle == SWIZZLE_128B_ATOM_32B ||
           (swizzle == SWIZZLE_ATOM_64B && map->type == TYPE_U6_ALIGN16B);
}

/* Checks the number of elements that a copy takes of the innermost dimension. */
static bool is_valid_inner(const struct tensor_map *map, unsigned count)
{
    const unsigned bits = count * type_bits[map->type];
    if (count == 0 || count > 256 || (is_padded(map) && count != 128))
        return false;
    if (map->interleave != INTERLEAVE_NONE)
        return true;
    return bits % (16 * 8) == 0 && (map->swizzle == SWIZZLE_NONE || bits <= 8u * swizzle_bytes[map->swizzle]);
}

/* What the arguments of all kinds of maps have in common. */
struct layout {
    unsigned type, rank;
    uint64_t address;
    const uint64_t *sizes, *strides;
    const uint32_t *steps;
    unsigned interleave, swizzle, promotion, fill;
};

/* Fills in a map, and returns false for arguments that CUDA's documentation excludes. */
static bool describe(struct tensor_map *map, enum tensor_map_kind kind, const struct layout *layout)
{
    const bool is_float = (layout->type >= TYPE_FLOAT16 && layout->type < TYPE_PACKED);
    const unsigned least_rank = kind == MAP_TILED && layout->interleave == INTERLEAVE_NONE ? 1 : 3;
    if (layout->type >= TYPES || layout->interleave >= INTERLEAVES || layout->swizzle >= SWIZZLES ||
        layout->promotion >= PROMOTIONS || layout->fill >= FILLS || (layout->fill != 0 && !is_float) ||
        layout->rank < least_rank || layout->rank > MAX_RANK || !layout->sizes || !layout->steps ||
        (layout->rank > 1 && !layout->strides))
        return false;
    *map = (struct tensor_map){
        .kind = (uint8_t)kind,
        .type = (uint8_t)layout->type,
        .rank = (uint8_t)layout->rank,
        .interleave = (uint8_t)layout->interleave,
        .swizzle = (uint8_t)layout->swizzle,
        .promotion = (uint8_t)layout->promotion,
        .fill = (uint8_t)layout->fill,
        .address = layout->address,
    };
    if (!is_valid_swizzle(map) || (map->type == TYPE_U6_ALIGN16B && map->interleave != INTERLEAVE_NONE) ||
        map->address % alignment(map) != 0)
        return false;
    const uint64_t multiple = is_padded(map) ? 128 : map->type == TYPE_U4_ALIGN8B ? 2 : 1;
    for (unsigned i = 0; i < map->rank; i++) {
        map->sizes[i] = layout->sizes[i];
        map->steps[i] = (uint8_t)layout->steps[i];
        const bool has_step = i > 0 || map->interleave != INTERLEAVE_NONE;
        if (map->sizes[i] == 0 || map->sizes[i] > 1ull << 32 || (i == 0 && map->sizes[i] % multiple != 0) ||
            (has_step && (layout->steps[i] == 0 || layout->steps[i] > 8)))
            return false;
    }
    for (unsigned i = 0; i + 1 < map->rank; i++) {
        map->strides[i] = layout->strides[i];
        if (map->strides[i] % alignment(map) != 0 || map->strides[i] >= 1ull << 40)
            return false;
    }
    return true;
}

static CUresult enter_map(const char *function, const void *map, int oldest_major)
{
    RETURN_IF_ERROR(enter_context(function));
    REQUIRE(map && (uintptr_t)map % 64 == 0);
    return current_context()->major >= oldest_major ? SUCCESS : ERROR_NOT_SUPPORTED;
}

SIM_EXPORT CUresult cuTensorMapEncodeTiled(struct tensor_map *target, unsigned type, uint32_t rank, uintptr_t address,
                                           const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                                           const uint32_t *steps, unsigned interleave, unsigned swizzle, unsigned promotion,
                                           unsigned fill)
{
    struct tensor_map map;
    RETURN_IF_ERROR(enter_map(__func__, target, SIM_TENSOR_MAP_MAJOR));
    const struct layout layout = {type, rank, address, sizes, strides, steps, interleave, swizzle, promotion, fill};
    REQUIRE(box && describe(&map, MAP_TILED, &layout) && is_valid_inner(&map, box[0]));
    for (unsigned i = 0; i < rank; i++) {
        REQUIRE(box[i] != 0 && box[i] <= 256);
        map.box[i] = (uint16_t)box[i];
    }
    *target = map;
    return SUCCESS;
}

static CUresult encode_im2col(struct tensor_map *target, enum tensor_map_kind kind, const struct layout *layout,
                              const int *lower, const int *upper, unsigned corners, unsigned channels, unsigned pixels,
                              unsigned mode)
{
    struct tensor_map map;
    if (!lower || !upper || !describe(&map, kind, layout) || !is_valid_inner(&map, channels) || mode >= MODES ||
        (mode == 0 && (pixels == 0 || pixels > 1024)))
        return ERROR_INVALID_VALUE;
    const int most = corners == 1 ? 32767 : corners == 2 ? 127 : 15;
    for (unsigned i = 0; i < corners; i++) {
        REQUIRE(lower[i] <= most && lower[i] >= -most - 1 && upper[i] <= most && upper[i] >= -most - 1);
        map.lower[i] = (int16_t)lower[i];
        map.upper[i] = (int16_t)upper[i];
    }
    map.channels = (uint16_t)channels;
    map.pixels = (uint16_t)pixels;
    map.mode = (uint8_t)mode;
    *target = map;
    return SUCCESS;
}

SIM_EXPORT CUresult cuTensorMapEncodeIm2col(struct tensor_map *target, unsigned type, uint32_t rank, uintptr_t address,
                                            const uint64_t *sizes, const uint64_t *strides, const int *lower, const int *upper,
                                            uint32_t channels, uint32_t pixels, const uint32_t *steps, unsigned interleave,
                                            unsigned swizzle, unsigned promotion, unsigned fill)
{
    RETURN_IF_ERROR(enter_map(__func__, target, SIM_TENSOR_MAP_MAJOR));
    const struct layout layout = {type, rank, address, sizes, strides, steps, interleave, swizzle, promotion, fill};
    return encode_im2col(target, MAP_IM2COL, &layout, lower, upper, rank - 2, channels, pixels, 0);
}

SIM_EXPORT CUresult cuTensorMapEncodeIm2colWide(struct tensor_map *target, unsigned type, uint32_t rank, uintptr_t address,
                                                const uint64_t *sizes, const uint64_t *strides, int lower, int upper,
                                                uint32_t channels, uint32_t pixels, const uint32_t *steps, unsigned interleave,
                                                unsigned mode, unsigned swizzle, unsigned promotion, unsigned fill)
{
    RETURN_IF_ERROR(enter_map(__func__, target, WIDE_MAJOR));
    const struct layout layout = {type, rank, address, sizes, strides, steps, interleave, swizzle, promotion, fill};
    return encode_im2col(target, MAP_IM2COL_WIDE, &layout, &lower, &upper, 1, channels, pixels, mode);
}

SIM_EXPORT CUresult cuTensorMapReplaceAddress(struct tensor_map *map, uintptr_t address)
{
    RETURN_IF_ERROR(enter_map(__func__, map, SIM_TENSOR_MAP_MAJOR));
    REQUIRE(map->kind >= MAP_TILED && map->kind <= MAP_IM2COL_WIDE && address % alignment(map) == 0);
    map->address = address;
    return SUCCESS;
}
