/* Instructions of PTX on single and double precision that C has no operator for. */
#ifndef ACCELERATOR_SIM_KERNELS_FLOATS_H
#define ACCELERATOR_SIM_KERNELS_FLOATS_H

#include <math.h>

#include "integers.h"

#define CANONICAL_NAN_F32 float_of_bits(0x7fffffffu)
#define CANONICAL_NAN_F64 double_of_bits(0x7fffffffffffffffu)

/* All computed NaN of single precision have these bits; x86 takes a NaN of the operands, or one with a sign. */
INLINE float canonical_f32(float value)
{
    return value == value ? value : CANONICAL_NAN_F32;
}

/* .ftz: subnormal numbers are zeros of the same sign. */
INLINE float flush(float value)
{
    u32 bits = bits_of_float(value);
    return bits & 0x7f800000u ? value : float_of_bits(bits & 0x80000000u);
}

/* .sat: clamps to [0, 1]; NaN gives 0. */
INLINE float saturate_f32(float value)
{
    return value > 0 ? (value < 1 ? value : 1) : 0;
}

INLINE double saturate_f64(double value)
{
    return value > 0 ? (value < 1 ? value : 1) : 0;
}

/* a * b + c, rounded to odd. The product of two operands of half or single precision is exact in double precision. */
INLINE double fma_to_odd(double a, double b, double c)
{
    double product = a * b, sum = product + c;
    double back = sum - product, error = (product - (sum - back)) + (c - back);
    u64 bits = bits_of_double(sum);
    if (error == 0 || error != error || bits & 1)
        return sum;
    /* The exact value lies on the side of the error, and the last bit of the neighbor there is set. */
    return double_of_bits((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

/* Rounding modes, as the whole control register of SSE; workers keep it at ROUND_TO_NEAREST. One statement of assembly changes it,
 * computes and changes it back: no other arithmetic can come between, wherever the compiler moves it. */
enum { ROUND_TO_NEAREST = 0x1f80, ROUND_DOWN = 0x3f80, ROUND_UP = 0x5f80, ROUND_TO_ZERO = 0x7f80 };

#ifdef __AVX__
#define WITH_ROUNDING(name, operands) "ldmxcsr %[mode]\n\tv" name " " operands ", %[d]\n\tldmxcsr %[nearest]"
#define TWO_OPERANDS "%[b], %[a]"
#define ONE_OPERAND "%[b], %[d]"
#define FIRST_OPERAND "x"
#else
#define WITH_ROUNDING(name, operands) "ldmxcsr %[mode]\n\t" name " " operands ", %[d]\n\tldmxcsr %[nearest]"
#define TWO_OPERANDS "%[b]"
#define ONE_OPERAND "%[b]"
#define FIRST_OPERAND "0"
#endif
#define ROUNDING_MODES [mode] "m"(mode), [nearest] "m"(nearest)

#define DIRECTED_2(name, type, instruction)                                                                            \
    INLINE type name(u32 mode, type a, type b)                                                                         \
    {                                                                                                                  \
        const u32 nearest = ROUND_TO_NEAREST;                                                                          \
        type d;                                                                                                        \
        __asm__(WITH_ROUNDING(instruction, TWO_OPERANDS) : [d] "=x"(d) : [a] FIRST_OPERAND(a), [b] "x"(b), ROUNDING_MODES); \
        return d;                                                                                                      \
    }
#define DIRECTED_1(name, type, source, instruction, place)                                                             \
    INLINE type name(u32 mode, source b)                                                                               \
    {                                                                                                                  \
        const u32 nearest = ROUND_TO_NEAREST;                                                                          \
        type d = 0; /* the high part of its register */                                                                \
        __asm__(WITH_ROUNDING(instruction, ONE_OPERAND) : [d] "+x"(d) : [b] place(b), ROUNDING_MODES);                 \
        return d;                                                                                                      \
    }
#define DIRECTED_3(name, type, instruction)                                                                            \
    INLINE type name(u32 mode, type a, type b, type c)                                                                 \
    {                                                                                                                  \
        const u32 nearest = ROUND_TO_NEAREST;                                                                          \
        __asm__(WITH_ROUNDING(instruction, "%[c], %[b]") : [d] "+x"(a) : [b] "x"(b), [c] "x"(c), ROUNDING_MODES);      \
        return a;                                                                                                      \
    }
#define DIRECTED_OF(suffix, type, kind)                                                                                \
    DIRECTED_2(directed_add_##suffix, type, "add" kind)                                                                \
    DIRECTED_2(directed_sub_##suffix, type, "sub" kind)                                                                \
    DIRECTED_2(directed_mul_##suffix, type, "mul" kind)                                                                \
    DIRECTED_2(directed_div_##suffix, type, "div" kind)                                                                \
    DIRECTED_1(directed_sqrt_##suffix, type, type, "sqrt" kind, "x")                                                   \
    DIRECTED_1(directed_##suffix##_of_s64, type, s64, "cvtsi2" kind "q", "r")                                          \
    /* Half of an integer beyond s64: its last bit says whether bits are lost. */                                      \
    INLINE type directed_##suffix##_of_u64(u32 mode, u64 a)                                                            \
    {                                                                                                                  \
        type part = directed_##suffix##_of_s64(mode, (s64)(a >> 63 ? a >> 1 | (a & 1) : a));                           \
        return a >> 63 ? part + part : part;                                                                           \
    }
DIRECTED_OF(f32, float, "ss")
DIRECTED_OF(f64, double, "sd")
DIRECTED_1(directed_f32_of_f64, float, double, "cvtsd2ss", "x")
#ifdef __FMA__
DIRECTED_3(directed_fma_f32, float, "fmadd213ss")
DIRECTED_3(directed_fma_f64, double, "fmadd213sd")
#else
/* Rounded to odd first, which keeps the second rounding right, except of a sum that is zero: its sign depends on the mode. */
INLINE float directed_fma_f32(u32 mode, float a, float b, float c)
{
    double product = (double)a * (double)b, sum = fma_to_odd(a, b, c);
    return directed_f32_of_f64(mode, sum == 0 ? directed_add_f64(mode, product, c) : sum);
}

/* The C library rounds as the control register says. This function has no arithmetic of its own, and none is moved into it. */
__attribute__((noipa, unused)) static double directed_fma_f64(u32 mode, double a, double b, double c)
{
    double (*volatile function)(double, double, double) = fma;
    __builtin_ia32_ldmxcsr(mode);
    double d = function(a, b, c);
    __builtin_ia32_ldmxcsr(ROUND_TO_NEAREST);
    return d;
}
#endif
#undef DIRECTED_OF
#undef DIRECTED_1
#undef DIRECTED_2
#undef DIRECTED_3
#undef WITH_ROUNDING
#undef ROUNDING_MODES

/* Conversions to integers saturate. NaN gives 0, or the highest bit alone if its source has double precision or the
 * result has 64 bits. The value has been rounded. */
INLINE u64 integer_of_nan(u32 bits, bool is_double)
{
    return is_double || bits == 64 ? 1ull << (bits - 1) : 0;
}

INLINE s64 signed_of(double value, u32 bits, bool is_double)
{
    double limit = bits == 64 ? 0x1p63 : (double)(1ull << (bits - 1));
    if (value != value)
        return (s64)integer_of_nan(bits, is_double);
    if (value >= limit)
        return (s64)(~0ull >> (65 - bits));
    return value < -limit ? -(s64)(~0ull >> (65 - bits)) - 1 : (s64)value;
}

INLINE u64 unsigned_of(double value, u32 bits, bool is_double)
{
    double limit = bits == 64 ? 0x1p64 : (double)(1ull << bits);
    if (value != value)
        return integer_of_nan(bits, is_double);
    return !(value > 0) ? 0 : value >= limit ? ~0ull >> (64 - bits) : (u64)value;
}

/* +0 is greater than -0. If one operand is NaN, the result is the other one; with .NaN it is NaN. */
#define MINIMUM_AND_MAXIMUM(suffix, type, canonical_nan, is_negative)                                                  \
    INLINE type min_##suffix(type a, type b)                                                                           \
    {                                                                                                                  \
        if (a != a || b != b)                                                                                          \
            return a == a ? a : b == b ? b : canonical_nan;                                                            \
        return a < b || (a == b && is_negative(a)) ? a : b;                                                            \
    }                                                                                                                  \
    INLINE type max_##suffix(type a, type b)                                                                           \
    {                                                                                                                  \
        if (a != a || b != b)                                                                                          \
            return a == a ? a : b == b ? b : canonical_nan;                                                            \
        return a > b || (a == b && !is_negative(a)) ? a : b;                                                           \
    }                                                                                                                  \
    INLINE type min_nan_##suffix(type a, type b)                                                                       \
    {                                                                                                                  \
        return a != a || b != b ? canonical_nan : min_##suffix(a, b);                                                  \
    }                                                                                                                  \
    INLINE type max_nan_##suffix(type a, type b)                                                                       \
    {                                                                                                                  \
        return a != a || b != b ? canonical_nan : max_##suffix(a, b);                                                  \
    }
MINIMUM_AND_MAXIMUM(f32, float, CANONICAL_NAN_F32, __builtin_signbit)
MINIMUM_AND_MAXIMUM(f64, double, CANONICAL_NAN_F64, __builtin_signbit)
#undef MINIMUM_AND_MAXIMUM

/* .xorsign: the sign is the exclusive or of the operands' signs. */
INLINE float with_xor_of_signs(float value, float a, float b)
{
    u32 sign = (bits_of_float(a) ^ bits_of_float(b)) & 0x80000000u;
    return value != value ? value : float_of_bits((bits_of_float(value) & 0x7fffffffu) | sign);
}

/* For divisors beyond 2^126, div.approx gives 0, and NaN for infinite dividends. */
INLINE float approximate_div(float a, float b)
{
    float size = __builtin_fabsf(b);
    if (size > 0x1p126f && size <= 0x1.fffffep127f)
        return __builtin_isinf(a) || a != a ? CANONICAL_NAN_F32
                                            : float_of_bits((bits_of_float(a) ^ bits_of_float(b)) & 0x80000000u);
    return a / b;
}

INLINE float approximate_rsqrt(float a)
{
    return (float)(1 / __builtin_sqrt((double)a));
}

/* The approximations on double precision read and write the high 32 bits alone, and flush subnormal numbers. */
INLINE double flush_f64(double value)
{
    u64 bits = bits_of_double(value);
    return bits & 0x7ff0000000000000u ? value : double_of_bits(bits & 0x8000000000000000u);
}

INLINE double high_word(double value)
{
    double high = double_of_bits(bits_of_double(value) & 0xffffffff00000000u);
    return high != high ? double_of_bits(0x7fffffff00000000u) : flush_f64(high);
}

INLINE double approximate_rcp_f64(double a)
{
    return high_word(1 / high_word(a));
}

INLINE double approximate_rsqrt_f64(double a)
{
    return high_word(1 / __builtin_sqrt(high_word(a)));
}

#define CLASSES_OF(suffix, type)                                                                                       \
    INLINE bool is_finite_##suffix(type a)                                                                             \
    {                                                                                                                  \
        return __builtin_isfinite(a);                                                                                  \
    }                                                                                                                  \
    INLINE bool is_infinite_##suffix(type a)                                                                           \
    {                                                                                                                  \
        return __builtin_isinf(a) != 0;                                                                                \
    }                                                                                                                  \
    INLINE bool is_number_##suffix(type a)                                                                             \
    {                                                                                                                  \
        return a == a;                                                                                                 \
    }                                                                                                                  \
    INLINE bool is_notanumber_##suffix(type a)                                                                         \
    {                                                                                                                  \
        return a != a;                                                                                                 \
    }                                                                                                                  \
    INLINE bool is_normal_##suffix(type a)                                                                             \
    {                                                                                                                  \
        return __builtin_isnormal(a);                                                                                  \
    }                                                                                                                  \
    INLINE bool is_subnormal_##suffix(type a)                                                                          \
    {                                                                                                                  \
        return __builtin_isfinite(a) && !__builtin_isnormal(a) && a != 0;                                              \
    }
CLASSES_OF(f32, float)
CLASSES_OF(f64, double)
#undef CLASSES_OF

#endif
