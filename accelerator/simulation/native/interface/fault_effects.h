/* What the runtime tells the faults of its machine's GPUs, and what they do to it. The driver has them (common/faults.h). */
#ifndef ACCELERATOR_SIM_FAULT_EFFECTS_H
#define ACCELERATOR_SIM_FAULT_EFFECTS_H

#include <stdint.h>

/* What happens on a GPU, and counts. */
enum fault_clock { CLOCK_NONE, CLOCK_OPS, CLOCK_COLLECTIVES, CLOCK_LAUNCHES, CLOCK_SECONDS };

/* What the faults do to an op. */
struct fault_effect {
    int error;     /* the op fails */
    int64_t delay; /* it takes so much longer */
    int64_t until; /* it does not begin before; INT64_MAX: never */
};

#endif
