/* Race detection: accesses of the host to pinned memory while a copy of a stream uses it, and late copies.
 *
 * The simulation has copied when the call returns. Until the host has waited for the copy, the target's pages allow no access and
 * the source's pages no write. The handler of SIGSEGV knows the exact byte. If the copy does not use that byte, one instruction
 * runs on open pages.
 *
 * A late copy fills its pinned target with NaN until the host has waited, as if the copy had not begun. */
#include "races.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "common/clock.h"
#include "interface/processor_signals.h"

enum { PAGE = 4096, TRAP_FLAG = 0x100, WRITE_FAULT = 2, FILL = 0xff };

/* On a page of its own: the heap may be guarded, too, if the program registers memory of it, and the handler reads guards. */
struct guard {
    struct access copy, *original;
    struct race_range range;
    char *content; /* of the target of a late copy, or NULL */
    bool is_lent; /* the content is in its place */
    bool is_open;
    bool is_reported; /* it only waits to land */
    struct guard *next;
};

bool copies_are_late;
_Thread_local bool is_in_copy;

static struct guard *guards;
static int uses; /* kernels and host functions that run: meanwhile all guards are open */
static _Thread_local struct guard *prepared;
static _Thread_local bool is_stepping;
static struct sigaction previous_fault, previous_trap;
static bool has_passed_on;

static bool is_target(const struct guard *guard)
{
    return guard->copy.flags & RACE_WRITES;
}

static struct race_range pages_of(struct race_range range)
{
    return (struct race_range){range.start & ~(uintptr_t)(PAGE - 1), (range.end + PAGE - 1) & ~(uintptr_t)(PAGE - 1)};
}

static bool overlap(struct race_range first, struct race_range second)
{
    return first.start < second.end && second.start < first.end;
}

/* Sets what the pages of a range allow: what all guards on them do. */
static void protect(struct race_range range)
{
    if (!races_are_reported)
        return;
    const struct race_range pages = pages_of(range);
    mprotect((void *)pages.start, pages.end - pages.start, PROT_READ | PROT_WRITE);
    for (int allowed = PROT_READ;; allowed = PROT_NONE) {
        for (const struct guard *guard = guards; guard; guard = guard->next) {
            const struct race_range own = pages_of(guard->range);
            if (!guard->is_open && !guard->is_reported && is_target(guard) == (allowed == PROT_NONE) && overlap(own, pages))
                mprotect((void *)own.start, own.end - own.start, allowed);
        }
        if (allowed == PROT_NONE)
            return;
    }
}

static void open_pages(struct guard *guard)
{
    const struct race_range pages = pages_of(guard->range);
    guard->is_open = true;
    if (races_are_reported)
        mprotect((void *)pages.start, pages.end - pages.start, PROT_READ | PROT_WRITE);
}

static void land(struct guard *guard)
{
    if (!guard->content)
        return;
    open_pages(guard);
    if (!guard->is_lent)
        memcpy((void *)guard->range.start, guard->content, guard->range.end - guard->range.start);
    free(guard->content);
    guard->content = NULL;
}

/* Takes the content away, as if the copy had not begun. */
static void withhold(struct guard *guard)
{
    const size_t size = guard->range.end - guard->range.start;
    memcpy(guard->content, (void *)guard->range.start, size);
    memset((void *)guard->range.start, FILL, size);
    guard->is_lent = false;
}

static void free_guard(struct guard *guard)
{
    free(guard->content);
    release_access(guard->original);
    munmap(guard, sizeof *guard);
}

/* Removes the guard that *link points to. */
static void remove_guard(struct guard **link)
{
    struct guard *guard = *link;
    *link = guard->next;
    protect(guard->range);
    free_guard(guard);
}

/* ---- The handlers. They run in the thread that touched the memory. ---- */

static void pass_on(int number, const struct sigaction *previous)
{
    /* A handler that restores this one and raises the signal again, as faulthandler's, would be called for ever. */
    static const struct sigaction standard = {.sa_handler = SIG_DFL};
    sigaction(number, has_passed_on ? &standard : previous, NULL);
    has_passed_on = true;
}

/* A copy of columns leaves bytes of its range alone. */
static bool is_copied(const struct guard *guard, uintptr_t address)
{
    const struct race_layout byte = layout_of_bytes((const void *)address, 1);
    return layout_overlap(&guard->copy.layout, &byte) > 0;
}

/* Opens the guarded page at an address. Returns false if there is none. */
static bool open_page(uintptr_t address)
{
    bool is_guarded = false;
    for (struct guard *guard = guards; guard; guard = guard->next) {
        const struct race_range pages = pages_of(guard->range);
        if (guard->is_reported || address < pages.start || address >= pages.end)
            continue;
        open_pages(guard);
        is_guarded = true;
    }
    return is_guarded;
}

static bool is_closed(uintptr_t address)
{
    for (const struct guard *guard = guards; guard; guard = guard->next)
        if (!guard->is_open && !guard->is_reported && overlap(pages_of(guard->range), (struct race_range){address, address + 1}))
            return true;
    return false;
}

/* The thread that calls an op reads too, and knows its line: threads of OpenMP let it be first. Returns whether it was. */
static bool is_opened_by_caller(uintptr_t address)
{
    enum { MOST_WAITS = 100 };
    for (int waits = 0; waits < MOST_WAITS && !is_thread_of_python(); waits++) {
        if (pthread_mutex_lock(&race_lock) == EDEADLK)
            return false;
        const bool is_waiting = is_closed(address);
        pthread_mutex_unlock(&race_lock);
        if (!is_waiting)
            return waits > 0;
        sleep_until(now() + MILLISECOND);
    }
    return false;
}

static void handle_fault(int number, siginfo_t *info, void *opaque)
{
    ucontext_t *context = opaque;
    const uintptr_t address = (uintptr_t)info->si_addr;
    const bool is_write = context->uc_mcontext.gregs[REG_ERR] & WRITE_FAULT;
    struct access violated;
    bool is_guarded = false, is_violation = false;
    if (is_opened_by_caller(address))
        return;
    if (pthread_mutex_lock(&race_lock) == EDEADLK) {
        /* Race detection's own access in this thread: to its heap, beside registered memory. */
        if (!open_page(address))
            pass_on(number, &previous_fault);
        return;
    }
    for (struct guard **link = &guards; *link;) {
        struct guard *guard = *link;
        const struct race_range pages = pages_of(guard->range);
        if (guard->is_reported || address < pages.start || address >= pages.end) {
            link = &guard->next;
            continue;
        }
        is_guarded = true;
        if (!is_in_copy && is_copied(guard, address) && (is_write || is_target(guard))) {
            violated = guard->copy;
            is_violation = true;
            if (guard->content) {
                guard->is_reported = true;
                protect(guard->range);
                link = &guard->next;
            } else
                remove_guard(link);
        } else {
            open_pages(guard);
            link = &guard->next;
        }
    }
    pthread_mutex_unlock(&race_lock);
    if (!is_guarded) {
        pass_on(number, &previous_fault);
        return;
    }
    if (is_violation) {
        const int place = place_of_thread();
        pthread_mutex_lock(&race_lock);
        report_host_race(&violated, address, is_write, place);
        pthread_mutex_unlock(&race_lock);
    }
    if (!is_in_copy) {
        is_stepping = true;
        context->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
    }
}

static void handle_trap(int number, siginfo_t *info, void *opaque)
{
    ucontext_t *context = opaque;
    (void)info;
    if (!is_stepping) {
        pass_on(number, &previous_trap);
        return;
    }
    is_stepping = false;
    context->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    pthread_mutex_lock(&race_lock);
    close_guards();
    pthread_mutex_unlock(&race_lock);
}

/* Other code may have set a handler since, such as pytest's faulthandler; this one must be first of all but that of kernels. */
static void install(int number, void (*handler)(int, siginfo_t *, void *), struct sigaction *previous)
{
    const struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    if (sim_set_handler(number, &action, previous))
        has_passed_on = false;
}

/* ---- Guards. Called with the lock held. ---- */

void open_guards_in_child(void)
{
    race_lock = (pthread_mutex_t)PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
    while (guards) {
        land(guards);
        open_pages(guards);
        guards = guards->next;
    }
    uses = 0;
}

void prepare_guard(struct access *copy)
{
    if (!copy)
        return;
    struct guard *guard = mmap(NULL, sizeof *guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (guard == MAP_FAILED) {
        release_access(copy);
        return;
    }
    *guard = (struct guard){.copy = *copy, .original = copy, .range = layout_range(&copy->layout)};
    prepared = guard;
}

void open_guards(const void *address, size_t size)
{
    const struct race_range range = pages_of((struct race_range){(uintptr_t)address, (uintptr_t)address + size});
    for (struct guard *guard = guards; guard; guard = guard->next)
        if (overlap(pages_of(guard->range), range)) {
            land(guard);
            open_pages(guard);
        }
}

void close_guards(void)
{
    struct guard *guard = prepared;
    prepared = NULL;
    if (guard) {
        const size_t size = guard->range.end - guard->range.start;
        if (copies_are_late && is_target(guard) && layout_is_dense(&guard->copy.layout) && (guard->content = malloc(size))) {
            /* Another thread may have closed these pages since this copy opened them. */
            for (struct guard *other = guards; other; other = other->next)
                if (overlap(pages_of(other->range), pages_of(guard->range)))
                    open_pages(other);
            withhold(guard);
        }
        if (races_are_reported) {
            install(SIGSEGV, handle_fault, &previous_fault);
            install(SIGTRAP, handle_trap, &previous_trap);
        }
        guard->is_open = true;
        guard->next = guards;
        guards = guard;
    }
    for (guard = uses == 0 ? guards : NULL; guard; guard = guard->next)
        if (guard->is_open) {
            guard->is_open = false;
            protect(guard->range);
        }
}

void lend_guards(void)
{
    uses++;
    for (struct guard *guard = guards; guard; guard = guard->next) {
        open_pages(guard);
        if (guard->content && !guard->is_lent) {
            memcpy((void *)guard->range.start, guard->content, guard->range.end - guard->range.start);
            guard->is_lent = true;
        }
    }
}

void take_guards_back(void)
{
    if (--uses > 0)
        return;
    for (struct guard *guard = guards; guard; guard = guard->next)
        if (guard->content && guard->is_lent)
            withhold(guard);
    close_guards();
}

void release_guards(void)
{
    for (struct guard **link = &guards; *link;) {
        const struct access *copy = &(*link)->copy;
        if (clock_covers(&host_clock, (size_t)copy->stream, copy->time) || clock_covers(&reuse_clock, (size_t)copy->stream, copy->time)) {
            land(*link);
            remove_guard(link);
        } else
            link = &(*link)->next;
    }
}

void forget_guards(uintptr_t start, uintptr_t end)
{
    for (struct guard **link = &guards; *link;)
        if (overlap((*link)->range, (struct race_range){start, end}))
            remove_guard(link);
        else
            link = &(*link)->next;
}
