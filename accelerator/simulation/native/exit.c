/* A preloaded library of its own: keeps a process from aborting when it ends.
 *
 * torch's autograd threads drop what is left of a backward pass after they have told the main thread that it is done,
 * and may need Python's lock for that. If Python is being finalized by then, CPython (until 3.13) ends such a thread with
 * pthread_exit, whose unwinding meets a C++ destructor that must not be left so: std::terminate. A simulated backward
 * pass takes no time, so short programs on busy machines would often end like that. The thread sleeps instead, as it
 * does from CPython 3.14 on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static bool is_autograd_thread(void)
{
    char name[16] = "";
    return prctl(PR_GET_NAME, name) == 0 && strncmp(name, "pt_autograd", 11) == 0;
}

__attribute__((visibility("default"))) void pthread_exit(void *result)
{
    while (is_autograd_thread())
        pause();
    void (*real)(void *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_exit");
    real(result);
    abort(); /* not reached */
}
