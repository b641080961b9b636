/* Integer instructions of PTX that C has no operator for. Names and operands are PTX's. */
#ifndef ACCELERATOR_SIM_KERNELS_INTEGERS_H
#define ACCELERATOR_SIM_KERNELS_INTEGERS_H

#include "translated.h"

#define INLINE static inline __attribute__((always_inline))

INLINE u32 bits_of_float(float value)
{
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of_bits(u32 bits)
{
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE u64 bits_of_double(double value)
{
    u64 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE double double_of_bits(u64 bits)
{
    double value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE s32 saturate_s32(s64 value)
{
    return value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : (s32)value;
}

/* A GPU divides by zero without an error; all bits of the quotient and of the remainder are set. */
#define DIVISION(bits)                                                                                                 \
    INLINE u##bits div_u##bits(u##bits a, u##bits b)                                                                   \
    {                                                                                                                  \
        return b == 0 ? (u##bits)-1 : a / b;                                                                           \
    }                                                                                                                  \
    INLINE u##bits rem_u##bits(u##bits a, u##bits b)                                                                   \
    {                                                                                                                  \
        return b == 0 ? (u##bits)-1 : a % b;                                                                           \
    }                                                                                                                  \
    INLINE s##bits div_s##bits(s##bits a, s##bits b)                                                                   \
    {                                                                                                                  \
        return b == 0 ? -1 : b == -1 ? (s##bits)(0 - (u##bits)a) : a / b;                                              \
    }                                                                                                                  \
    INLINE s##bits rem_s##bits(s##bits a, s##bits b)                                                                   \
    {                                                                                                                  \
        return b == 0 ? -1 : b == -1 ? 0 : a % b;                                                                      \
    }
DIVISION(16)
DIVISION(32)
DIVISION(64)
#undef DIVISION

/* The position or length of a bit field has 8 bits: a GPU takes the low ones, but clamps those of 64-bit fields. */
INLINE u32 restrict_place(u32 number, u32 width)
{
    return width == 32 || number < 256 ? number & 255 : 255;
}

INLINE u64 bit_field(u64 a, u32 position, u32 length, u32 width, bool is_signed)
{
    position = restrict_place(position, width), length = restrict_place(length, width);
    if (length == 0)
        return 0;
    u32 last = position + length - 1 < width - 1 ? position + length - 1 : width - 1;
    bool sign = is_signed && a >> last & 1;
    u64 field = position < width ? a >> position : 0;
    u32 count = position < width ? last - position + 1 : 0;
    u64 mask = count < 64 ? (1ull << count) - 1 : ~0ull;
    return sign ? field | ~mask : field & mask;
}

INLINE u64 insert_bit_field(u64 a, u64 b, u32 position, u32 length, u32 width)
{
    position = restrict_place(position, width), length = restrict_place(length, width);
    if (position >= width || length == 0)
        return b;
    u64 mask = (length < 64 ? (1ull << length) - 1 : ~0ull) << position;
    return (b & ~mask) | (a << position & mask);
}

/* The position of the highest bit that differs from the sign, or all bits set if there is none. */
INLINE u32 find_highest(u64 a, u32 width, bool counts_shifts)
{
    if (a == 0)
        return ~0u;
    u32 position = 63 - (u32)__builtin_clzll(a);
    return counts_shifts ? width - 1 - position : position;
}

INLINE u64 reverse_bits(u64 a)
{
    a = (a >> 1 & 0x5555555555555555u) | (a & 0x5555555555555555u) << 1;
    a = (a >> 2 & 0x3333333333333333u) | (a & 0x3333333333333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0f0f0f0f0fu) | (a & 0x0f0f0f0f0f0f0f0fu) << 4;
    return __builtin_bswap64(a);
}

INLINE u32 find_nth_set(u32 mask, u32 base, s32 offset)
{
    if (offset == 0)
        return base < 32 && mask >> base & 1 ? base : ~0u;
    u32 count = (offset > 0 ? (u32)offset : 0 - (u32)offset) - 1;
    for (s64 position = base; position >= 0 && position < 32; position += offset > 0 ? 1 : -1)
        if (mask >> position & 1 && count-- == 0)
            return (u32)position;
    return ~0u;
}

/* One byte of eight; the high bit of the selector replicates the byte's sign. */
INLINE u32 select_byte(u64 bytes, u32 selector)
{
    u32 byte = bytes >> 8 * (selector & 7) & 255;
    return selector & 8 ? (byte & 128 ? 255 : 0) : byte;
}

INLINE u32 permute(u32 a, u32 b, u32 selectors)
{
    u64 bytes = (u64)b << 32 | a;
    return select_byte(bytes, selectors & 15) | select_byte(bytes, selectors >> 4 & 15) << 8 |
           select_byte(bytes, selectors >> 8 & 15) << 16 | select_byte(bytes, selectors >> 12 & 15) << 24;
}

/* The selectors of prmt's modes, for each of the four values of its control. */
#define PERMUTE_MODE(mode, s0, s1, s2, s3)                                                                             \
    INLINE u32 permute_##mode(u32 a, u32 b, u32 control)                                                               \
    {                                                                                                                  \
        static const u16 selectors[] = {s0, s1, s2, s3};                                                               \
        return permute(a, b, selectors[control & 3]);                                                                  \
    }
PERMUTE_MODE(f4e, 0x3210, 0x4321, 0x5432, 0x6543)
PERMUTE_MODE(b4e, 0x5670, 0x6701, 0x7012, 0x0123)
PERMUTE_MODE(rc8, 0x0000, 0x1111, 0x2222, 0x3333)
PERMUTE_MODE(ecl, 0x3210, 0x3211, 0x3222, 0x3333)
PERMUTE_MODE(ecr, 0x0000, 0x1110, 0x2210, 0x3210)
PERMUTE_MODE(rc16, 0x1010, 0x3232, 0x1010, 0x3232)
#undef PERMUTE_MODE

/* Each bit of the result is the bit of the table that the bits of a, b and c select. */
INLINE u32 lookup_bits(u32 a, u32 b, u32 c, u32 table)
{
    u32 result = 0;
    for (u32 entry = 0; entry < 8; entry++)
        if (table >> entry & 1)
            result |= (entry & 4 ? a : ~a) & (entry & 2 ? b : ~b) & (entry & 1 ? c : ~c);
    return result;
}

INLINE u32 funnel_left(u32 a, u32 b, u32 count)
{
    return count == 0 ? b : count >= 32 ? a : b << count | a >> (32 - count);
}

INLINE u32 funnel_right(u32 a, u32 b, u32 count)
{
    return count == 0 ? a : count >= 32 ? b : b << (32 - count) | a >> count;
}

INLINE u32 extend(u32 a, u32 length, bool is_signed, bool clamps)
{
    if (clamps && length >= 32)
        return a;
    length &= 31;
    u32 low = a & ((1u << length) - 1);
    bool sign = is_signed && length > 0 && a >> (length - 1) & 1;
    return sign ? low | ~0u << length : low;
}

INLINE u32 bit_mask(u32 position, u32 length, bool clamps)
{
    if (clamps && position >= 32)
        return 0;
    u32 first = position & 31, count = length & 31;
    u32 from = ~0u << first;
    if (first + count >= 32 || (clamps && length >= 32))
        return from;
    return count == 0 ? 0 : from & ~(~0u << (first + count));
}

INLINE u32 dot_4(u32 a, u32 b, u32 c, bool a_is_signed, bool b_is_signed)
{
    for (u32 shift = 0; shift < 32; shift += 8) {
        s32 x = a_is_signed ? (s8)(a >> shift) : (u8)(a >> shift);
        s32 y = b_is_signed ? (s8)(b >> shift) : (u8)(b >> shift);
        c += (u32)(x * y);
    }
    return c;
}

INLINE u32 dot_2(u32 a, u32 b, u32 c, bool a_is_signed, bool b_is_signed, bool takes_high)
{
    for (u32 i = 0; i < 2; i++) {
        s32 x = a_is_signed ? (s16)(a >> 16 * i) : (u16)(a >> 16 * i);
        u32 shift = 8 * (i + (takes_high ? 2 : 0));
        s32 y = b_is_signed ? (s8)(b >> shift) : (u8)(b >> shift);
        c += (u32)x * (u32)y;
    }
    return c;
}

/* Two halves of 16 bits, each computed alone. */
#define PACKED_16(name, type, expression)                                                                              \
    INLINE type name##_one(type a, type b)                                                                             \
    {                                                                                                                  \
        return (type)(expression);                                                                                     \
    }                                                                                                                  \
    INLINE u32 name(u32 a, u32 b)                                                                                      \
    {                                                                                                                  \
        return (u16)name##_one((type)a, (type)b) | (u32)(u16)name##_one((type)(a >> 16), (type)(b >> 16)) << 16;       \
    }
PACKED_16(add_x2, u16, a + b)
PACKED_16(min_u16x2, u16, a < b ? a : b)
PACKED_16(max_u16x2, u16, a > b ? a : b)
PACKED_16(min_s16x2, s16, a < b ? a : b)
PACKED_16(max_s16x2, s16, a > b ? a : b)
#undef PACKED_16

#endif
