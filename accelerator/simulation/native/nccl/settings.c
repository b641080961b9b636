/* NCCL: variables that a communicator reads. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

bool is_alone(void)
{
    const char *value = getenv("ACCELERATOR_SIM_ALONE");
    return value && strcmp(value, "1") == 0;
}

int64_t read_timeout_ms(void)
{
    enum { DEFAULT_TIMEOUT_S = 600 };
    const char *text = getenv("ACCELERATOR_SIM_NCCL_TIMEOUT");
    char *end;
    double seconds = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !(seconds > 0 && seconds < 1e9))
        seconds = DEFAULT_TIMEOUT_S;
    return (int64_t)(seconds * 1000);
}
