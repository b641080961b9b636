/* Tensor cores: products of matrices whose elements the lanes of a warp hold, and moves of such matrices.
 *
 * Products and sums are computed in double precision, or as integers, and rounded once. A GPU rounds more often. */
#include <string.h>

#include "halves.h"
#include "library.h"

enum { MAX_M = 32, MAX_N = 32, MAX_FLOAT_K = 32, MAX_INTEGER_K = 256, QUAD = 4, HALF_WARP = 16 };

struct matrices {
    double a[MAX_M][MAX_FLOAT_K], b[MAX_FLOAT_K][MAX_N], c[MAX_M][MAX_N];
    s32 a_integer[MAX_M][MAX_INTEGER_K], b_integer[MAX_INTEGER_K][MAX_N], c_integer[MAX_M][MAX_N];
};

static u32 element_bits(enum element element)
{
    switch (element) {
    case E_F64:
        return 64;
    case E_TF32:
    case E_F32:
    case E_S32:
        return 32;
    case E_F16:
    case E_BF16:
        return 16;
    case E_S4:
    case E_U4:
        return 4;
    case E_B1:
        return 1;
    default:
        return 8;
    }
}

static bool is_integer(enum element element)
{
    return element == E_S8 || element == E_U8 || element == E_S4 || element == E_U4 || element == E_B1;
}

/* The words of a lane's fragment, and the elements in them. */
struct fragment {
    u32 (*words)[LANES];
    u32 lane;
    enum element element;
};

static u64 bits_at(const struct fragment *fragment, u32 number)
{
    u32 bits = element_bits(fragment->element);
    if (bits == 64)
        return fragment->words[2 * number][fragment->lane] | (u64)fragment->words[2 * number + 1][fragment->lane] << 32;
    u32 per_word = 32 / bits;
    u32 word = fragment->words[number / per_word][fragment->lane];
    return bits == 32 ? word : word >> bits * (number % per_word) & ((1u << bits) - 1);
}

static double value_at(const struct fragment *fragment, u32 number)
{
    u64 bits = bits_at(fragment, number);
    switch (fragment->element) {
    case E_F16:
        return float_of_half((u16)bits);
    case E_BF16:
        return float_of_bfloat16((u16)bits);
    case E_TF32:
        return float_of_bits((u32)bits & ~0x1fffu); /* the low bits of the register are not read */
    case E_E4M3:
        return float_of_narrow((u32)bits, E4M3);
    case E_E5M2:
        return float_of_narrow((u32)bits, E5M2);
    case E_F64:
        return double_of_bits(bits);
    default:
        return float_of_bits((u32)bits);
    }
}

static s32 integer_at(const struct fragment *fragment, u32 number)
{
    u64 bits = bits_at(fragment, number);
    switch (fragment->element) {
    case E_S8:
        return (s8)bits;
    case E_S4:
        return (s32)(bits << 28) >> 28;
    default:
        return (s32)bits;
    }
}

struct place {
    u32 row, column;
};

/* Where in the matrix an element of a lane lies. */
typedef struct place (*placing)(const struct matrix_shape *shape, u32 lane, u32 number);

/* The layout of mma: a lane has its elements in registers of 32 bits (of 64 for double precision). Registers of one parity
 * hold the upper or the lower 8 rows of a; pairs of them follow along k. */
static u32 per_register(enum element element)
{
    u32 bits = element_bits(element);
    return bits == 64 ? 1 : 32 / bits;
}

static struct place place_a(const struct matrix_shape *shape, u32 lane, u32 number)
{
    u32 per = per_register(shape->a), index = number / per;
    u32 half = shape->m == 16 ? index & 1 : 0, step = shape->m == 16 ? index >> 1 : index;
    return (struct place){lane / QUAD + 8 * half, lane % QUAD * per + number % per + step * QUAD * per};
}

static struct place place_b(const struct matrix_shape *shape, u32 lane, u32 number)
{
    u32 per = per_register(shape->b);
    return (struct place){lane % QUAD * per + number % per + number / per * QUAD * per, lane / QUAD};
}

static struct place place_c(const struct matrix_shape *shape, u32 lane, u32 number)
{
    (void)shape;
    return (struct place){lane / QUAD + 8 * (number / 2), lane % QUAD * 2 + number % 2};
}

/* The layout of wmma, which `load_fragment` makes. */
static struct place place_in_rows(u32 lane, u32 number, u32 rows, u32 columns)
{
    u32 index = lane * (rows * columns / LANES) + number;
    return (struct place){index / columns, index % columns};
}

static struct place place_wmma_a(const struct matrix_shape *shape, u32 lane, u32 number)
{
    return place_in_rows(lane, number, shape->m, shape->k);
}

static struct place place_wmma_b(const struct matrix_shape *shape, u32 lane, u32 number)
{
    return place_in_rows(lane, number, shape->k, shape->n);
}

static struct place place_wmma_c(const struct matrix_shape *shape, u32 lane, u32 number)
{
    return place_in_rows(lane, number, shape->m, shape->n);
}

/* The layout of mma.m8n8k4 with halves: four products, each of 8 lanes: 4 of the lower and 4 of the upper half of the warp. */
static struct place place_quad_a(const struct matrix_shape *shape, u32 lane, u32 number)
{
    u32 upper = lane / HALF_WARP * 4;
    return shape->a_is_column ? (struct place){number + upper, lane % QUAD} : (struct place){lane % QUAD + upper, number};
}

static struct place place_quad_b(const struct matrix_shape *shape, u32 lane, u32 number)
{
    u32 upper = lane / HALF_WARP * 4;
    return shape->b_is_column ? (struct place){number, lane % QUAD + upper} : (struct place){lane % QUAD, number + upper};
}

static struct place place_quad_half_c(const struct matrix_shape *shape, u32 lane, u32 number)
{
    (void)shape;
    return (struct place){lane % QUAD + lane / HALF_WARP * 4, number};
}

static struct place place_quad_float_c(const struct matrix_shape *shape, u32 lane, u32 number)
{
    (void)shape;
    u32 row = (lane & 1) + (number & 2) + lane / HALF_WARP * 4;
    return (struct place){row, (number & 4) + (lane & 2) + (number & 1)};
}

/* Where the elements of a, b, c and d lie. */
struct layout {
    placing a, b, c, d;
};

static struct layout layout_of(const struct matrix_shape *shape)
{
    if (shape->is_wmma)
        return (struct layout){place_wmma_a, place_wmma_b, place_wmma_c, place_wmma_c};
    if (shape->m == 8 && shape->k == 4 && shape->a == E_F16)
        return (struct layout){place_quad_a, place_quad_b, shape->c == E_F16 ? place_quad_half_c : place_quad_float_c,
                               shape->d == E_F16 ? place_quad_half_c : place_quad_float_c};
    return (struct layout){place_a, place_b, place_c, place_c};
}

/* How many elements of a matrix each lane holds. */
static u32 elements_per_lane(const struct matrix_shape *shape, u32 rows, u32 columns)
{
    u32 products = !shape->is_wmma && shape->m == 8 && shape->k == 4 && shape->a == E_F16 ? 4 : 1;
    return rows * columns * products / LANES;
}

static void gather(struct warp *warp, const struct matrix_shape *shape, u32 lanes, struct matrices *matrices)
{
    struct layout layout = layout_of(shape);
    u32 a_count = elements_per_lane(shape, shape->m, shape->k), b_count = elements_per_lane(shape, shape->k, shape->n);
    u32 c_count = elements_per_lane(shape, shape->m, shape->n);
    for (u32 lane = 0; lane < LANES; lane++) {
        if (!(lanes >> lane & 1))
            continue;
        struct fragment a = {warp->operands, lane, shape->a}, b = {warp->operands + shape->a_words, lane, shape->b};
        struct fragment c = {warp->operands + shape->a_words + shape->b_words, lane, shape->c};
        for (u32 i = 0; i < a_count; i++) {
            struct place place = layout.a(shape, lane, i);
            if (is_integer(shape->a))
                matrices->a_integer[place.row][place.column] = integer_at(&a, i);
            else
                matrices->a[place.row][place.column] = value_at(&a, i);
        }
        for (u32 i = 0; i < b_count; i++) {
            struct place place = layout.b(shape, lane, i);
            if (is_integer(shape->b))
                matrices->b_integer[place.row][place.column] = integer_at(&b, i);
            else
                matrices->b[place.row][place.column] = value_at(&b, i);
        }
        for (u32 i = 0; i < c_count; i++) {
            struct place place = layout.c(shape, lane, i);
            if (shape->c == E_S32)
                matrices->c_integer[place.row][place.column] = integer_at(&c, i);
            else
                matrices->c[place.row][place.column] = value_at(&c, i);
        }
    }
}

static void multiply_integers(const struct matrix_shape *shape, struct matrices *matrices)
{
    for (u32 row = 0; row < shape->m; row++)
        for (u32 column = 0; column < shape->n; column++) {
            s64 sum = matrices->c_integer[row][column];
            for (u32 k = 0; k < shape->k; k++) {
                s32 a = matrices->a_integer[row][k], b = matrices->b_integer[k][column];
                sum += shape->a != E_B1 ? a * b : shape->is_and ? a & b : a ^ b;
            }
            matrices->c_integer[row][column] = shape->saturates ? saturate_s32(sum) : (s32)sum;
        }
}

static void multiply_floats(const struct matrix_shape *shape, struct matrices *matrices)
{
    for (u32 row = 0; row < shape->m; row++)
        for (u32 column = 0; column < shape->n; column++) {
            double sum = matrices->c[row][column];
            for (u32 k = 0; k < shape->k; k++)
                sum = shape->a == E_F64 ? __builtin_fma(matrices->a[row][k], matrices->b[k][column], sum)
                                        : sum + matrices->a[row][k] * matrices->b[k][column];
            matrices->c[row][column] = sum;
        }
}

/* Writes one element to a lane's results. */
static void put(struct warp *warp, u32 lane, const struct matrix_shape *shape, u32 number, double value, s32 integer)
{
    u64 bits = bits_of_double(value);
    switch (shape->d) {
    case E_F16:;
        u16 half = half_of_double(value);
        half = shape->saturates ? satfinite_f16(half) : half;
        u32 *word = &warp->results[number / 2][lane];
        *word = number % 2 ? (*word & 0xffff) | (u32)half << 16 : half;
        break;
    case E_F64:
        warp->results[2 * number][lane] = (u32)bits;
        warp->results[2 * number + 1][lane] = (u32)(bits >> 32);
        break;
    case E_S32:
        warp->results[number][lane] = (u32)integer;
        break;
    default:
        warp->results[number][lane] = bits_of_float(canonical_f32((float)value));
    }
}

static void scatter(struct warp *warp, const struct matrix_shape *shape, u32 lanes, const struct matrices *matrices)
{
    struct layout layout = layout_of(shape);
    u32 count = elements_per_lane(shape, shape->m, shape->n);
    for (u32 lane = 0; lane < LANES; lane++)
        for (u32 i = 0; i < count && lanes >> lane & 1; i++) {
            struct place place = layout.d(shape, lane, i);
            put(warp, lane, shape, i, matrices->c[place.row][place.column], matrices->c_integer[place.row][place.column]);
        }
}

static void multiply(struct warp *warp, const struct matrix_shape *shape, u32 lanes)
{
    static _Thread_local struct matrices matrices;
    gather(warp, shape, lanes, &matrices);
    if (is_integer(shape->a))
        multiply_integers(shape, &matrices);
    else
        multiply_floats(shape, &matrices);
    scatter(warp, shape, lanes, &matrices);
}

void multiply_matrices(struct warp *warp, const struct matrix_shape *shape)
{
    bool has_four = !shape->is_wmma && shape->m == 8 && shape->k == 4 && shape->a == E_F16;
    if (!has_four) {
        multiply(warp, shape, ~0u);
        return;
    }
    for (u32 quad = 0; quad < 4; quad++)
        multiply(warp, shape, 0x000f000fu << 4 * quad);
}

/* ldmatrix and stmatrix: a lane holds two neighbors of a row of each matrix of 8 x 8 halves, or of a column. */
static u16 *half_in_memory(const struct warp *warp, u32 matrix, u32 row, u32 column)
{
    return (u16 *)warp->a[8 * matrix + row] + column;
}

void move_matrices(struct warp *warp, enum operation operation, const struct matrix_move *move)
{
    if (operation == MATRIX_TRANSPOSE) {
        for (u32 lane = 0; lane < LANES; lane++) {
            u32 row = lane / QUAD, column = lane % QUAD * 2, word = 0;
            for (u32 i = 0; i < 2; i++) {
                u32 source = (column + i) * QUAD + row / 2;
                word |= (warp->operands[0][source] >> 16 * (row % 2) & 0xffff) << 16 * i;
            }
            warp->results[0][lane] = word;
        }
        return;
    }
    for (u32 matrix = 0; matrix < move->count; matrix++)
        for (u32 lane = 0; lane < LANES; lane++) {
            u32 row = lane / QUAD, column = lane % QUAD * 2;
            u32 *word = operation == MATRIX_LOAD ? &warp->results[matrix][lane] : &warp->operands[matrix][lane];
            u32 loaded = 0;
            for (u32 i = 0; i < 2; i++) {
                u16 *half = move->is_transposed ? half_in_memory(warp, matrix, column + i, row)
                                                : half_in_memory(warp, matrix, row, column + i);
                if (operation == MATRIX_LOAD)
                    loaded |= (u32)*half << 16 * i;
                else
                    *half = (u16)(*word >> 16 * i);
            }
            if (operation == MATRIX_LOAD)
                *word = loaded;
        }
}
