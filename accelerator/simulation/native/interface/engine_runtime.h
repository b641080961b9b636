/* What the engine needs of the simulated runtime, which gives it to Python, and Python to the engine. */
#ifndef ACCELERATOR_SIM_ENGINE_RUNTIME_H
#define ACCELERATOR_SIM_ENGINE_RUNTIME_H

#include <stddef.h>

#include "interface/race_accesses.h"

#ifdef __cplusplus
#include <atomic>
#define SHARED_ATOMIC(type) std::atomic<type>
#else
#define SHARED_ATOMIC(type) _Atomic type
#endif

struct engine_runtime {
    const char *boundary; /* see boundary.h; stays the first member */
    SHARED_ATOMIC(int) * needs_checks; /* not zero if a stream captures or waits for a collective, or an error is pending */
    int (*is_stream_free)(void *stream, int device); /* whether it neither captures nor waits, and no error is pending */
    int (*is_device_memory)(const void *address);
    void (*clear_memory)(void *address, size_t size); /* of the device */
    const struct race_functions *races; /* NULL unless races are to be reported */
};

#endif
