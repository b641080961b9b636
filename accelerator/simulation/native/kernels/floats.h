/* Instructions of PTX on single and double precision that C has no operator for. */
#ifndef ACCELERATOR_SIM_KERNELS_FLOATS_H
#define ACCELERATOR_SIM_KERNELS_FLOATS_H

#include <math.h>

#include "integers.h"

#define CANONICAL_NAN_F32 float_of_bits(0x7fffffffu)
#define CANONICAL_NAN_F64 double_of_bits(0x7fffffffffffffffu)

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

/* Rounding modes other than to nearest, in the bits of the control register of SSE. The operands and the result pass
 * through volatile assembly, which the compiler does not move across the changes of that register. */
enum { ROUND_DOWN = 0x2000, ROUND_UP = 0x4000, ROUND_TO_ZERO = 0x6000, ROUNDING_BITS = 0x6000 };

INLINE u32 begin_rounding(u32 mode)
{
    u32 saved = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr((saved & ~(u32)ROUNDING_BITS) | mode);
    return saved;
}

#define DIRECTED(name, type, expression)                                                                               \
    INLINE type name(u32 mode, type a, type b, type c)                                                                 \
    {                                                                                                                  \
        u32 saved = begin_rounding(mode);                                                                              \
        __asm__ volatile("" : "+x"(a), "+x"(b), "+x"(c));                                                              \
        type d = (expression);                                                                                         \
        __asm__ volatile("" : "+x"(d));                                                                                \
        __builtin_ia32_ldmxcsr(saved);                                                                                 \
        return d;                                                                                                      \
    }
#define DIRECTED_OF(suffix, type, fma_function, sqrt_function)                                                         \
    DIRECTED(directed_add_##suffix, type, a + b)                                                                       \
    DIRECTED(directed_sub_##suffix, type, a - b)                                                                       \
    DIRECTED(directed_mul_##suffix, type, a *b)                                                                        \
    DIRECTED(directed_div_##suffix, type, a / b)                                                                       \
    DIRECTED(directed_fma_##suffix, type, fma_function(a, b, c))                                                       \
    DIRECTED(directed_sqrt_##suffix, type, sqrt_function(a))
DIRECTED_OF(f32, float, __builtin_fmaf, __builtin_sqrtf)
DIRECTED_OF(f64, double, __builtin_fma, __builtin_sqrt)
#undef DIRECTED_OF
#undef DIRECTED

#define DIRECTED_CONVERSION(name, result, source, constraint)                                                          \
    INLINE result name(u32 mode, source a)                                                                             \
    {                                                                                                                  \
        u32 saved = begin_rounding(mode);                                                                              \
        __asm__ volatile("" : constraint(a));                                                                          \
        result d = (result)a;                                                                                          \
        __asm__ volatile("" : "+x"(d));                                                                                \
        __builtin_ia32_ldmxcsr(saved);                                                                                 \
        return d;                                                                                                      \
    }
DIRECTED_CONVERSION(directed_f32_of_f64, float, double, "+x")
DIRECTED_CONVERSION(directed_f32_of_s64, float, s64, "+r")
DIRECTED_CONVERSION(directed_f32_of_u64, float, u64, "+r")
DIRECTED_CONVERSION(directed_f64_of_s64, double, s64, "+r")
DIRECTED_CONVERSION(directed_f64_of_u64, double, u64, "+r")
#undef DIRECTED_CONVERSION

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
