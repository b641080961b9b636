/* How every library hands an error on to its caller. */
#ifndef ACCELERATOR_SIM_ERRORS_H
#define ACCELERATOR_SIM_ERRORS_H

/* Returns the value of the expression unless it is 0, which is success in CUDA, NVML and NCCL. */
#define RETURN_IF_ERROR(expression)                                                                                    \
    do {                                                                                                               \
        int error_ = (expression);                                                                                     \
        if (__builtin_expect(error_ != 0, 0))                                                                          \
            return error_;                                                                                             \
    } while (0)

/* Ends a function by an error if what it needs does not hold. */
#define RETURN_UNLESS(condition, error)                                                                                \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return error;                                                                                              \
    } while (0)

#endif
