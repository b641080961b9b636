/* libcupti.so.13: functions that do nothing. */
#include "stubs.h"

enum { NOT_INITIALIZED = 15 };

#define NAME(name)                                                                                                     \
    STUB int name(void)                                                                                                \
    {                                                                                                                  \
        return NOT_INITIALIZED;                                                                                        \
    }

#include "names_cupti_13.h"
