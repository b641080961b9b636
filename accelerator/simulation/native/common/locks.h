/* Included before each file of the simulated libraries. A program may cancel a thread (pthread_cancel) in a call of CUDA, and many
 * functions of the system end such a thread: not while it holds a lock, which nobody would release. */
#ifndef ACCELERATOR_SIM_LOCKS_H
#define ACCELERATOR_SIM_LOCKS_H

#include <pthread.h>

__attribute__((weak, visibility("hidden"))) _Thread_local int sim_locks_held;
__attribute__((weak, visibility("hidden"))) _Thread_local int sim_cancel_state; /* before the first of them */

static inline int sim_lock(pthread_mutex_t *lock)
{
    if (sim_locks_held++ == 0)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &sim_cancel_state);
    return pthread_mutex_lock(lock);
}

static inline int sim_unlock(pthread_mutex_t *lock)
{
    const int error = pthread_mutex_unlock(lock);
    if (--sim_locks_held == 0)
        pthread_setcancelstate(sim_cancel_state, NULL);
    return error;
}

#define pthread_mutex_lock sim_lock
#define pthread_mutex_unlock sim_unlock

#endif
