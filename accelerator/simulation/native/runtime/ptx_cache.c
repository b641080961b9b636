/* The CUDA runtime: translations of kernels, in a cache that processes share.
 *
 * A process that finds none starts Python with a copy of accelerator.simulation._ptx, which lies beside this library. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "images.h"
#include "interface/settings.h"

extern char **environ;

/* The umask is for what Python and the compiler write: others must not replace it. */
static const char code[] = "import os, sys; os.umask(0o022); sys.path.insert(0, sys.argv[1]);"
                           " from _ptx.translate import main; sys.exit(main(sys.argv[2:]))";

/* Whether only this user and root may write there. */
static bool is_safe(const char *path, bool is_directory)
{
    struct stat status;
    if (lstat(path, &status) != 0 || (is_directory ? !S_ISDIR(status.st_mode) : !S_ISREG(status.st_mode)))
        return false;
    return (status.st_uid == 0 || status.st_uid == geteuid()) && !(status.st_mode & (S_IWGRP | S_IWOTH));
}

static const char *path_in_cache(const struct program *program, const char *kernel, char path[PATH_MAX])
{
    const char *cache = getenv(SETTING_KERNEL_CACHE);
    uint64_t key[2] = {program->key[0], program->key[1]};
    if (!cache || !*cache)
        return "there is no directory for compiled kernels; set XDG_CACHE_HOME to a writable directory";
    if (!is_safe(cache, true))
        return "others may write into the directory for compiled kernels; set XDG_CACHE_HOME to one of your own";
    add_to_key(key, kernel, strlen(kernel));
    int length = snprintf(path, PATH_MAX, "%s/%016llx%016llx.so", cache, (unsigned long long)key[0], (unsigned long long)key[1]);
    if (length >= PATH_MAX)
        return "the path of the directory for compiled kernels is too long";
    return NULL;
}

static bool write_all(int file, const void *data, size_t size)
{
    const char *at = data;
    while (size > 0) {
        ssize_t written = write(file, at, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        at += written, size -= (size_t)written;
    }
    return true;
}

/* Returns a file with what the translator reads, or -1. */
static int write_request(const struct program *program)
{
    int file = memfd_create("ptx", MFD_CLOEXEC);
    bool is_written = file >= 0;
    for (size_t i = 0; i < program->part_count && is_written; i++) {
        const struct part *part = &program->parts[i];
        struct {
            uint64_t size, text_size;
            uint32_t compression, zero;
        } header = {part->size, part->text_size, part->compression, 0};
        is_written = write_all(file, &header, sizeof header) && write_all(file, part->data, part->size);
    }
    if (is_written && lseek(file, 0, SEEK_SET) == 0)
        return file;
    if (file >= 0)
        close(file);
    return -1;
}

/* The folder of the translator, beside that of this library. */
static bool find_translator(char path[PATH_MAX])
{
    Dl_info info;
    char own[PATH_MAX];
    if (!dladdr((const void *)load_translation, &info) || !realpath(info.dli_fname, own))
        return false;
    return snprintf(path, PATH_MAX, "%s/translator", dirname(dirname(own))) < PATH_MAX;
}

/* The environment without the simulated libraries: compilers need none. */
static char **make_environment(void)
{
    size_t count = 0;
    while (environ[count])
        count++;
    char **copy = calloc(count + 1, sizeof *copy);
    for (size_t i = 0, kept = 0; copy && i < count; i++)
        if (strncmp(environ[i], "LD_PRELOAD=", 11) != 0)
            copy[kept++] = environ[i];
    return copy;
}

static pid_t start(const char *kernel, const char *target, int request, int output)
{
    char translator[PATH_MAX];
    const char *python = getenv(SETTING_PYTHON);
    char **environment = make_environment();
    pid_t process = -1;
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    if (environment && python && find_translator(translator)) {
        char *const arguments[] = {
            (char *)python, "-I", "-S", "-c", (char *)code, translator, (char *)kernel, (char *)target, NULL,
        };
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, request, STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
        posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
        posix_spawnattr_init(&attributes);
        sigemptyset(&none);
        sigfillset(&all);
        posix_spawnattr_setsigmask(&attributes, &none);
        posix_spawnattr_setsigdefault(&attributes, &all);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
        if (posix_spawn(&process, python, &actions, &attributes, arguments, environment) != 0)
            process = -1;
        posix_spawnattr_destroy(&attributes);
        posix_spawn_file_actions_destroy(&actions);
    }
    free(environment);
    return process;
}

/* Reads from the beginning to the end; keeps what comes last. */
static void read_output(int file, char *text, size_t size)
{
    size_t length = 0;
    lseek(file, 0, SEEK_SET);
    for (;;) {
        ssize_t count = read(file, text + length, size - 1 - length);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        length += (size_t)count;
        if (length == size - 1) {
            memmove(text, text + size / 2, length - size / 2);
            length -= size / 2;
        }
    }
    while (length > 0 && text[length - 1] == '\n')
        length--;
    text[length] = '\0';
}

/* Returns why there is no translation now, or NULL. The output goes to a file: the end of a pipe would come only when all
 * processes have closed it that other threads have forked meanwhile. */
static char *run_translator(const struct program *program, const char *kernel, const char *target, bool *is_final)
{
    enum { REFUSED = 3 }; /* of _ptx/translate.py */
    char text[4096] = "";
    int request = write_request(program), output = request < 0 ? -1 : memfd_create("output", MFD_CLOEXEC), status = -1;
    *is_final = false;
    if (output < 0) {
        if (request >= 0)
            close(request);
        return strdup("the host has no memory or file to translate it");
    }
    pid_t process = start(kernel, target, request, output);
    close(request);
    while (process > 0 && waitpid(process, &status, 0) < 0 && errno == EINTR)
        ;
    if (process > 0)
        read_output(output, text, sizeof text);
    close(output);
    if (process < 0) {
        const char *python = getenv(SETTING_PYTHON);
        *is_final = !python || access(python, X_OK) != 0;
        snprintf(text, sizeof text, "Python, which translates it, does not start: %s",
                 python ? python : SETTING_PYTHON " is not set");
        return strdup(text);
    }
    /* A program that ignores SIGCHLD gets no status: the file says whether it is there. */
    if (access(target, R_OK) == 0)
        return NULL;
    *is_final = true;
    bool is_refused = WIFEXITED(status) && WEXITSTATUS(status) == REFUSED && *text;
    const char *last = strrchr(text, '\n');
    char reason[4400];
    snprintf(reason, sizeof reason, "%s%s; " REMEDY, is_refused ? "its PTX cannot run: " : "its translation fails: ",
             last && !is_refused ? last + 1 : text);
    return strdup(reason);
}

/* Whatever lies in the place of a kernel. Nothing else than a kernel does, so that a folder there is removed with what is in it. */
static int remove_one(const char *path, const struct stat *status, int type, struct FTW *place)
{
    (void)status, (void)type, (void)place;
    return remove(path);
}

static void remove_damaged(const char *path)
{
    if (unlink(path) != 0)
        nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Returns false if the process or the host has no file or memory for it now. */
static bool can_open(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return errno != EMFILE && errno != ENFILE && errno != ENOMEM;
    close(file);
    return true;
}

/* Whether a file is what the translator has written: its last eight bytes are "SIMK" and the CRC-32 of those before, as
 * _ptx/compiler.py says. The loader may crash on a damaged one. */
static bool is_whole(const char *path)
{
    struct stat status;
    uint32_t sum = ~0u, table[256];
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320 : 0);
    }
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    const bool is_file = file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 8;
    const size_t size = is_file ? (size_t)status.st_size - 8 : 0;
    unsigned char *data = size ? malloc(size + 8) : NULL;
    bool is_right = data && read(file, data, size + 8) == (ssize_t)size + 8 && memcmp(data + size, "SIMK", 4) == 0;
    for (size_t i = 0; i < size && is_right; i++)
        sum = sum >> 8 ^ table[(sum ^ data[i]) & 0xff];
    is_right = is_right && memcmp(data + size + 4, &(uint32_t){~sum}, 4) == 0;
    free(data);
    if (file >= 0)
        close(file);
    return is_right;
}

void *load_translation(const struct program *program, const char *kernel, char **problem, bool *is_final)
{
    char path[PATH_MAX];
    const char *reason = path_in_cache(program, kernel, path);
    *is_final = true;
    if (reason) {
        *problem = strdup(reason);
        return NULL;
    }
    /* Another process may remove it from a full cache. What is damaged, or what others may write, is made again. */
    for (int attempts = 3; attempts > 0; attempts--) {
        struct stat status;
        if (lstat(path, &status) != 0 && (*problem = run_translator(program, kernel, path, is_final)))
            return NULL;
        *is_final = true;
        utimensat(AT_FDCWD, path, NULL, 0); /* the kernels that were used longest ago are removed first */
        void *library = is_safe(path, false) && is_whole(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library)
            return library;
        if (!can_open(path)) {
            *is_final = false;
            break;
        }
        remove_damaged(path);
    }
    *problem = strdup("its file in the directory for compiled kernels cannot be loaded");
    return NULL;
}
