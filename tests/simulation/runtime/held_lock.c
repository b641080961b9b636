/* Forks while another thread holds a lock of a simulated library. The child calls the function that takes the lock.
 *
 * Arguments: a library, the name of a call, and which of the locks that it takes, from 1 on; those before may be held too. The exit
 * status is 0 if the child's call has succeeded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "interface/engine_runtime.h"

static void *library;
static int (*call)(void);
static sem_t is_held, may_continue;
static _Thread_local int locks_left; /* until the one that the thread keeps */

/* Replaces the C library's function for all libraries of this process. */
int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*original)(pthread_mutex_t *);
    if (!original)
        *(void **)&original = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    int error = original(mutex);
    if (locks_left > 0 && --locks_left == 0) {
        sem_post(&is_held);
        sem_wait(&may_continue);
    }
    return error;
}

static int get_nccl_error(void)
{
    const char *(*function)(void *) = (const char *(*)(void *))dlsym(library, "ncclGetLastError");
    function(NULL);
    return 0;
}

static int register_kernel(void)
{
    void (*function)(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *) =
        (void (*)(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *))dlsym(
            library, "__cudaRegisterFunction");
    function(NULL, call, NULL, "kernel", 0, NULL, NULL, NULL, NULL, NULL);
    return 0;
}

static int register_symbol(void)
{
    void (*function)(void **, char *, char *, const char *, int, size_t, int, int) =
        (void (*)(void **, char *, char *, const char *, int, size_t, int, int))dlsym(library, "__cudaRegisterVar");
    function(NULL, NULL, NULL, "symbol", 0, sizeof(int), 0, 0);
    return 0;
}

static int interrupt_waits(void)
{
    struct table {
        void *submit, *wait;
        void (*interrupt)(void);
    };
    const struct table *(*function)(void) = (const struct table *(*)(void))dlsym(library, "accelerator_simulation_pending");
    function()->interrupt();
    return 0;
}

static int initialize_driver(void)
{
    int (*function)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    return function(0);
}

static int count_devices(void)
{
    int count, (*function)(int *) = (int (*)(int *))dlsym(library, "cudaGetDeviceCount");
    return function(&count);
}

static int get_handle(void)
{
    void *handle;
    int (*initialize)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*function)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    const int error = initialize();
    return error ? error : function(0, &handle);
}

static int add_place(void)
{
    const struct engine_runtime *(*function)(void) =
        (const struct engine_runtime *(*)(void))dlsym(library, "accelerator_simulation_engine_runtime");
    return function()->races->place("a line") == 0;
}

static const struct {
    const char *name;
    int (*function)(void);
} calls[] = {
    {"ncclGetLastError", get_nccl_error},
    {"__cudaRegisterFunction", register_kernel},
    {"__cudaRegisterVar", register_symbol},
    {"interrupt", interrupt_waits},
    {"cuInit", initialize_driver},
    {"cudaGetDeviceCount", count_devices},
    {"nvmlDeviceGetHandleByIndex_v2", get_handle},
    {"place", add_place},
};

static void *call_and_keep_lock(void *argument)
{
    locks_left = *(int *)argument;
    call();
    return argument;
}

int main(int count, char **arguments)
{
    enum { SECONDS = 20 };
    pthread_t thread;
    int status, number = count == 4 ? atoi(arguments[3]) : 0;
    if (number == 0 || !(library = dlopen(arguments[1], RTLD_NOW)))
        return 2;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(arguments[2], calls[i].name) == 0)
            call = calls[i].function;
    if (!call)
        return 2;
    sem_init(&is_held, 0, 0);
    sem_init(&may_continue, 0, 0);
    alarm(2 * SECONDS); /* ends this process if the call takes fewer locks */
    pthread_create(&thread, NULL, call_and_keep_lock, &number);
    sem_wait(&is_held);
    pid_t child = fork();
    if (child == 0) {
        alarm(SECONDS); /* ends a child that waits for the lock */
        _exit(call());
    }
    waitpid(child, &status, 0);
    sem_post(&may_continue);
    pthread_join(thread, NULL);
    return status != 0;
}
