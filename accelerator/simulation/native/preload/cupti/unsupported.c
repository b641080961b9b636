/* libcupti.so.13: functions that do nothing. */
#include "common/stubs.h"

enum { NOT_INITIALIZED = 15 };

#define NAME(name)                                                                                                     \
    STUB int name(void)                                                                                                \
    {                                                                                                                  \
        return NOT_INITIALIZED;                                                                                        \
    }

#include "exported/cupti.h"
