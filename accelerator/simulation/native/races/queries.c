/* Race detection: queries of events and streams, whose answers depend on timing. */
#include "races.h"

#include <dlfcn.h>

/* The watchdog asks about ten times a second, until a stream or the host has waited for the event. */
enum { LATE_ANSWERS = 2, LATE_ANSWERS_OF_WATCHDOG = 100 };

static void *find_python(const char *name)
{
    return dlsym(RTLD_DEFAULT, name);
}

/* Whether the program itself makes the calling thread's queries: events, streams and work objects hold the GIL when Python asks
 * them. Allocators and NCCL's watchdog do not hold it. */
static bool is_for_program(void)
{
    static int (*holds_gil)(void);
    if (!holds_gil)
        *(void **)&holds_gil = find_python("PyGILState_Check");
    return holds_gil && holds_gil();
}

/* NCCL's watchdog polls in a thread that runs no Python. */
static bool is_thread_of_program(void)
{
    static void *(*thread_state)(void);
    if (!thread_state)
        *(void **)&thread_state = find_python("PyGILState_GetThisThreadState");
    return !thread_state || thread_state();
}

/* The device's allocator, which is in another library, queries before it reuses memory; a work object instead of waiting. */
static bool is_instead_of_wait(const void *caller)
{
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libtorch_cuda");
}

static bool is_covered(const struct clock *clock)
{
    for (size_t i = 0; i < clock->length; i++)
        if (!clock_covers(&host_clock, i, clock->times[i]))
            return false;
    return true;
}

/* If the program asks and the answer is "ready", the host has waited. torch's own queries order the reuse of freed memory alone,
 * because the answer that they get depends on timing. Their first answers are "not ready", which CUDA may always answer, so that a
 * work object lets a stream wait: once the watchdog has seen the end of its collective, its wait() does nothing. */
static bool is_late(const struct clock *clock, unsigned *queries, bool is_waited_for, const void *caller)
{
    if (is_for_program()) {
        join_host(clock);
        return false;
    }
    if (is_covered(clock))
        return false;
    const bool is_watchdog = !is_thread_of_program();
    if (!(is_watchdog && is_waited_for) && ++*queries <= (is_watchdog ? LATE_ANSWERS_OF_WATCHDOG : LATE_ANSWERS))
        return true;
    if (!is_watchdog && is_instead_of_wait(caller))
        join_host(clock);
    else
        join_reuse(clock);
    return false;
}

bool race_delays_event(struct race_event *event, const void *caller)
{
    pthread_mutex_lock(&race_lock);
    const bool delays = event->clock && is_late(event->clock, &event->queries, event->is_waited_for, caller);
    pthread_mutex_unlock(&race_lock);
    return delays;
}

bool race_delays_stream(struct race_stream *stream, const void *caller)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    const bool delays = is_late(clock_of(&present, stream, &index), &stream->queries, false, caller);
    pthread_mutex_unlock(&race_lock);
    return delays;
}
