/* Accesses of memory, checked, and atomic operations.
 *
 * A global or generic address is the host's address; a shared one is an offset; a local one is the host's address. Only one
 * thread of the CPU runs a block, so operations on shared memory need not be atomic. */
#ifndef ACCELERATOR_SIM_KERNELS_MEMORY_H
#define ACCELERATOR_SIM_KERNELS_MEMORY_H

#include "halves.h"

static const struct services *services;

INLINE u64 rotate_right(u64 value, u32 count)
{
    return count ? value >> count | value << (64 - count) : value;
}

/* Global and generic accesses. `range` is what the group of accesses used last. */
INLINE char *locate(struct worker *k, struct range *range, u32 group, u64 address, u32 size_log2, u32 access)
{
    if (__builtin_expect(rotate_right(address - range->low, size_log2) > range->limit, 0))
        *range = k->find_range(k, group, address, size_log2, access);
    return (char *)address;
}

/* Accesses of a piece of memory that is known: shared memory, a thread's local memory, parameters. */
INLINE char *locate_in(struct worker *k, const char *space, char *base, u64 size, u64 offset, u32 size_log2, u32 access)
{
    if (__builtin_expect(rotate_right(offset, size_log2) >= size >> size_log2, 0))
        services->fail_offset(k, space, offset, size, 1u << size_log2, access);
    return base + offset;
}

/* The lanes whose flags are 1; others are 0. */
INLINE u32 mask_of(const u8 *flags)
{
    u32 mask = 0;
    for (u32 i = 0; i < LANES; i += 8) {
        u64 bytes;
        __builtin_memcpy(&bytes, flags + i, sizeof bytes);
        mask |= (u32)(bytes * 0x0102040810204080u >> 56) << i; /* gathers the lowest bits of the bytes in the highest byte */
    }
    return mask;
}

#define FOR_LANES(lanes)                                                                                               \
    for (u32 rest_ = (lanes), lane; rest_ && (lane = (u32)__builtin_ctz(rest_), true); rest_ &= rest_ - 1)

/* One copy of each loop: kernels have many accesses, and compiling takes long enough. */
#define NO_INLINE __attribute__((noinline, unused)) static

/* Whether all 32 lanes access adjacent pieces of memory, in order, all of them between the limits. */
#define ARE_ADJACENT(type)                                                                                             \
    NO_INLINE bool are_adjacent_##type(u64 low, u64 count, const type *at, u32 lanes, u32 size_log2)                      \
    {                                                                                                                  \
        if (lanes != ~0u)                                                                                              \
            return false;                                                                                              \
        type gaps = 0;                                                                                                 \
        for (u32 lane = 0; lane < LANES; lane++)                                                                       \
            gaps |= at[lane] - at[0] - ((type)lane << size_log2);                                                      \
        return gaps == 0 && rotate_right(at[0] - low, size_log2) < count &&                                            \
               rotate_right(at[LANES - 1] - low, size_log2) < count;                                                   \
    }
ARE_ADJACENT(u32)
ARE_ADJACENT(u64)
#undef ARE_ADJACENT

/* Checks the addresses of all lanes that access memory; that a lane is `first` + lane is for reports. */
NO_INLINE void locate_lanes_u64(struct worker *k, struct range *range, u32 group, const u64 *at, u32 lanes, u32 size_log2, u32 first,
                             u32 access)
{
    FOR_LANES(lanes)
        if (rotate_right(at[lane] - range->low, size_log2) > range->limit) {
            k->thread = first + lane;
            *range = k->find_range(k, group, at[lane], size_log2, access);
        }
}

NO_INLINE void locate_lanes_u32(struct worker *k, u64 size, const u32 *at, u32 lanes, u32 size_log2, u32 first, u32 access)
{
    FOR_LANES(lanes)
        if (rotate_right(at[lane], size_log2) >= size >> size_log2) {
            k->thread = first + lane;
            services->fail_offset(k, "shared", at[lane], size, 1u << size_log2, access);
        }
}

#define LOAD(type, pointer) (*(const type *)(pointer))
#define STORE(type, pointer, value) ((void)(*(type *)(pointer) = (value)))

/* .volatile, .relaxed, .acquire and .release: other threads of the CPU see each access whole. */
#define LOAD_ATOMIC(type, word, pointer)                                                                               \
    ({                                                                                                                 \
        word bits_ = __atomic_load_n((const word *)(pointer), __ATOMIC_ACQUIRE);                                       \
        type value_;                                                                                                   \
        __builtin_memcpy(&value_, &bits_, sizeof value_);                                                              \
        value_;                                                                                                        \
    })
#define STORE_ATOMIC(type, word, pointer, value)                                                                       \
    ({                                                                                                                 \
        type value_ = (value);                                                                                         \
        word bits_;                                                                                                    \
        __builtin_memcpy(&bits_, &value_, sizeof bits_);                                                               \
        __atomic_store_n((word *)(pointer), bits_, __ATOMIC_RELEASE);                                                  \
    })

/* Replaces the value at an address by an expression of `old`, which is the result. */
#define UPDATE_ATOMIC(type, word, pointer, expression)                                                                 \
    ({                                                                                                                 \
        word *at_ = (word *)(pointer), before_ = __atomic_load_n(at_, __ATOMIC_RELAXED), after_;                       \
        type old;                                                                                                      \
        do {                                                                                                           \
            __builtin_memcpy(&old, &before_, sizeof old);                                                              \
            type new_ = (expression);                                                                                  \
            __builtin_memcpy(&after_, &new_, sizeof after_);                                                           \
        } while (!__atomic_compare_exchange_n(at_, &before_, after_, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));       \
        old;                                                                                                           \
    })
#define UPDATE_ALONE(type, word, pointer, expression)                                                                  \
    ({                                                                                                                 \
        type *at_ = (type *)(pointer), old = *at_;                                                                     \
        *at_ = (expression);                                                                                           \
        old;                                                                                                           \
    })

/* Compares bits, so that it fits all types. */
#define EXCHANGE_IF_EQUAL(word, pointer, expected, desired)                                                            \
    ({                                                                                                                 \
        word expected_ = (expected);                                                                                   \
        __atomic_compare_exchange_n((word *)(pointer), &expected_, (word)(desired), false, __ATOMIC_SEQ_CST,           \
                                    __ATOMIC_SEQ_CST);                                                                 \
        expected_;                                                                                                     \
    })

/* 16 bytes: the compiler would call a library for other operations. */
#define EXCHANGE_IF_EQUAL_128(pointer, expected, desired)                                                              \
    __sync_val_compare_and_swap((u128 *)(pointer), (u128)(expected), (u128)(desired))
#define EXCHANGE_128(pointer, desired)                                                                                 \
    ({                                                                                                                 \
        u128 *at_ = (u128 *)(pointer), before_ = *at_, seen_;                                                          \
        while ((seen_ = __sync_val_compare_and_swap(at_, before_, (u128)(desired))) != before_)                        \
            before_ = seen_;                                                                                           \
        before_;                                                                                                       \
    })

INLINE u32 add_f16x2(u32 a, u32 b)
{
    return pack_halves(add_f16((u16)a, (u16)b), add_f16((u16)(a >> 16), (u16)(b >> 16)));
}

INLINE u32 add_bf16x2(u32 a, u32 b)
{
    return pack_halves(add_bf16((u16)a, (u16)b), add_bf16((u16)(a >> 16), (u16)(b >> 16)));
}

/* wmma: lane i holds the elements i * count to (i + 1) * count of a matrix, in the order of its rows. */
INLINE u64 fragment_offset(u32 number, u64 stride, u32 columns, u32 size, bool is_row)
{
    u32 row = number / columns, column = number % columns;
    return (is_row ? row * stride + column : column * stride + row) * size;
}

INLINE void load_fragment(u32 *words, const char *matrix, u64 stride, u32 lane, u32 rows, u32 columns, u32 size, bool is_row)
{
    u32 count = rows * columns / LANES;
    for (u32 i = 0; i < count; i++)
        __builtin_memcpy((char *)words + i * size, matrix + fragment_offset(lane * count + i, stride, columns, size, is_row), size);
}

INLINE void store_fragment(const u32 *words, char *matrix, u64 stride, u32 lane, u32 rows, u32 columns, u32 size, bool is_row)
{
    u32 count = rows * columns / LANES;
    for (u32 i = 0; i < count; i++)
        __builtin_memcpy(matrix + fragment_offset(lane * count + i, stride, columns, size, is_row), (const char *)words + i * size, size);
}

/* An mbarrier object, a word that only one thread of the CPU uses at a time: bits 0 to 19 are the arrivals that the phase still
 * expects, 20 to 39 those that each phase expects, 40 to 61 the bytes of transactions still expected, 63 the phase's parity. */
enum { MBARRIER_COUNT_BITS = 20, MBARRIER_COUNT_MASK = 0xfffff, MBARRIER_BYTES_SHIFT = 40 };
#define MBARRIER_BYTES_MASK (((1ull << 22) - 1) << MBARRIER_BYTES_SHIFT)
#define MBARRIER_PHASE (1ull << 63)

INLINE void mbarrier_init(u64 *object, u32 count)
{
    *object = (count & MBARRIER_COUNT_MASK) | (u64)(count & MBARRIER_COUNT_MASK) << MBARRIER_COUNT_BITS;
}

INLINE void mbarrier_end_phase(u64 *object)
{
    u64 expected = *object >> MBARRIER_COUNT_BITS & MBARRIER_COUNT_MASK;
    if (!(*object & (MBARRIER_COUNT_MASK | MBARRIER_BYTES_MASK)))
        *object = ((*object ^ MBARRIER_PHASE) & ~(u64)MBARRIER_COUNT_MASK) | expected;
}

/* The bytes may be complete before they are expected: the count wraps around. */
INLINE void mbarrier_add_bytes(u64 *object, u64 bytes)
{
    u64 sum = (*object + (bytes << MBARRIER_BYTES_SHIFT)) & MBARRIER_BYTES_MASK;
    *object = (*object & ~MBARRIER_BYTES_MASK) | sum;
}

INLINE void mbarrier_expect(u64 *object, u32 bytes)
{
    mbarrier_add_bytes(object, bytes);
}

INLINE void mbarrier_complete(u64 *object, u32 bytes)
{
    mbarrier_add_bytes(object, 0 - (u64)bytes);
    mbarrier_end_phase(object);
}

/* The result is the state before the arrival, for mbarrier.test_wait. */
INLINE u64 mbarrier_arrive(u64 *object, u32 count, u32 bytes, bool drops)
{
    u64 state = *object;
    mbarrier_add_bytes(object, bytes);
    *object -= count;
    if (drops)
        *object -= (u64)count << MBARRIER_COUNT_BITS;
    mbarrier_end_phase(object);
    return state;
}

INLINE bool mbarrier_phase_is_over(const u64 *object, u64 state)
{
    return (*object ^ state) >> 63;
}

INLINE bool mbarrier_parity_is_over(const u64 *object, u32 parity)
{
    return (*object >> 63) != (parity & 1);
}

INLINE u32 mbarrier_pending(u64 state)
{
    return state & MBARRIER_COUNT_MASK;
}

INLINE u32 absolute_differences(u32 a, u32 b, u32 c, u32 width, bool is_signed, bool a_is_signed, bool b_is_signed,
                                bool saturates, bool adds)
{
    u32 sum = c, packed = 0, mask = (1u << width) - 1;
    s32 largest = (s32)(is_signed ? mask >> 1 : mask);
    for (u32 shift = 0; shift < 32; shift += width) {
        s32 x = (s32)(a >> shift & mask), y = (s32)(b >> shift & mask);
        x -= a_is_signed && x >> (width - 1) ? (s32)mask + 1 : 0;
        y -= b_is_signed && y >> (width - 1) ? (s32)mask + 1 : 0;
        s32 difference = x < y ? y - x : x - y;
        if (saturates && difference > largest)
            difference = largest;
        sum += (u32)difference;
        packed |= ((u32)difference & mask) << shift;
    }
    return adds ? sum : packed;
}

#endif
