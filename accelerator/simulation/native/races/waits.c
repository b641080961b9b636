/* Race detection: what the host and allocators have waited for. */
#include "races.h"

void join_host(const struct clock *clock)
{
    const uint64_t version = host_clock.version;
    clock_join(&host_clock, clock);
    if (host_clock.version != version)
        release_guards();
}

/* An allocator or the watchdog of NCCL has seen that work has ended: memory may be used again, and nothing else is ordered. */
void join_reuse(const struct clock *clock)
{
    clock_join(&reuse_clock, clock);
    release_guards();
}
