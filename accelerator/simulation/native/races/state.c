/* Race detection: whether races are reported, and the storages of accessed memory. */
#include "races.h"

pthread_mutex_t race_lock = PTHREAD_MUTEX_INITIALIZER;
bool races_are_reported, races_are_raised;
const struct race_runtime *race_runtime;

static void (*owner_release)(void *owner);
/* Without the engine, Python releases owners later. Called with the lock held. */
static void **released_owners;
static size_t released_count, released_capacity;

EXPORT int accelerator_simulation_races(void)
{
    return races_are_reported;
}

void release_reference(void *reference)
{
    if (owner_release)
        owner_release(reference);
    else if (array_reserve((void **)&released_owners, &released_capacity, released_count + 1, sizeof *released_owners))
        released_owners[released_count++] = reference;
}

/* Fills in owners that Python has to release, and returns their number. */
EXPORT size_t accelerator_simulation_race_released(void **owners, size_t count)
{
    pthread_mutex_lock(&race_lock);
    count = released_count < count ? released_count : count;
    released_count -= count;
    if (count > 0)
        memcpy(owners, released_owners + released_count, count * sizeof *owners);
    pthread_mutex_unlock(&race_lock);
    return count;
}

EXPORT void accelerator_simulation_race_owners(void (*release)(void *owner))
{
    owner_release = release;
}
