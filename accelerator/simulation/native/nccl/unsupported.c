/* NCCL: functions that are not simulated. nccl.h is not included, because it declares some of these names with other types. */
#include "common/stubs.h"

enum { INVALID_USAGE = 5 };

int fail(int result, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define NAME(name)                                                                                                     \
    STUB int name(void)                                                                                                \
    {                                                                                                                  \
        return fail(INVALID_USAGE, "%s is not simulated", __func__);                                                   \
    }

#include "exported/nccl.h"
