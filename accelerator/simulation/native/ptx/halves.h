/* Instructions of PTX on half precision, bfloat16 and formats of 8 bits.
 *
 * A sum of halves is computed in single precision, which has more than twice their digits, and rounded once more: that gives the
 * correctly rounded result. A product is computed in double precision, because products of bfloat16 may be subnormal. A fused
 * multiply-add is computed in double precision and rounded to odd, which keeps the second rounding right. */
#ifndef ACCELERATOR_SIM_KERNELS_HALVES_H
#define ACCELERATOR_SIM_KERNELS_HALVES_H

#include "floats.h"

#if defined __F16C__ && !defined __clang__
#define HAS_HALF_CONVERSIONS /* clang lacks the function for it */
/* Not from immintrin.h, which takes longer to compile than most kernels. */
typedef float four_floats __attribute__((vector_size(16)));
typedef short eight_halves __attribute__((vector_size(16)));
#endif

enum { HALF_NAN = 0x7fff };

/* Rounds to single precision, to odd: of the two neighbors of an inexact value, the one whose last bit is set. Rounding that
 * to a half gives the same as rounding the value itself. */
INLINE float float_to_odd(double value)
{
    float near = (float)value;
    u32 bits = bits_of_float(near);
    if (near == value || near != near)
        return near;
    if (__builtin_fabs((double)near) > __builtin_fabs(value))
        return bits & 1 ? near : float_of_bits(bits - 1); /* below infinity: the largest number */
    return float_of_bits(bits | 1);
}

/* Half precision: 5 bits of exponent, 10 of mantissa. */
INLINE float float_of_half(u16 half)
{
#ifdef HAS_HALF_CONVERSIONS
    return __builtin_ia32_vcvtph2ps((eight_halves){(short)half})[0];
#else
    u32 sign = (u32)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0));
    if (exponent)
        return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    return float_of_bits(sign | bits_of_float((float)mantissa * 0x1p-24f));
#endif
}

INLINE u16 half_of_float(float value)
{
#ifdef HAS_HALF_CONVERSIONS
    return value != value ? HALF_NAN : (u16)__builtin_ia32_vcvtps2ph((four_floats){value}, 0)[0];
#else
    u32 bits = bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000u)
        return HALF_NAN;
    if (size >= 0x477ff000u) /* 65520, half way between the largest number and what would be the next one */
        return (u16)(sign | 0x7c00);
    if (size < 0x38800000u) /* subnormal: a multiple of 2^-24 */
        return (u16)(sign | (u32)__builtin_rintf(float_of_bits(size) * 0x1p24f));
    return (u16)(sign | (size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13);
#endif
}

INLINE u16 half_of_double(double value)
{
    return half_of_float(float_to_odd(value));
}

/* bfloat16 is the high half of a float. */
INLINE float float_of_bfloat16(u16 value)
{
    return float_of_bits((u32)value << 16);
}

INLINE u16 bfloat16_of_float(float value)
{
    u32 bits = bits_of_float(value);
    return value != value ? HALF_NAN : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE u16 bfloat16_of_double(double value)
{
    return bfloat16_of_float(float_to_odd(value));
}

#define HALF_OPERATIONS(suffix, widen, narrow, narrow_double, exponent)                                                \
    INLINE u16 flush_##suffix(u16 a)                                                                                   \
    {                                                                                                                  \
        return a & (exponent) ? a : a & 0x8000;                                                                        \
    }                                                                                                                  \
    INLINE u16 add_##suffix(u16 a, u16 b)                                                                              \
    {                                                                                                                  \
        return narrow(widen(a) + widen(b));                                                                            \
    }                                                                                                                  \
    INLINE u16 sub_##suffix(u16 a, u16 b)                                                                              \
    {                                                                                                                  \
        return narrow(widen(a) - widen(b));                                                                            \
    }                                                                                                                  \
    INLINE u16 mul_##suffix(u16 a, u16 b)                                                                              \
    {                                                                                                                  \
        return narrow_double((double)widen(a) * (double)widen(b));                                                     \
    }                                                                                                                  \
    INLINE u16 fma_##suffix(u16 a, u16 b, u16 c)                                                                       \
    {                                                                                                                  \
        return narrow_double(fma_to_odd(widen(a), widen(b), widen(c)));                                                \
    }                                                                                                                  \
    INLINE u16 min_##suffix(u16 a, u16 b)                                                                              \
    {                                                                                                                  \
        return narrow(min_f32(widen(a), widen(b)));                                                                    \
    }                                                                                                                  \
    INLINE u16 max_##suffix(u16 a, u16 b)                                                                              \
    {                                                                                                                  \
        return narrow(max_f32(widen(a), widen(b)));                                                                    \
    }                                                                                                                  \
    INLINE u16 min_nan_##suffix(u16 a, u16 b)                                                                          \
    {                                                                                                                  \
        return narrow(min_nan_f32(widen(a), widen(b)));                                                                \
    }                                                                                                                  \
    INLINE u16 max_nan_##suffix(u16 a, u16 b)                                                                          \
    {                                                                                                                  \
        return narrow(max_nan_f32(widen(a), widen(b)));                                                                \
    }                                                                                                                  \
    INLINE u16 saturate_##suffix(u16 a)                                                                                \
    {                                                                                                                  \
        return narrow(saturate_f32(widen(a)));                                                                         \
    }                                                                                                                  \
    /* .relu: negative numbers and -0 become 0. */                                                                     \
    INLINE u16 relu_##suffix(u16 a)                                                                                    \
    {                                                                                                                  \
        return widen(a) != widen(a) ? HALF_NAN : a & 0x8000 ? 0 : a;                                                   \
    }                                                                                                                  \
    INLINE u16 satfinite_##suffix(u16 a)                                                                               \
    {                                                                                                                  \
        return (a & 0x7fff) == (exponent) ? a - 1 : a;                                                                 \
    }                                                                                                                  \
    INLINE u16 ex2_##suffix(u16 a)                                                                                     \
    {                                                                                                                  \
        return narrow(__builtin_exp2f(widen(a)));                                                                      \
    }                                                                                                                  \
    INLINE u16 tanh_##suffix(u16 a)                                                                                    \
    {                                                                                                                  \
        return narrow(__builtin_tanhf(widen(a)));                                                                      \
    }                                                                                                                  \
    INLINE u16 xorsign_##suffix(u16 value, u16 a, u16 b)                                                               \
    {                                                                                                                  \
        return widen(value) != widen(value) ? value : (value & 0x7fff) | ((a ^ b) & 0x8000);                           \
    }                                                                                                                  \
    INLINE u16 suffix##_toward_zero(double value)                                                                      \
    {                                                                                                                  \
        u16 near = narrow_double(value);                                                                               \
        return near != HALF_NAN && __builtin_fabs(widen(near)) > __builtin_fabs(value) ? near - 1 : near;              \
    }                                                                                                                  \
    /* .rm and .rp: a neighbor is the next pattern of bits. */                                                         \
    INLINE u16 suffix##_down(double value)                                                                             \
    {                                                                                                                  \
        u16 near = narrow_double(value);                                                                               \
        if (near == HALF_NAN || widen(near) <= value)                                                                  \
            return near;                                                                                               \
        return near == 0 ? 0x8001 : near & 0x8000 ? near + 1 : near - 1;                                               \
    }                                                                                                                  \
    INLINE u16 suffix##_up(double value)                                                                               \
    {                                                                                                                  \
        return suffix##_down(-value) ^ (value != value ? 0 : 0x8000);                                                  \
    }
HALF_OPERATIONS(f16, float_of_half, half_of_float, half_of_double, 0x7c00)
HALF_OPERATIONS(bf16, float_of_bfloat16, bfloat16_of_float, bfloat16_of_double, 0x7f80)
#undef HALF_OPERATIONS

/* Integers of 64 bits in double precision, rounded to odd: the lowest bit that stays says whether bits were lost. */
INLINE double double_of_u64_to_odd(u64 value)
{
    return value >> 53 ? (double)(value >> 11 | ((value & 2047) != 0)) * 2048 : (double)value;
}

INLINE double double_of_s64_to_odd(s64 value)
{
    return value < 0 ? -double_of_u64_to_odd(0 - (u64)value) : double_of_u64_to_odd((u64)value);
}

/* tf32 has 10 bits of mantissa in the place of a float's 23. */
enum rounding { TO_NEAREST, TO_ZERO, TO_NEAREST_AWAY };

INLINE u32 tf32_of_float(float value, enum rounding rounding, bool relu, bool satfinite)
{
    u32 bits = bits_of_float(value), sign = bits & 0x80000000u, size = bits & 0x7fffffffu;
    if (value != value) /* ptxas compiles .rna to integer instructions, which treat NaN like infinity */
        return rounding == TO_NEAREST_AWAY ? (bits & ~0x1fffu) - (satfinite ? 0x2000 : 0) : 0x7fffffff;
    if (relu && sign)
        return 0;
    if (size < 0x7f800000u)
        size += rounding == TO_NEAREST_AWAY ? 0x1000 : rounding == TO_NEAREST ? 0xfff + (size >> 13 & 1) : 0;
    size &= ~0x1fffu;
    return sign | (satfinite && size >= 0x7f800000u ? 0x7f7fe000u : size);
}

/* Formats of 8 bits: e4m3 has no infinity, and one NaN; e5m2 is like half precision with 2 bits of mantissa. */
struct format {
    u32 exponent_bits, mantissa_bits;
    u32 largest; /* finite number */
};
static const struct format E4M3 = {4, 3, 0x7e}, E5M2 = {5, 2, 0x7b};
enum { NARROW_NAN = 0x7f };

INLINE float float_of_narrow(u32 bits, struct format format)
{
    u32 size = bits & 0x7f, mantissa = size & ((1u << format.mantissa_bits) - 1), exponent = size >> format.mantissa_bits;
    s32 bias = (1 << (format.exponent_bits - 1)) - 1;
    float sign = bits & 0x80 ? -1 : 1;
    if (size > format.largest)
        return size == format.largest + 1 && size != NARROW_NAN ? sign * __builtin_inff() : CANONICAL_NAN_F32;
    u32 units = exponent ? mantissa + (1u << format.mantissa_bits) : mantissa;
    return sign * __builtin_ldexpf((float)units, (exponent ? (s32)exponent : 1) - bias - (s32)format.mantissa_bits);
}

/* Conversions to these formats are .satfinite: what is too large becomes the largest finite number. */
INLINE u32 narrow_of_float(float value, struct format format, bool relu)
{
    u32 bits = bits_of_float(value), sign = bits >> 24 & 0x80;
    s32 lowest = 2 - (1 << (format.exponent_bits - 1)); /* the exponent of the smallest normal number */
    if (value != value)
        return NARROW_NAN;
    if (relu && sign)
        return 0;
    if (__builtin_fabsf(value) >= 0x1p20f)
        return sign | format.largest;
    s32 exponent = (s32)(bits >> 23 & 255) - 127;
    exponent = exponent < lowest ? lowest : exponent;
    /* The mantissa with its leading one, which adds one to the exponent. */
    u32 units = (u32)__builtin_rintf(__builtin_ldexpf(__builtin_fabsf(value), (s32)format.mantissa_bits - exponent));
    u32 size = units + ((u32)(exponent - lowest) << format.mantissa_bits);
    return sign | (size > format.largest ? format.largest : size);
}

#define NARROW(suffix, format)                                                                                         \
    INLINE u32 suffix##_of_float(float value, bool relu)                                                               \
    {                                                                                                                  \
        return narrow_of_float(value, format, relu);                                                                   \
    }                                                                                                                  \
    INLINE u16 half_of_##suffix(u32 bits, bool relu)                                                                   \
    {                                                                                                                  \
        u16 half = half_of_float(float_of_narrow(bits, format));                                                       \
        return relu ? relu_f16(half) : half;                                                                           \
    }
NARROW(e4m3, E4M3)
NARROW(e5m2, E5M2)
#undef NARROW

INLINE u32 pack_halves(u16 low, u16 high)
{
    return low | (u32)high << 16;
}

#endif
