/* Errors and delays that are injected into calls. */
#include "config.h"

#include <string.h>
#include <time.h>

static bool rule_applies(const struct sim_error_rule *rule, const char *function, int physical_gpu)
{
    if (rule->gpu != SIM_NO_GPU && rule->gpu != physical_gpu)
        return false;
    return rule->is_prefix ? strncmp(function, rule->function, strlen(rule->function)) == 0
                           : strcmp(function, rule->function) == 0;
}

int sim_find_injected(const char *function, int physical_gpu)
{
    const struct sim_config *config = sim_config();
    for (int i = 0; i < sim_error_rules; i++)
        if (rule_applies(&config->error_rules[i], function, physical_gpu))
            return config->error_rules[i].code;
    return 0;
}

void sim_init_delay(const char *function)
{
    const struct sim_config *config = sim_config();
    int milliseconds = strcmp(function, "cuInit") == 0 ? config->cu_init_delay : config->nvml_init_delay;
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (milliseconds > 0 && nanosleep(&rest, &rest) != 0)
        ;
}
