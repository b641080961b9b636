/* NCCL: reads the variables of a communicator and of the machine; simulation/_settings/options.py has their defaults. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

bool is_alone(void)
{
    const char *value = getenv(SETTING_WITHOUT_PEERS);
    return value && strcmp(value, "1") == 0;
}

bool is_rehearsed(void)
{
    const char *value = getenv(SETTING_COMPUTE);
    return value && strcmp(value, "0") == 0;
}

int64_t read_timeout_ms(void)
{
    const char *text = getenv(SETTING_NCCL_TIMEOUT);
    char *end;
    double seconds = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !(seconds > 0 && seconds < 1e9))
        seconds = atof(SETTING_NCCL_TIMEOUT_DEFAULT);
    return (int64_t)(seconds * 1000);
}
