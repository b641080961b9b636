/* What a file does in a forked child: locks that another thread held, for example, are locked there for ever. */
#ifndef ACCELERATOR_SIM_FORK_H
#define ACCELERATOR_SIM_FORK_H

#include <pthread.h>
#include <stddef.h>

/* Lets the library call `function` in each forked child. */
#define IN_FORKED_CHILD(function)                                                                                      \
    __attribute__((constructor)) static void watch_forks(void)                                                         \
    {                                                                                                                  \
        pthread_atfork(NULL, NULL, function);                                                                          \
    }

/* Defines a lock that is renewed in each forked child. */
#define RENEWED_LOCK(lock)                                                                                             \
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;                                                           \
    static void renew_##lock(void)                                                                                     \
    {                                                                                                                  \
        pthread_mutex_init(&lock, NULL);                                                                               \
    }                                                                                                                  \
    IN_FORKED_CHILD(renew_##lock)

#endif
