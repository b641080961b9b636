/* libcuda.so.1: launches of kernels that the driver loaded and that do not run: their error, which stays pending.
 *
 * The program would read memory that nothing computed. Its launch fails, and because not every program checks its launches, the
 * error stays pending until the program reads it: copies, waits and queries return it, and ops raise it. */
#include "driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_RUNTIMES = 2 }; /* libcudart.so.12 and .13: torch may use one, and an extension the other */

_Atomic uint64_t pending_refusal;

static const char *const default_reason =
    "simulated GPUs run torch's ops, compiled code and kernels with PTX; give this kernel's op a CPU kernel (torch.library),"
    " choose another implementation if accelerator.simulation.is_simulated(), or use --no-compute, where kernels do nothing";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t refusals;
static char text[SIM_MAX_REFUSAL_LENGTH]; /* of the first launch whose error is pending */
static _Thread_local char *note;          /* see note_refusals */
static _Atomic int *counters[MAX_RUNTIMES]; /* of the runtimes in use: the pending error raises them, so that ops look for it */
static int runtime_count;
static bool are_raised;

static void attend(void)
{
    const bool is_pending = pending_refusal != 0;
    for (int i = 0; i < runtime_count; i++)
        *counters[i] += is_pending - are_raised;
    are_raised = is_pending;
}

void refusal_raises(_Atomic int *needs_checks)
{
    pthread_mutex_lock(&lock);
    if (runtime_count < MAX_RUNTIMES) {
        counters[runtime_count++] = needs_checks;
        *needs_checks += are_raised;
    }
    pthread_mutex_unlock(&lock);
}

char *note_refusals(char *target)
{
    char *before = note;
    note = target;
    return before;
}

int refuse_launch(const char *kernel, const char *reason, bool is_reported)
{
    if (!reason)
        reason = default_reason;
    if (note) {
        if (!*note)
            snprintf(note, SIM_MAX_REFUSAL_LENGTH, "kernel %s is not simulated: %s", kernel, reason);
        return ERROR_NOT_SUPPORTED;
    }
    if (!is_reported)
        fprintf(stderr, "kernel %s is not simulated: %s\n", kernel, reason);
    pthread_mutex_lock(&lock);
    if (pending_refusal == 0) {
        snprintf(text, sizeof text, "kernel %s is not simulated: %s", kernel, reason);
        pending_refusal = ++refusals;
        attend();
    }
    pthread_mutex_unlock(&lock);
    return ERROR_NOT_SUPPORTED;
}

bool read_refusal(char *target, size_t size)
{
    pthread_mutex_lock(&lock);
    const bool is_pending = pending_refusal != 0;
    if (is_pending && size > 0)
        snprintf(target, size, "%s", text);
    pending_refusal = 0;
    attend();
    pthread_mutex_unlock(&lock);
    return is_pending;
}
