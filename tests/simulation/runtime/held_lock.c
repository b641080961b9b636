/* Forks while another thread holds a lock of a simulated library. The child calls the function that takes the lock.
 *
 * Arguments: a library, and the name of a call. The exit status is 0 if the child's call has returned. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *library;
static void (*call)(void);
static sem_t is_held, may_continue;
static _Thread_local int keeps_next_lock;

/* Replaces the C library's function for all libraries of this process. */
int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*original)(pthread_mutex_t *);
    if (!original)
        *(void **)&original = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    int error = original(mutex);
    if (keeps_next_lock) {
        keeps_next_lock = 0;
        sem_post(&is_held);
        sem_wait(&may_continue);
    }
    return error;
}

static void get_nccl_error(void)
{
    const char *(*function)(void *) = (const char *(*)(void *))dlsym(library, "ncclGetLastError");
    function(NULL);
}

static void register_kernel(void)
{
    void (*function)(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *) =
        (void (*)(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *))dlsym(
            library, "__cudaRegisterFunction");
    function(NULL, call, NULL, "kernel", 0, NULL, NULL, NULL, NULL, NULL);
}

static void register_symbol(void)
{
    void (*function)(void **, char *, char *, const char *, int, size_t, int, int) =
        (void (*)(void **, char *, char *, const char *, int, size_t, int, int))dlsym(library, "__cudaRegisterVar");
    function(NULL, NULL, NULL, "symbol", 0, sizeof(int), 0, 0);
}

static void interrupt_waits(void)
{
    struct table {
        void *submit, *wait;
        void (*interrupt)(void);
    };
    const struct table *(*function)(void) = (const struct table *(*)(void))dlsym(library, "accelerator_simulation_pending");
    function()->interrupt();
}

static const struct {
    const char *name;
    void (*function)(void);
} calls[] = {
    {"ncclGetLastError", get_nccl_error},
    {"__cudaRegisterFunction", register_kernel},
    {"__cudaRegisterVar", register_symbol},
    {"interrupt", interrupt_waits},
};

static void *call_and_keep_lock(void *argument)
{
    keeps_next_lock = 1;
    call();
    return argument;
}

int main(int count, char **arguments)
{
    enum { SECONDS = 20 };
    pthread_t thread;
    int status;
    if (count != 3 || !(library = dlopen(arguments[1], RTLD_NOW)))
        return 2;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(arguments[2], calls[i].name) == 0)
            call = calls[i].function;
    if (!call)
        return 2;
    sem_init(&is_held, 0, 0);
    sem_init(&may_continue, 0, 0);
    pthread_create(&thread, NULL, call_and_keep_lock, NULL);
    sem_wait(&is_held);
    pid_t child = fork();
    if (child == 0) {
        alarm(SECONDS); /* ends a child that waits for the lock */
        call();
        _exit(0);
    }
    waitpid(child, &status, 0);
    sem_post(&may_continue);
    pthread_join(thread, NULL);
    return status != 0;
}
