/* What ends a kernel: its own failures, signals of the processor, and the deadline. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "interface/processor_signals.h"
#include "library.h"

/* The worker that this thread of the CPU is, or NULL. */
static _Thread_local struct running_worker *current;
static _Thread_local stack_t previous_stack;
static _Thread_local void *own_stack; /* NULL if signals go on as before */

static void note(struct run *run, enum kernel_error error, const char *message)
{
    pthread_mutex_lock(&run->lock);
    if (run->error == 0) {
        run->error = error;
        snprintf(run->message, sizeof run->message, "%s", message);
    }
    pthread_mutex_unlock(&run->lock);
    run->stops = true;
}

void note_failure(struct run *run, enum kernel_error error, const char *format, ...)
{
    char message[MESSAGE_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    note(run, error, message);
}

void escape(struct worker *worker)
{
    siglongjmp(running(worker)->escape, 1);
}

/* Writes which thread of which block runs. */
static int describe_thread(const struct worker *worker, char *text, size_t size)
{
    const struct block *block = worker->block;
    const u32 *shape = worker->launch->block, number = worker->thread;
    return snprintf(text, size, "block (%u,%u,%u), thread (%u,%u,%u): ", block->index[0], block->index[1], block->index[2],
                    number % shape[0], number / shape[0] % shape[1], number / shape[0] / shape[1]);
}

void fail_kernel(struct worker *worker, enum kernel_error error, const char *format, ...)
{
    char message[MESSAGE_SIZE];
    int length = describe_thread(worker, message, sizeof message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + length, sizeof message - (size_t)length, format, arguments);
    va_end(arguments);
    begin_uninterrupted(worker); /* until the worker has escaped: note() holds a lock */
    note(running(worker)->run, error, message);
    escape(worker);
}

/* A signal may interrupt a kernel's code at any place, which is then left for good. Functions that hold locks put that off. */
void begin_uninterrupted(struct worker *worker)
{
    running(worker)->is_busy++;
}

void end_uninterrupted(struct worker *worker)
{
    if (--running(worker)->is_busy == 0 && running(worker)->is_interrupted)
        escape(worker);
}

/* Signals of the processor. They are the program's again when no kernel runs, and always if somebody has sent them. */
enum { SIGNALS = 3 };
static const int numbers[SIGNALS] = {SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction previous[SIGNALS];
static u32 running_count; /* guarded by the lock, as what is set */
static _Thread_local bool is_handing_on;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void hand_on(int number, siginfo_t *info, void *context)
{
    const bool is_sent = info->si_code <= 0;
    /* A handler that was set while kernels ran, such as faulthandler's, restores this one and raises the signal. */
    const bool is_raised = is_handing_on && is_sent;
    for (u32 i = 0; i < SIGNALS; i++) {
        if (numbers[i] != number || (is_sent && previous[i].sa_handler == SIG_IGN))
            continue;
        if (!is_raised && previous[i].sa_flags & SA_SIGINFO) {
            is_handing_on = true;
            previous[i].sa_sigaction(number, info, context);
        } else if (!is_raised && previous[i].sa_handler != SIG_DFL && previous[i].sa_handler != SIG_IGN) {
            is_handing_on = true;
            previous[i].sa_handler(number);
        } else {
            signal(number, SIG_DFL); /* the instruction runs again, and the signal ends the process */
            if (is_sent)
                raise(number);
        }
    }
    is_handing_on = false;
}

static const char of_watchdog; /* its address comes with the watchdog's signals */

static void on_signal(int number, siginfo_t *info, void *context)
{
    struct running_worker *worker = current;
    int saved = errno;
    if (info->si_code == SI_QUEUE && info->si_value.sival_ptr == &of_watchdog) {
        if (worker && worker->is_busy)
            worker->is_interrupted = true;
        else if (worker && worker->run->stops)
            escape(&worker->worker);
    } else if (!worker || info->si_code <= 0) {
        hand_on(number, info, context);
    } else {
        worker->is_interrupted |= worker->is_busy != 0;
        fail_kernel(&worker->worker, number == SIGFPE ? KERNEL_FAILED : KERNEL_ILLEGAL_ADDRESS,
                    "it gets the signal %s at the address %p",
                    number == SIGSEGV ? "SIGSEGV" : number == SIGBUS ? "SIGBUS" : "SIGFPE", info->si_addr);
    }
    errno = saved;
}

static bool is_own(const struct sigaction *action)
{
    return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_signal;
}

void begin_faults(void)
{
    pthread_mutex_lock(&lock);
    if (running_count++ == 0) {
        struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER}, found;
        for (u32 i = 0; i < SIGNALS; i++) {
            sigaction(numbers[i], &action, &found);
            if (!is_own(&found))
                previous[i] = found;
        }
    }
    pthread_mutex_unlock(&lock);
}

void end_faults(void)
{
    struct sigaction found;
    pthread_mutex_lock(&lock);
    if (--running_count == 0)
        for (u32 i = 0; i < SIGNALS; i++)
            if (sigaction(numbers[i], NULL, &found) == 0 && is_own(&found)) /* else the program has set another one */
                sigaction(numbers[i], &previous[i], NULL);
    pthread_mutex_unlock(&lock);
}

bool sim_set_handler(int number, const struct sigaction *action, struct sigaction *replaced)
{
    struct sigaction found, *next = NULL;
    pthread_mutex_lock(&lock);
    sigaction(number, NULL, &found);
    for (u32 i = 0; i < SIGNALS && is_own(&found); i++)
        if (numbers[i] == number)
            next = &previous[i];
    if (next)
        found = *next;
    const bool is_new = found.sa_sigaction != action->sa_sigaction;
    if (is_new)
        *replaced = found;
    if (is_new && next)
        *next = *action;
    else if (is_new)
        sigaction(number, action, NULL);
    pthread_mutex_unlock(&lock);
    return is_new;
}

void enter_worker(struct running_worker *worker)
{
    enum { STACK_SIZE = 64 << 10 };
    sigset_t set;
    own_stack = take_buffer(STACK_SIZE);
    worker->thread = pthread_self();
    const stack_t stack = {.ss_sp = own_stack, .ss_size = STACK_SIZE};
    if (own_stack && sigaltstack(&stack, &previous_stack) != 0) {
        return_buffer(own_stack);
        own_stack = NULL;
    }
    sigemptyset(&set);
    for (u32 i = 0; i < SIGNALS; i++)
        sigaddset(&set, numbers[i]);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    current = worker;
}

/* The watchdog: a thread that ends launches after their deadlines. It looks at them now and then, and sleeps when there have
 * been none for a while. */
enum { INTERVAL_NS = 50000000, PATIENCE = 40 /* intervals */ };
static struct run *watched;
static bool has_watchdog, is_asleep;
static pthread_cond_t wakes = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t watch_lock = PTHREAD_MUTEX_INITIALIZER;

void leave_worker(struct running_worker *worker)
{
    current = NULL; /* a signal that comes later is none of a worker's */
    pthread_mutex_lock(&watch_lock); /* the thread must not end before the watchdog has signaled it */
    worker->is_running = false;
    pthread_mutex_unlock(&watch_lock);
    if (own_stack)
        sigaltstack(&previous_stack, NULL);
    return_buffer(own_stack);
}

static void stop(struct run *run)
{
    run->stops = true;
    for (u32 i = 0; i < run->worker_count; i++)
        if (run->workers[i]->is_running)
            pthread_sigqueue(run->workers[i]->thread, SIGSEGV, (union sigval){.sival_ptr = (void *)&of_watchdog});
}

static void stop_late_runs(void)
{
    int64_t time = now();
    for (struct run *run = watched; run; run = run->next) {
        if (run->seen_blocks != run->ended_blocks) {
            run->seen_blocks = run->ended_blocks;
            run->deadline = time + (int64_t)run->request->timeout_ms * MILLISECOND;
        }
        if (run->deadline <= time && !run->stops)
            note_failure(run, KERNEL_TIMEOUT, "it makes no progress: no block has ended for %g s (%s)",
                         (double)run->request->timeout_ms / 1000, run->request->timeout_setting);
        if (run->stops)
            stop(run);
    }
}

static void *watch_all(void *unused)
{
    (void)unused;
    u32 idle = 0;
    pthread_mutex_lock(&watch_lock);
    for (;;) {
        idle = watched ? 0 : idle + 1;
        while (idle > PATIENCE && !watched) {
            is_asleep = true;
            pthread_cond_wait(&wakes, &watch_lock);
        }
        is_asleep = false;
        pthread_mutex_unlock(&watch_lock);
        struct timespec interval = {0, INTERVAL_NS};
        nanosleep(&interval, NULL);
        pthread_mutex_lock(&watch_lock);
        stop_late_runs();
    }
    return NULL;
}

void watch(struct run *run)
{
    pthread_mutex_lock(&watch_lock);
    if (!has_watchdog) {
        pthread_t thread;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        has_watchdog = pthread_create(&thread, NULL, watch_all, NULL) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (has_watchdog)
            pthread_detach(thread);
    }
    run->next = watched;
    watched = run;
    if (is_asleep)
        pthread_cond_signal(&wakes);
    pthread_mutex_unlock(&watch_lock);
}

void unwatch(struct run *run)
{
    pthread_mutex_lock(&watch_lock);
    struct run **link = &watched;
    while (*link != run)
        link = &(*link)->next;
    *link = run->next;
    pthread_mutex_unlock(&watch_lock);
    /* A signal of the watchdog may be pending: a system call takes it while the handler is still there. */
    if (run->stops)
        sched_yield();
}
