/* Programs that use kernels and variables of a PTX text while something disturbs them. The first argument names the program.
 *
 * With LIBRARY this is a library instead, whose constructor calls the program that loads it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

void in_constructor(void);

#ifdef LIBRARY

__attribute__((constructor)) static void construct(void)
{
    in_constructor();
}

#else

#define ENTRY(name, parameters, body) ".visible .entry " name "(" parameters ") {\n" body "\nret;\n}\n"
#define MALLOC "{ .param .b64 p; st.param.b64 [p], 16; .param .b64 r; call.uni (r), malloc, (p); ld.param.b64 %a, [r]; }\n"

static const char text[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".extern .func (.param .b64 result) malloc(.param .b64 size);\n"
    ".visible .global .align 4 .u32 counter = 41;\n"
    ENTRY("empty", "", "")
    /* Asks shared memory, which has zeros at first, whether to go on: threads that poll are run in turns. */
    ENTRY("poll", "", ".shared .align 4 .u32 flag; .reg .pred %p; .reg .b32 %v;\n"
          "AGAIN:\nld.volatile.shared.u32 %v, [flag]; setp.ne.u32 %p, %v, 0;\n@%p bra AGAIN;")
    ENTRY("count", "", ".reg .b32 %v; ld.global.u32 %v, [counter]; add.u32 %v, %v, 1; st.global.u32 [counter], %v;")
    ENTRY("allocate", "", ".reg .b64 %a;\n" MALLOC "st.u32 [%a], 1;")
    /* Allocates many blocks and reads the last two for ever, by one instruction. */
    ENTRY("read_heap", "",
          ".reg .pred %p; .reg .b32 %i, %v; .reg .b64 %a, %b, %c;\n"
          "mov.u32 %i, 0; mov.u64 %a, 0;\n"
          "MAKE:\nmov.u64 %b, %a;\n" MALLOC "add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 100000;\n@%p bra MAKE;\n"
          "READ:\nld.volatile.u32 %v, [%a]; mov.u64 %c, %a; mov.u64 %a, %b; mov.u64 %b, %c;\nbra READ;\n")
    /* The third block fails. The others wait until the host sets a flag, by an atom without a result, in a loop that counts. */
    ENTRY("fail", ".param .u64 flag",
          ".shared .align 4 .b8 copy[4]; .reg .pred %p; .reg .b32 %v, %w, %n; .reg .b64 %f;\n"
          "ld.param.u64 %f, [flag]; mov.u32 %v, %ctaid.x; setp.eq.u32 %p, %v, 2;\n@%p trap;\n"
          "mov.u32 %n, 0;\nWAIT:\nadd.u32 %n, %n, 1;\n"
          "ld.volatile.u32 %v, [%f]; red.shared.or.b32 [copy], %v; ld.shared.u32 %w, [copy]; setp.eq.u32 %p, %w, 0;\n"
          "@%p bra WAIT;\n");

/* Of the runtime. */
struct dim3 {
    unsigned x, y, z;
};
enum { DEVICE_TO_HOST = 2, RELAXED = 2 };
void **__cudaRegisterFatBinary(const void *binary);
void __cudaRegisterVar(void **image, char *variable, const char *device_name, const char *name, int external, size_t size,
                       int constant, int global);
void __cudaRegisterFunction(void **image, const void *function, const char *device_name, const char *name, int limit,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp_size);
int cudaFree(void *memory), cudaGetDeviceCount(int *count), cudaSetDevice(int device), cudaDeviceSynchronize(void);
int cudaGetLastError(void), cudaMalloc(void **memory, size_t size), cudaMallocAsync(void **memory, size_t size, void *stream);
int cudaGraphCreate(void **graph, unsigned flags);
int cudaHostAlloc(void **memory, size_t size, unsigned flags);
int cudaGetSymbolAddress(void **address, const void *symbol);
int cudaMemcpyFromSymbol(void *target, const void *symbol, size_t size, size_t offset, int direction);
int cudaFuncSetAttribute(const void *function, int attribute, int value);
int cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream);
int cudaStreamCreate(void **stream), cudaStreamBeginCapture(void *stream, int mode), cudaStreamEndCapture(void *stream, void **graph);
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags);
int cudaEventCreate(void **event), cudaEventRecord(void *event, void *stream), cudaEventSynchronize(void *event);
int cudaEventElapsedTime(float *milliseconds, void *start, void *end);

static char **arguments;
static void **image;
static char counter, other; /* what stands for variables and, next, kernels */
static char empty, poll, count, allocate, read_heap, fail;

static void check(bool is_right, const char *what, int line)
{
    if (is_right)
        return;
    fprintf(stderr, "line %d: %s\n", line, what);
    _exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)

static void register_text(void)
{
    image = __cudaRegisterFatBinary(text);
    __cudaRegisterVar(image, &counter, "counter", "counter", 0, sizeof(int), 0, 0);
#define REGISTER(name) __cudaRegisterFunction(image, &name, #name, #name, -1, NULL, NULL, NULL, NULL, NULL)
    REGISTER(empty), REGISTER(poll), REGISTER(count), REGISTER(allocate), REGISTER(read_heap), REGISTER(fail);
}

static int launch(const void *kernel)
{
    return cudaLaunchKernel(kernel, (struct dim3){1, 1, 1}, (struct dim3){1, 1, 1}, NULL, 0, NULL);
}

static int read_counter(void)
{
    int value = -1;
    CHECK(cudaMemcpyFromSymbol(&value, &counter, sizeof value, 0, DEVICE_TO_HOST) == 0);
    return value;
}

/* A function of the C library, which this program replaces for all libraries of the process. */
#define ORIGINAL(name)                                                                                                 \
    static __typeof__(name) *original;                                                                                 \
    if (!original)                                                                                                     \
    *(void **)&original = dlsym(RTLD_NEXT, #name)

/* A thread loads a library, whose constructor calls CUDA. Meanwhile the main thread uses a variable or CUDA for the first time. */

static sem_t constructing;
static bool registers;

void in_constructor(void)
{
    sem_post(&constructing);
    usleep(300000); /* the main thread takes its locks, and waits for the loader's */
    if (registers)
        __cudaRegisterVar(image, &other, "other", "other", 0, sizeof(int), 0, 0);
    else
        CHECK(cudaFree(NULL) == 0);
}

static void *load(void *path)
{
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    return NULL;
}

static void use_beside_constructor(void)
{
    pthread_t thread;
    void *address;
    int devices;
    if (registers)
        CHECK(cudaFree(NULL) == 0);
    sem_init(&constructing, 0, 0);
    pthread_create(&thread, NULL, load, arguments[2]);
    sem_wait(&constructing);
    CHECK(registers ? cudaGetSymbolAddress(&address, &counter) == 0 : cudaGetDeviceCount(&devices) == 0);
    pthread_join(thread, NULL);
    CHECK(read_counter() == 41);
}

static void use_variable_beside_constructor(void)
{
    registers = true;
    use_beside_constructor();
}

/* A kernel ends by its deadline while it looks for memory of device code. */
static void end_kernel_that_reads_heap(void)
{
    setenv("ACCELERATOR_SIM_KERNEL_TIMEOUT", "0.3", 1);
    CHECK(launch(&read_heap) == 0 && cudaDeviceSynchronize() != 0);
    unsetenv("ACCELERATOR_SIM_KERNEL_TIMEOUT");
    CHECK(cudaSetDevice(1) == 0 && launch(&allocate) == 0 && cudaDeviceSynchronize() == 0);
}

/* A process that another thread forks while the translator starts has the files of its parent. */

static int parents_end[2];
static bool forks;

int posix_spawn(pid_t *process, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                char *const values[], char *const environment[])
{
    ORIGINAL(posix_spawn);
    if (forks && fork() == 0) {
        char byte;
        close(parents_end[1]);
        read(parents_end[0], &byte, 1); /* until the parent ends */
        _exit(0);
    }
    return original(process, path, actions, attributes, values, environment);
}

static void launch_beside_fork(void)
{
    CHECK(pipe(parents_end) == 0 && cudaFree(NULL) == 0);
    forks = true;
    CHECK(launch(&count) == 0);
    forks = false;
    CHECK(read_counter() == 42);
}

/* Another thread ends a capture after a call has seen it. Here the call's first lock ends it. */

static void *captured_stream;

int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    ORIGINAL(pthread_mutex_lock);
    void *stream = captured_stream, *graph;
    captured_stream = NULL;
    if (stream)
        CHECK(cudaStreamEndCapture(stream, &graph) == 0);
    return original(mutex);
}

static void end_capture_in_calls(void)
{
    void *stream, *first, *second;
    float time;
    CHECK(cudaStreamCreate(&stream) == 0 && cudaEventCreate(&first) == 0 && cudaEventCreate(&second) == 0);
    CHECK(cudaEventRecord(first, NULL) == 0);
    CHECK(cudaStreamBeginCapture(stream, RELAXED) == 0);
    captured_stream = stream;
    CHECK(cudaStreamWaitEvent(stream, first, 0) == 0 && !captured_stream);
    CHECK(cudaStreamBeginCapture(stream, RELAXED) == 0);
    captured_stream = stream;
    CHECK(cudaEventRecord(second, stream) == 0 && !captured_stream);
    CHECK(cudaEventSynchronize(second) == 0 && cudaEventElapsedTime(&time, first, second) == 0);
}

/* The process has no file left when it first uses a kernel or variable. */

static void limit_files(struct rlimit *before)
{
    struct rlimit limit;
    int first_free = dup(STDIN_FILENO);
    close(first_free);
    getrlimit(RLIMIT_NOFILE, before);
    limit = (struct rlimit){(rlim_t)first_free, before->rlim_max};
    CHECK(first_free > 0 && setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void launch_without_files(void)
{
    struct rlimit before;
    CHECK(cudaFree(NULL) == 0);
    limit_files(&before);
    CHECK(launch(&count) != 0 && cudaGetLastError() != 0);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0 && launch(&count) == 0);
    CHECK(read_counter() == 42);
}

static void use_variable_without_files(void)
{
    struct rlimit before;
    void *address;
    CHECK(cudaFree(NULL) == 0);
    limit_files(&before);
    CHECK(cudaGetSymbolAddress(&address, &counter) != 0);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0 && launch(&count) == 0);
    CHECK(read_counter() == 42);
}

/* The process has no memory left when a kernel runs that is loaded already. */

static size_t used_memory(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    return pages * 4096;
}

static void launch_without_memory(void)
{
    enum { DYNAMIC_SHARED = 8, ROOM = 100000 };
    static char memory[1 << 16];
    stack_t stack = {.ss_sp = memory, .ss_size = sizeof memory}, after;
    struct rlimit before, limit;
    const char *kernels[] = {&empty, &poll};
    for (int device = 0; device < 2; device++)
        CHECK(cudaSetDevice(device) == 0 && cudaFuncSetAttribute(kernels[device], DYNAMIC_SHARED, 0) == 0);
    CHECK(sigaltstack(&stack, NULL) == 0);
    getrlimit(RLIMIT_AS, &before);
    free(malloc(ROOM)); /* malloc needs no more of the system for a while */
    for (int device = 0; device < 2; device++) {
        limit = (struct rlimit){used_memory(), before.rlim_max};
        CHECK(cudaSetDevice(device) == 0 && setrlimit(RLIMIT_AS, &limit) == 0);
        int error = launch(kernels[device]);
        int later = cudaDeviceSynchronize();
        CHECK(setrlimit(RLIMIT_AS, &before) == 0);
        CHECK(error != 0 || later != 0);
        CHECK(sigaltstack(NULL, &after) == 0 && after.ss_sp == memory && after.ss_flags == 0);
    }
}

/* The watchdog signals a thread that runs a kernel's blocks just when these end. */

static pthread_t main_thread, signaled;
static volatile int *flag;
static sem_t joined;

int pthread_join(pthread_t thread, void **result)
{
    ORIGINAL(pthread_join);
    int error = original(thread, result);
    if (pthread_equal(thread, signaled))
        sem_post(&joined);
    return error;
}

int pthread_sigqueue(pthread_t thread, int number, const union sigval value)
{
    ORIGINAL(pthread_sigqueue);
    struct timespec end;
    if (flag && !pthread_equal(thread, main_thread)) {
        signaled = thread;
        *flag = 1; /* now it ends, too */
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec++;
        CHECK(sem_timedwait(&joined, &end) != 0); /* it must not end before */
    }
    return original(thread, number, value);
}

static void end_thread_beside_watchdog(void)
{
    void *memory, *values[] = {&memory};
    main_thread = pthread_self();
    sem_init(&joined, 0, 0);
    setenv("OMP_NUM_THREADS", "3", 1); /* so that at least one of those that wait is not the main thread */
    CHECK(cudaHostAlloc(&memory, sizeof(int), 0) == 0);
    flag = memory;
    *flag = 0;
    CHECK(cudaLaunchKernel(&fail, (struct dim3){64, 1, 1}, (struct dim3){256, 1, 1}, values, 0, NULL) == 0);
    CHECK(cudaDeviceSynchronize() != 0 && *flag == 1);
}

/* Threads are cancelled in calls. */

static void *memory_of_thread;

static void *call_while_cancelled(void *number)
{
    void *address = NULL, *stream = NULL;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    CHECK(cudaMalloc(&memory_of_thread, 1 << 20) == 0);
    pthread_cancel(pthread_self());
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    switch ((intptr_t)number) {
    case 0:
        cudaFree(memory_of_thread);
        break;
    case 1:
        cudaMalloc(&address, 1 << 20);
        break;
    case 2:
        cudaHostAlloc(&address, 1 << 20, 0);
        break;
    case 3:
        cudaGetSymbolAddress(&address, &counter); /* translates */
        break;
    case 4:
        launch(&count);
        break;
    case 5:
        cudaStreamCreate(&stream);
        break;
    case 6:
        cudaMallocAsync(&address, 1 << 20, NULL);
        break;
    case 7:
        cudaGraphCreate(&address, 0); /* says that it is not simulated */
        break;
    case 8:
        cudaSetDevice(1); /* makes a context */
        break;
    }
    return NULL;
}

static void cancel_threads(void)
{
    enum { CALLS = 9 };
    void *stream, *address;
    pthread_t thread;
    CHECK(cudaFree(NULL) == 0);
    for (intptr_t i = 0; i < CALLS; i++) {
        pthread_create(&thread, NULL, call_while_cancelled, (void *)i);
        pthread_join(thread, NULL);
        CHECK(cudaMalloc(&address, 1 << 20) == 0 && cudaFree(address) == 0);
        CHECK(cudaMallocAsync(&address, 1 << 20, NULL) == 0 && cudaFree(address) == 0);
        CHECK(cudaStreamCreate(&stream) == 0 && cudaSetDevice(1) == 0 && cudaSetDevice(0) == 0);
        CHECK(launch(&count) == 0 && cudaDeviceSynchronize() == 0 && read_counter() > 41);
    }
}

/* Signals that others send while a kernel runs. */

static volatile sig_atomic_t caught;

static void catch(int number)
{
    caught += number;
}

static void *send_signals(void *numbers)
{
    usleep(300000);
    for (const int *number = numbers; *number; number++) {
        kill(getpid(), *number);
        raise(*number);
    }
    usleep(100000);
    *flag = 1;
    return NULL;
}

static void run_beside_signals(int *numbers)
{
    void *memory, *values[] = {&memory};
    pthread_t thread;
    CHECK(cudaHostAlloc(&memory, sizeof(int), 0) == 0);
    flag = memory;
    *flag = 0;
    main_thread = pthread_self();
    signaled = main_thread;
    pthread_create(&thread, NULL, send_signals, numbers);
    CHECK(cudaLaunchKernel(&fail, (struct dim3){1, 1, 1}, (struct dim3){1, 1, 1}, values, 0, NULL) == 0);
    CHECK(cudaDeviceSynchronize() == 0);
    pthread_join(thread, NULL);
}

static void catch_signals(void)
{
    static int numbers[] = {SIGSEGV, SIGFPE, SIGBUS, 0};
    for (int *number = numbers; *number; number++)
        signal(*number, catch);
    run_beside_signals(numbers);
    CHECK(caught == 2 * (SIGSEGV + SIGFPE + SIGBUS));
    for (int *number = numbers; *number; number++)
        signal(*number, SIG_IGN);
    run_beside_signals(numbers);
    CHECK(caught == 2 * (SIGSEGV + SIGFPE + SIGBUS));
}

static void end_by_signal(void)
{
    static int numbers[] = {SIGSEGV, 0};
    run_beside_signals(numbers);
}

static const struct {
    const char *name;
    void (*function)(void);
} programs[] = {
    {"initialization beside a constructor", use_beside_constructor},
    {"a variable beside a constructor", use_variable_beside_constructor},
    {"a deadline", end_kernel_that_reads_heap},
    {"a fork", launch_beside_fork},
    {"the end of a capture", end_capture_in_calls},
    {"a launch without files", launch_without_files},
    {"a variable without files", use_variable_without_files},
    {"a launch without memory", launch_without_memory},
    {"the end of a thread", end_thread_beside_watchdog},
    {"cancelled threads", cancel_threads},
    {"signals", catch_signals},
    {"a fatal signal", end_by_signal},
};

int main(int length, char **values)
{
    enum { SECONDS = 150 };
    alarm(SECONDS); /* ends a program that waits for ever */
    arguments = values;
    register_text();
    for (size_t i = 0; length > 1 && i < sizeof programs / sizeof *programs; i++)
        if (strcmp(values[1], programs[i].name) == 0) {
            programs[i].function();
            return 0;
        }
    return 2;
}

#endif
