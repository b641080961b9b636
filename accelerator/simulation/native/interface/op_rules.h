/* What Python tells the engine about an op. The engine describes structure and flags to Python by their names. */
#ifndef ACCELERATOR_SIM_OP_RULES_H
#define ACCELERATOR_SIM_OP_RULES_H

#include <stdint.h>

/* X(type, field) */
#define OP_RULES(X)                                                                                                    \
    X(uint64_t, python_dtypes)    /* by number: Python handles calls whose first CUDA tensor has one of these types */ \
    X(uint64_t, host_arguments)   /* by position: arguments that may be CPU tensors */                                 \
    X(uint64_t, host_scalars)     /* by position: arguments that may be CPU tensors without dimensions */              \
    X(uint64_t, out_arguments)    /* by position: arguments that the op may resize */                                  \
    X(uint64_t, state_arguments)  /* by position: arguments that stay as they are if the op fails */                   \
    X(uint32_t, flags)                                                                                                 \
    X(int32_t, selecting_argument) /* a flag that selects Python or the engine, or -1 */                               \
    X(int32_t, python_value)       /* the value that selects Python */                                                 \
    X(int32_t, counted_argument)   /* a tensor whose number of elements selects Python or the engine, or -1 */         \
    X(int64_t, maximum_count)      /* CUDA's kernel takes memory in calls with more elements */                         \
    X(int32_t, counting_flag)      /* without this flag, or the last of these flags, nothing is counted; or -1 */  \
    X(int32_t, dims_argument)     /* the dimensions that the op reduces, or -1 */                                      \
    X(int32_t, dtype_argument)    /* the type that a reduction computes in, or -1 */

#define OP_RULE(type, field) type field;
struct op_rules {
    OP_RULES(OP_RULE)
};
#undef OP_RULE

/* X(flag, value) */
#define OP_FLAGS(X)                                                                                                    \
    X(HAS_ALERT, 1 << 1)         /* Python handles calls while deterministic algorithms are on */                      \
    X(HAS_WORKSPACE, 1 << 2)     /* Python allocates a workspace for a thread, device and stream */                    \
    X(READS_INDICES, 1 << 3)     /* Python handles calls with masks or CPU tensors as indices */                       \
    X(COPIES, 1 << 4)            /* `copy_` */                                                                         \
    X(CLEARS, 1 << 5)            /* `zero_` */                                                                         \
    X(DRAWS, 1 << 6)             /* random numbers, from an argument `generator` */                                    \
    X(WAITS, 1 << 7)             /* the host reads results or their sizes */                                           \
    X(NEEDS_INPUT_DTYPE, 1 << 8) /* the selecting argument is a type; any other than the first tensor's selects Python */ \
    X(COUNTS_VERSIONS, 1 << 9)   /* of the tensors in its first argument, a list that the op writes */                 \
    X(KEEPS_STORAGE, 1 << 10)    /* results keep storages that are larger than they are, as CUDA's kernel leaves them */ \
    X(COPIES_RESULT, 1 << 11)    /* CUDA's kernel takes memory of its result's size while it runs */

/* How an op accesses memory, beyond what its schema says. */
#define OP_RACE_FLAGS(X)                                                                                               \
    X(RACE_USES_PART, 1 << 0) /* values decide which part of its first tensor it reads or writes */                    \
    X(RACE_COPIES, 1 << 1)                                                                                             \
    X(RACE_UPDATES_STATISTICS, 1 << 2) /* it writes its running statistics if it trains */

#define OP_FLAG(name, value) name = value,
enum { OP_FLAGS(OP_FLAG) };
enum { OP_RACE_FLAGS(OP_FLAG) };
#undef OP_FLAG

#endif
