/* The CUDA runtime: what the kernels of torch's ops read before each op. */
#include "runtime.h"

/* Captures under way plus holders of unfinished work, one more while the error of a refused launch is pending, one more for
 * each thread with an unread error of a launch, and one more in a child of a process that used the runtime. */
_Atomic int accelerator_simulation_needs_checks __attribute__((visibility("default")));

/* What it points to is not zero once the machine has had a fault or a broken context. */
static _Atomic int never_used;
_Atomic(_Atomic int *) accelerator_simulation_fault_flag __attribute__((visibility("default"))) = &never_used;
