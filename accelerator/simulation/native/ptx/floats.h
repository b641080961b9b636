/* Instructions of PTX on single and double precision that C has no operator for. */
#ifndef ACCELERATOR_SIM_KERNELS_FLOATS_H
#define ACCELERATOR_SIM_KERNELS_FLOATS_H

#include <math.h>

#include "integers.h"

#define CANONICAL_NAN_F32 float_of_bits(0x7fffffffu)

/* Another value, or the canonical NaN if that is so. Without a branch: gcc would go different ways for the NaN, and make no vectors
 * of the loop. */
INLINE float nan_if_f32(bool is_nan, float value)
{
    u32 all = -(u32)is_nan;
    return float_of_bits((bits_of_float(value) | all) & (~all | 0x7fffffffu));
}

INLINE double nan_if_f64(bool is_nan, double value)
{
    u64 all = -(u64)is_nan;
    return double_of_bits((bits_of_double(value) | all) & (~all | 0x7fffffffffffffffu));
}

/* All computed NaN of single precision have these bits; x86 takes a NaN of the operands, or one with a sign. */
INLINE float canonical_f32(float value)
{
    return nan_if_f32(value != value, value);
}

/* .ftz: subnormal numbers are zeros of the same sign. */
INLINE float flush(float value)
{
    u32 bits = bits_of_float(value), is_normal = (bits & 0x7f800000u) != 0;
    return float_of_bits(bits & (-is_normal | 0x80000000u)); /* no branch: gcc makes no vectors of a loop with one on a constant */
}

/* .sat: clamps to [0, 1]; NaN gives 0. */
INLINE float saturate_f32(float value)
{
    u32 is_positive = value > 0, is_large = value >= 1; /* without a branch, as above */
    return float_of_bits(((bits_of_float(value) & -is_positive) & (is_large - 1)) | (0x3f800000u & -is_large));
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
    /* The exact value lies on the side of the error, and the last bit of the neighbor there is set. Without branches, so that the
     * compiler makes vectors of it. */
    u64 bits = bits_of_double(sum), is_less = (bits_of_double(error) ^ bits) >> 63;
    u64 odd = bits + (((~bits & 1) ^ -is_less) + is_less);
    return __builtin_fabs(error) > 0 ? double_of_bits(odd) : sum; /* the error of what is infinite is NaN */
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
/* Of a number that is rounded to odd, in double precision: the nearest one, or its neighbor on the mode's side. */
INLINE float directed_of_odd(u32 mode, double value)
{
    float nearest = (float)value;
    u32 bits = bits_of_float(nearest), size = bits & 0x7fffffffu;
    bool is_above = (double)nearest > value, is_below = (double)nearest < value, is_negative = bits >> 31;
    u32 step = is_negative ? 1u : ~0u, down = size == 0 ? 0x80000001u : bits + step, up = size == 0 ? 1u : bits - step;
    bool moves_down = is_above & ((mode == ROUND_DOWN) | ((mode == ROUND_TO_ZERO) & (value > 0)));
    bool moves_up = is_below & ((mode == ROUND_UP) | ((mode == ROUND_TO_ZERO) & (value < 0)));
    bits = moves_down ? down : bits;
    return float_of_bits(moves_up ? up : bits);
}

/* No control register is changed: the compiler makes vectors of this. */
INLINE float directed_fma_f32(u32 mode, float a, float b, float c)
{
    double product = (double)a * (double)b, sum = fma_to_odd(a, b, c);
    float rounded = directed_of_odd(mode, sum);
    /* A sum of opposite numbers is -0 if the mode is down, and +0 otherwise. */
    bool are_opposite = (s64)(bits_of_double(product) ^ bits_of_double((double)c)) < 0, is_cancelled = (sum == 0) & are_opposite;
    return is_cancelled ? (mode == ROUND_DOWN ? -0.0f : 0.0f) : rounded;
}

#ifdef __FMA__
DIRECTED_3(directed_fma_f64, double, "fmadd213sd")
#else
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

/* +0 is greater than -0. If one operand is NaN, the result is the other one; with .NaN it is NaN. Without branches, so that the
 * compiler makes vectors of it. */
#define MINIMUM_AND_MAXIMUM(suffix, type, word)                                                                        \
    INLINE type min_##suffix(type a, type b)                                                                           \
    {                                                                                                                  \
        type less = (a < b) | ((a == b) & ((word)bits_of_##type(a) < 0)) ? a : b, number = b == b ? less : a;          \
        return nan_if_##suffix(number != number, number);                                                              \
    }                                                                                                                  \
    INLINE type max_##suffix(type a, type b)                                                                           \
    {                                                                                                                  \
        type more = (a > b) | ((a == b) & ((word)bits_of_##type(a) >= 0)) ? a : b, number = b == b ? more : a;         \
        return nan_if_##suffix(number != number, number);                                                              \
    }                                                                                                                  \
    INLINE type min_nan_##suffix(type a, type b)                                                                       \
    {                                                                                                                  \
        type less = (a < b) | ((a == b) & ((word)bits_of_##type(a) < 0)) ? a : b;                                      \
        return nan_if_##suffix((a != a) | (b != b), less);                                                             \
    }                                                                                                                  \
    INLINE type max_nan_##suffix(type a, type b)                                                                       \
    {                                                                                                                  \
        type more = (a > b) | ((a == b) & ((word)bits_of_##type(a) >= 0)) ? a : b;                                     \
        return nan_if_##suffix((a != a) | (b != b), more);                                                             \
    }
MINIMUM_AND_MAXIMUM(f32, float, s32)
MINIMUM_AND_MAXIMUM(f64, double, s64)
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

/* Within 0.8 units of the last place. No function is called: the compiler makes vectors of this. */
INLINE float approximate_ex2(float a)
{
    float x = a > -160.0f ? a : -160.0f;
    x = x < 130.0f ? x : 130.0f;
    /* The sum has no bits for a fraction: 2^a is 2^whole times a Taylor polynomial of 2^(a - whole). */
    float whole = (x + 0x1.8p23f) - 0x1.8p23f, rest = x - whole, y = 1.52527338e-5f;
    y = __builtin_fmaf(y, rest, 1.54035304e-4f);
    y = __builtin_fmaf(y, rest, 1.33335581e-3f);
    y = __builtin_fmaf(y, rest, 9.61812911e-3f);
    y = __builtin_fmaf(y, rest, 5.55041087e-2f);
    y = __builtin_fmaf(y, rest, 2.40226507e-1f);
    y = __builtin_fmaf(y, rest, 6.93147181e-1f);
    y = __builtin_fmaf(y, rest, 1.0f);
    /* By two factors, of which the first one keeps all bits: the result may be subnormal. */
    s32 exponent = (s32)whole, half = exponent >> 1;
    y = y * float_of_bits((u32)(half + 127) << 23) * float_of_bits((u32)(exponent - half + 127) << 23);
    return a == a ? y : a;
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
