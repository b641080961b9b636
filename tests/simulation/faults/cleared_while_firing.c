/* Clears a fault while another thread fires it: that thread has claimed the fault and reads the clock.
 *
 * Prints what the machine says about its faults afterwards. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static void *driver, *nvml;
static sem_t is_firing, may_continue;
static _Thread_local int stops;

/* Replaces the C library's function for all libraries of this process. */
int clock_gettime(clockid_t clock, struct timespec *time)
{
    static int (*original)(clockid_t, struct timespec *);
    if (!original)
        *(void **)&original = dlsym(RTLD_NEXT, "clock_gettime");
    if (stops) {
        stops = 0;
        sem_post(&is_firing);
        sem_wait(&may_continue);
    }
    return original(clock, time);
}

static void *fire(void *argument)
{
    void *handle;
    int (*get_handle)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    stops = 1;
    get_handle(0, &handle);
    return argument;
}

static void *clear(void *argument)
{
    const char *(*end)(const char *, int, int) = (const char *(*)(const char *, int, int))dlsym(driver, "accelerator_sim_faults_end");
    end(NULL, 0, 0);
    return argument;
}

int main(void)
{
    enum { SECONDS = 60, WAIT_MS = 100 };
    static char text[4096];
    pthread_t firing, clearing;
    struct timespec deadline;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!driver || !nvml)
        return 2;
    int (*initialize)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    const char *(*describe)(const char *, int, char *, size_t) =
        (const char *(*)(const char *, int, char *, size_t))dlsym(driver, "accelerator_sim_faults_describe");
    alarm(SECONDS);
    sem_init(&is_firing, 0, 0);
    sem_init(&may_continue, 0, 0);
    initialize();
    pthread_create(&firing, NULL, fire, NULL);
    sem_wait(&is_firing);
    pthread_create(&clearing, NULL, clear, NULL);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += (deadline.tv_nsec + WAIT_MS * 1000000L) / 1000000000L;
    deadline.tv_nsec = (deadline.tv_nsec + WAIT_MS * 1000000L) % 1000000000L;
    const int is_waiting = pthread_timedjoin_np(clearing, NULL, &deadline); /* it may have to wait for the other thread */
    sem_post(&may_continue);
    if (is_waiting)
        pthread_join(clearing, NULL);
    pthread_join(firing, NULL);
    describe(NULL, 0, text, sizeof text);
    fputs(text, stdout);
    return 0;
}
