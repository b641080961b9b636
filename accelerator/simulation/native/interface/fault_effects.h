/* What the runtime tells the faults of its machine's GPUs, and what they do to it. The driver has them (common/faults.h). */
#ifndef ACCELERATOR_SIM_FAULT_EFFECTS_H
#define ACCELERATOR_SIM_FAULT_EFFECTS_H

#include <stdbool.h>
#include <stdint.h>

/* What happens on a GPU, and counts. */
enum fault_clock { CLOCK_NONE, CLOCK_OPS, CLOCK_COLLECTIVES, CLOCK_LAUNCHES, CLOCK_SECONDS };

/* What the faults do to an op. */
struct fault_effect {
    int error;     /* the op fails */
    int64_t delay; /* it takes so much longer */
    int64_t until; /* it does not begin before */
};

/* While a GPU hangs, its work ends at a time that is later than all others and tells the GPU. The driver's function end_of says
 * when the hang was over. */
#define HANG_TIMES 1024 /* at least one for each GPU */
#define LATEST (INT64_MAX - HANG_TIMES)

static inline int64_t while_hung(int gpu)
{
    return INT64_MAX - gpu;
}

static inline bool is_while_hung(int64_t time)
{
    return time > LATEST;
}

static inline int hung_gpu(int64_t time)
{
    return (int)(INT64_MAX - time);
}

/* When work ends that begins at a time, in nanoseconds. */
static inline int64_t end_of_work(int64_t begin, int64_t duration)
{
    return is_while_hung(begin) ? begin : begin > LATEST - duration ? LATEST : begin + duration;
}

#endif
