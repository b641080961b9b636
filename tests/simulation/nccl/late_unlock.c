/* A library to preload. A thread that revokes a communicator sleeps after its first lock, so that another thread calls meanwhile. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static _Thread_local int is_late;
static atomic_int sleeps;

/* Replaces the C library's function for all libraries of this process. */
int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    enum { MICROSECONDS = 500000 };
    static int (*original)(pthread_mutex_t *);
    if (!original)
        *(void **)&original = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    int error = original(mutex);
    if (is_late) {
        is_late = 0;
        sleeps = 1;
        usleep(MICROSECONDS);
    }
    return error;
}

int revoke_late(int (*revoke)(void *comm, int flags), void *comm)
{
    is_late = 1;
    return revoke(comm, 0);
}

int has_slept(void)
{
    return sleeps;
}
