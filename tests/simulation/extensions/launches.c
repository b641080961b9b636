/* Programs that use a kernel or variable of a PTX text while something disturbs them. The first argument names the program.
 *
 * With LIBRARY this is a library instead, whose constructor calls the program that loads it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef LIBRARY

__attribute__((constructor)) static void construct(void)
{
    void (*function)(void);
    *(void **)&function = dlsym(RTLD_DEFAULT, "in_constructor");
    function();
}

#else

static const char text[] = ".version 7.0\n.target sm_80\n.address_size 64\n"
                           ".visible .global .align 4 .u32 counter = 41;\n"
                           ".visible .entry count() {\n"
                           "    .reg .b32 %v; ld.global.u32 %v, [counter]; add.u32 %v, %v, 1; st.global.u32 [counter], %v; ret;\n"
                           "}\n";

static void *runtime;
static void **image;
static char **arguments;
static int counter, other; /* addresses that stand for variables */

/* Calls a function of the runtime. */
#define CALL(name, ...) ((int (*)())dlsym(runtime, #name))(__VA_ARGS__)

static void check(int is_right, const char *what)
{
    if (is_right)
        return;
    fprintf(stderr, "wrong: %s\n", what);
    _exit(1);
}
#define CHECK(condition) check(condition, #condition)

static void register_text(void)
{
    image = ((void **(*)(const void *))dlsym(runtime, "__cudaRegisterFatBinary"))(text);
    CALL(__cudaRegisterVar, image, (char *)&counter, "counter", "counter", 0, sizeof(int), 0, 0);
    CALL(__cudaRegisterFunction, image, (const void *)register_text, "count", "count", -1, NULL, NULL, NULL, NULL, NULL);
}

static int read_counter(void)
{
    enum { DEVICE_TO_HOST = 2 };
    int value = -1;
    CHECK(CALL(cudaMemcpyFromSymbol, &value, &counter, sizeof value, (size_t)0, DEVICE_TO_HOST) == 0);
    return value;
}

/* A library is loaded: its constructor, during which no other thread loads one or asks where one is, calls CUDA while the first
 * use of a variable, or of CUDA, does so too. */

static sem_t constructing;

void in_constructor(void)
{
    sem_post(&constructing);
    usleep(500000); /* the other thread takes its locks */
    if (strcmp(arguments[1], "register") == 0)
        CALL(__cudaRegisterVar, image, (char *)&other, "other", "other", 0, sizeof(int), 0, 0);
    else
        CHECK(CALL(cudaFree, NULL) == 0);
}

static void *load(void *path)
{
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    return NULL;
}

static void load_library(void)
{
    pthread_t thread;
    int count = 0;
    if (strcmp(arguments[1], "register") == 0)
        CHECK(CALL(cudaFree, NULL) == 0);
    int (*count_devices)(int *) = dlsym(runtime, "cudaGetDeviceCount"); /* which takes the loader's lock */
    int (*find_symbol)(void **, const void *) = dlsym(runtime, "cudaGetSymbolAddress");
    void *address = NULL;
    sem_init(&constructing, 0, 0);
    pthread_create(&thread, NULL, load, arguments[2]);
    sem_wait(&constructing);
    if (strcmp(arguments[1], "register") == 0)
        CHECK(find_symbol(&address, &counter) == 0 && address);
    else
        CHECK(count_devices(&count) == 0 && count == 1);
    pthread_join(thread, NULL);
    CHECK(read_counter() == 41);
}

static const struct {
    const char *name;
    void (*function)(void);
} programs[] = {
    {"register", load_library},
    {"initialize", load_library},
};

int main(int count, char **values)
{
    enum { SECONDS = 60 };
    alarm(SECONDS); /* ends a program that waits for ever */
    arguments = values;
    if (count < 2 || !(runtime = dlopen("libcudart.so.13", RTLD_NOW)))
        return 2;
    register_text();
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strcmp(values[1], programs[i].name) == 0) {
            programs[i].function();
            return 0;
        }
    return 2;
}

#endif
