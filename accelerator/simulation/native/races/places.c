/* Race detection: the line of the program that causes an access, for copies and collectives (for ops: engine/races.hpp).
 *
 * The kernels of ops know it from Python (race_place). Elsewhere, in a copy, a collective or the handler of
 * a fault, the thread may hold any lock, so it cannot take the GIL. There, Python's faulthandler writes the thread's stack into a
 * file, in the handler of a signal that the thread sends to itself. */
#include "races.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fork.h"

enum { MOST_TEXT = 1 << 14, MOST_LINE = 1024, MOST_FOLDERS = 8 };

static char **texts;
static size_t text_count, text_capacity;
RENEWED_LOCK(lock) /* an op asks for its place before it fails in a child */
static int stack_file = -1, stack_signal;
static struct sigaction stack_action;
static pthread_t stack_thread; /* Python's main thread */
static _Atomic bool is_stack_written;
static void *(*python_state)(void); /* of the calling thread */
static struct {
    char *prefix;
    int owner;
} folders[MOST_FOLDERS];
static int folder_count;
static _Thread_local int op_place;

const char *place_text(int place)
{
    pthread_mutex_lock(&lock);
    const char *text = place > 0 && (size_t)place <= text_count ? texts[place - 1] : "an unknown line";
    pthread_mutex_unlock(&lock);
    return text;
}

static int intern(const char *text)
{
    for (size_t i = text_count; i-- > 0;)
        if (strcmp(texts[i], text) == 0)
            return (int)i + 1;
    if (!array_reserve((void **)&texts, &text_capacity, text_count + 1, sizeof *texts) || !(texts[text_count] = strdup(text)))
        return 0;
    return (int)++text_count;
}

int race_place(const char *text)
{
    pthread_mutex_lock(&lock);
    const int place = intern(text);
    pthread_mutex_unlock(&lock);
    return place;
}

int race_set_place(int place)
{
    const int outer = op_place;
    op_place = place;
    return outer;
}

/* Python's faulthandler, whose handler is set, writes a thread's stack to the file at the signal. */
EXPORT void accelerator_simulation_race_stacks(int file, int number)
{
    stack_file = file;
    stack_signal = number;
    stack_thread = pthread_self();
    *(void **)&python_state = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    sigaction(number, NULL, &stack_action);
}

bool is_thread_of_python(void)
{
    return stack_file < 0 || !python_state || python_state();
}

static void write_stack(int number)
{
    stack_action.sa_handler(number);
    is_stack_written = true;
}

/* Adds a folder whose lines are not the program's. */
EXPORT void accelerator_simulation_race_folder(const char *prefix, int owner)
{
    if (folder_count < MOST_FOLDERS && (folders[folder_count].prefix = strdup(prefix)))
        folders[folder_count++].owner = owner;
}

/* What Inductor generates: modules that are named by a hash, and launchers of kernels. */
static bool is_compiled(const char *path, const char *function)
{
    const char *file = strrchr(path, '/');
    if (!file)
        return strcmp(path, "<string>") == 0 && strcmp(function, "launcher") == 0;
    const size_t length = strspn(++file, "abcdefghijklmnopqrstuvwxyz234567");
    return *file == 'c' && length > 50 && strcmp(file + length, ".py") == 0;
}

int race_code_owner(const char *path, const char *function)
{
    if (is_compiled(path, function))
        return RACE_OF_TORCH;
    for (int i = 0; i < folder_count; i++)
        if (strncmp(path, folders[i].prefix, strlen(folders[i].prefix)) == 0)
            return folders[i].owner;
    return strstr(path, "/site-packages/") || strstr(path, "/dist-packages/") ? RACE_OF_LIBRARY : RACE_OF_PROGRAM;
}

/* Finds the innermost line of the program in a stack as faulthandler writes it: `  File "PATH", line 3 in NAME`. If a library
 * makes the access, its line follows. Without a line of the program, the library's or else the innermost is the best there is. */
static int parse(char *stack)
{
    char text[MOST_LINE] = "", first[MOST_LINE] = "", library[MOST_LINE] = "", both[2 * MOST_LINE + 16];
    char *rest = NULL;
    for (char *line = strtok_r(stack, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char path[600], name[300];
        int number;
        if (sscanf(line, "  File \"%599[^\"]\", line %d in %299[^\n]", path, &number, name) != 3)
            continue;
        snprintf(text, sizeof text, "%s:%d in %s", path, number, name);
        const int owner = race_code_owner(path, name);
        if (owner == RACE_OF_PROGRAM) {
            snprintf(both, sizeof both, library[0] ? "%s, through %s" : "%s", text, library);
            return intern(both);
        }
        char *const kept = owner == RACE_OF_LIBRARY ? library : first;
        if (!kept[0])
            memcpy(kept, text, sizeof text);
    }
    return library[0] ? intern(library) : first[0] ? intern(first) : 0;
}

int place_of_thread(void)
{
    if (op_place != 0)
        return op_place;
    if (stack_file < 0)
        return 0;
    sigset_t only, before;
    sigemptyset(&only);
    sigaddset(&only, stack_signal);
    char *stack = malloc(MOST_TEXT);
    if (!stack)
        return 0;
    pthread_mutex_lock(&lock);
    int place = 0;
    if (ftruncate(stack_file, 0) == 0 && lseek(stack_file, 0, SEEK_SET) == 0) {
        /* Programs that restore Python's handlers of all signals, as Lightning does, have removed faulthandler's. */
        struct sigaction action, own = stack_action;
        own.sa_handler = write_stack;
        is_stack_written = false;
        sigaction(stack_signal, &own, &action);
        pthread_sigmask(SIG_UNBLOCK, &only, &before);
        /* A thread of OpenMP has no line: it computes for the main thread, unless that has gone on. */
        pthread_kill(is_thread_of_python() ? pthread_self() : stack_thread, stack_signal);
        for (const int64_t end = now() + SECOND; !is_stack_written && now() < end;)
            sleep_until(now() + MILLISECOND);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        sigaction(stack_signal, &action, NULL);
        const ssize_t size = pread(stack_file, stack, MOST_TEXT - 1, 0);
        stack[size > 0 ? size : 0] = '\0';
        place = parse(stack);
    }
    pthread_mutex_unlock(&lock);
    free(stack);
    return place;
}
