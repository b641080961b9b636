/* Race detection: whether it is on, and the storages of accessed memory. What is reported: report.c. */
#include "races.h"

pthread_mutex_t race_lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
bool races_are_reported, races_are_raised;
const struct race_runtime *race_runtime;
const struct race_storages *race_storages;

EXPORT int accelerator_simulation_races(void)
{
    return races_are_reported;
}
