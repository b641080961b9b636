/* Keeps a process from aborting when it ends.
 *
 * An autograd thread of torch cleans up after it has reported the end of a backward pass, and may need the GIL for
 * that. If Python is finalizing, CPython before 3.14 ends such a thread with pthread_exit. Unwinding then leaves a C++
 * destructor by an exception, which calls std::terminate. A simulated backward pass takes no time, so short programs on
 * busy machines would often abort. The thread sleeps instead, as it does from CPython 3.14 on. */
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
