/* NCCL: reductions, element by element in the order of the ranks, so that every rank gets the same bits. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-vectorize") /* three times as fast; -O3 compiles longer and runs no faster */
#endif
#include "nccl.h"

#include <string.h>

enum { BLOCK = 512 };

size_t type_size(enum data_type type)
{
#define SIZE(type, name, size) size,
    static const unsigned char sizes[] = {DATA_TYPES(SIZE)};
#undef SIZE
    return sizes[type];
}

const char *type_name(enum data_type type)
{
#define NAME(type, name, size) #name,
    static const char *const names[] = {DATA_TYPES(NAME)};
#undef NAME
    return names[type];
}

static inline float to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Converts a float16. Its upper half alone is a float8 with five exponent bits. */
static inline float from_half(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    float value = to_float(magnitude) * 0x1p112f;
    uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return to_float(to_bits(value) | special | (uint32_t)(half & 0x8000) << 16);
}

/* Rounds to nearest, ties to even, and returns the bits without the sign; larger values give `largest`. */
static inline uint32_t narrow(float value, int mantissa, int bias, uint32_t largest)
{
    uint32_t bits = to_bits(value) & 0x7fffffff;
    int exponent = (int)(bits >> 23) - 127, lowest = 1 - bias, shift = 23 - mantissa;
    uint32_t significand = (bits & 0x7fffff) | 0x800000;
    bool is_subnormal = exponent < lowest;
    if (is_subnormal)
        shift += lowest - exponent;
    if (shift > 25)
        return 0;
    uint32_t kept = significand >> shift, rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    /* A carry of the mantissa increments the exponent, as it should. */
    uint32_t code = is_subnormal ? kept : kept + ((uint32_t)(exponent + bias - 1) << mantissa);
    return code < largest ? code : largest;
}

static inline uint32_t sign_of(float value, int bit)
{
    return to_bits(value) >> 31 << bit;
}

static inline uint16_t to_half(float value)
{
    uint32_t code = value != value ? 0x7e00 : narrow(value, 10, 15, 0x7c00);
    return (uint16_t)(code | sign_of(value, 15));
}

static inline float from_bfloat16(uint16_t value)
{
    return to_float((uint32_t)value << 16);
}

static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits = to_bits(value);
    if (value != value)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_e5m2(uint8_t value)
{
    return from_half((uint16_t)(value << 8));
}

static inline float from_e4m3(uint8_t value)
{
    enum { NOT_A_NUMBER = 0x7f };
    uint32_t sign = (uint32_t)(value & 0x80) << 24;
    if ((value & 0x7f) == NOT_A_NUMBER)
        return to_float(sign | 0x7fc00000);
    return to_float(to_bits(to_float((uint32_t)(value & 0x7f) << 20) * 0x1p120f) | sign);
}

/* Values too large for float8 saturate to the largest finite value, as on a GPU. */
static inline uint8_t to_e5m2(float value)
{
    return (uint8_t)((value != value ? 0x7f : narrow(value, 2, 15, 0x7b)) | sign_of(value, 7));
}

static inline uint8_t to_e4m3(float value)
{
    return (uint8_t)((value != value ? 0x7f : narrow(value, 3, 7, 0x7e)) | sign_of(value, 7));
}

#define SAME(value) (value)
#define FIRST_IF(condition, a, b) ((condition) ? (a) : (b))
#define NUMBER_IF(condition, a, b) ((condition) || (b) != (b) ? (a) : (b)) /* ignores NaN */

/* Values are stored as TYPE and summed as SUM_TYPE. Integers wrap around, which C allows for unsigned WRAP only. */
#define DEFINE(NAME, TYPE, SUM_TYPE, WRAP, WIDE, LOAD, STORE, CHOOSE)                                                  \
    static void reduce_##NAME(char *target, char *const *sources, int count, size_t elements, int reduction)           \
    {                                                                                                                  \
        for (size_t start = 0; start < elements; start += BLOCK) {                                                     \
            SUM_TYPE sums[BLOCK];                                                                                      \
            size_t size = elements - start < BLOCK ? elements - start : BLOCK;                                         \
            const TYPE *source = (const TYPE *)sources[0] + start;                                                     \
            for (size_t i = 0; i < size; i++)                                                                          \
                sums[i] = LOAD(source[i]);                                                                             \
            for (int rank = 1; rank < count; rank++) {                                                                 \
                source = (const TYPE *)sources[rank] + start;                                                          \
                switch (reduction) {                                                                                   \
                case PROD:                                                                                             \
                    for (size_t i = 0; i < size; i++)                                                                  \
                        sums[i] = (SUM_TYPE)((WRAP)sums[i] * (WRAP)LOAD(source[i]));                                   \
                    break;                                                                                             \
                case MAX:                                                                                              \
                    for (size_t i = 0; i < size; i++)                                                                  \
                        sums[i] = CHOOSE(sums[i] > LOAD(source[i]), sums[i], LOAD(source[i]));                         \
                    break;                                                                                             \
                case MIN:                                                                                              \
                    for (size_t i = 0; i < size; i++)                                                                  \
                        sums[i] = CHOOSE(sums[i] < LOAD(source[i]), sums[i], LOAD(source[i]));                         \
                    break;                                                                                             \
                default:                                                                                               \
                    for (size_t i = 0; i < size; i++)                                                                  \
                        sums[i] = (SUM_TYPE)((WRAP)sums[i] + (WRAP)LOAD(source[i]));                                   \
                }                                                                                                      \
            }                                                                                                          \
            TYPE *result = (TYPE *)target + start;                                                                     \
            if (reduction == AVG)                                                                                      \
                for (size_t i = 0; i < size; i++)                                                                      \
                    sums[i] = (SUM_TYPE)((WIDE)sums[i] / (WIDE)count);                                                 \
            for (size_t i = 0; i < size; i++)                                                                          \
                result[i] = STORE(sums[i]);                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    static void multiply_##NAME(char *target, const char *source, size_t elements, const void *factor)                 \
    {                                                                                                                  \
        TYPE stored;                                                                                                   \
        memcpy(&stored, factor, sizeof stored);                                                                        \
        SUM_TYPE scale = LOAD(stored);                                                                                 \
        for (size_t i = 0; i < elements; i++)                                                                          \
            ((TYPE *)target)[i] = STORE((SUM_TYPE)((WRAP)LOAD(((const TYPE *)source)[i]) * (WRAP)scale));              \
    }

DEFINE(int8, int8_t, int8_t, uint32_t, int64_t, SAME, SAME, FIRST_IF)
DEFINE(uint8, uint8_t, uint8_t, uint32_t, uint64_t, SAME, SAME, FIRST_IF)
DEFINE(int32, int32_t, int32_t, uint32_t, int64_t, SAME, SAME, FIRST_IF)
DEFINE(uint32, uint32_t, uint32_t, uint32_t, uint64_t, SAME, SAME, FIRST_IF)
DEFINE(int64, int64_t, int64_t, uint64_t, int64_t, SAME, SAME, FIRST_IF)
DEFINE(uint64, uint64_t, uint64_t, uint64_t, uint64_t, SAME, SAME, FIRST_IF)
DEFINE(float16, uint16_t, float, float, float, from_half, to_half, NUMBER_IF)
DEFINE(float32, float, float, float, float, SAME, SAME, NUMBER_IF)
DEFINE(float64, double, double, double, double, SAME, SAME, NUMBER_IF)
DEFINE(bfloat16, uint16_t, float, float, float, from_bfloat16, to_bfloat16, NUMBER_IF)
DEFINE(e4m3, uint8_t, float, float, float, from_e4m3, to_e4m3, NUMBER_IF)
DEFINE(e5m2, uint8_t, float, float, float, from_e5m2, to_e5m2, NUMBER_IF)

void reduce(char *target, char *const *sources, int count, size_t elements, enum data_type type, int reduction)
{
#define FUNCTION(type, name, size) reduce_##name,
    static void (*const functions[])(char *, char *const *, int, size_t, int) = {DATA_TYPES(FUNCTION)};
#undef FUNCTION
    functions[type](target, sources, count, elements, reduction);
}

void multiply(char *target, const char *source, size_t elements, enum data_type type, const void *factor)
{
#define FUNCTION(type, name, size) multiply_##name,
    static void (*const functions[])(char *, const char *, size_t, const void *) = {DATA_TYPES(FUNCTION)};
#undef FUNCTION
    functions[type](target, source, elements, factor);
}
