/* A library to preload. In a call by copy_late(), each lock waits until another thread has copied. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

static _Thread_local int is_late;
static atomic_int copies;

/* Replaces the C library's function for all libraries of this process. */
int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    enum { MOST_MILLISECONDS = 500 }; /* in case the other thread waits for a lock of this one */
    static int (*original)(pthread_mutex_t *);
    if (!original)
        *(void **)&original = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    const int before = copies;
    for (int i = 0; is_late && copies < before + 2 && i < MOST_MILLISECONDS; i++)
        usleep(1000);
    return original(mutex);
}

void count_copy(void)
{
    copies++;
}

int copy_late(int (*copy)(void *, const void *, size_t, int, void *), void *target, const void *source, size_t size, void *stream)
{
    enum { DEFAULT = 4 };
    is_late = 1;
    const int error = copy(target, source, size, DEFAULT, stream);
    is_late = 0;
    return error;
}
