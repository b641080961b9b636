/* NCCL: the shared file of a communicator, through which its ranks find each other, those of other simulated nodes too.
 *
 * Rank 0 creates a file that is named by the unique id. The other ranks open it, and the last one unlinks it. A process
 * locks one byte of the file for each of its ranks. The kernel drops these locks when the process ends, for whatever reason, so
 * a rank without a lock is gone; unlike process ids, locks are never reused and work across pid namespaces. Closing any
 * descriptor of a file drops all locks of the process on it, so each process opens the file once. */
#include "nccl.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file_limit.h"
#include "common/fork.h"

#define PREFIX "accelerator-nccl-"
#define SHARED_MAGIC UINT64_C(0x324c43434e4d4953) /* changes with the layout */

enum {
    KIB = 1024,
    MOST_FOR_SLOTS = 4096 * KIB,
    MOST_FOR_ONE_SLOT = 512 * KIB,
    MOST_FOR_MAILBOXES = 3072 * KIB,
    MOST_FOR_ONE_MAILBOX = 256 * KIB,
    PATH_SIZE = 4096,
};

static struct attachment *attachments;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A forked child loses the file locks, so the ranks stay with the parent. */
static void reset_in_child(void)
{
    for (struct attachment *attachment = attachments; attachment; attachment = attachment->next)
        close(attachment->file);
    attachments = NULL;
    pthread_mutex_init(&lock, NULL);
}

IN_FORKED_CHILD(reset_in_child)

static void format_name(const unsigned char id[ID_SIZE], char name[2 * ID_SIZE + 1])
{
    for (int i = 0; i < ID_SIZE; i++)
        snprintf(name + 2 * i, 3, "%02x", id[i]);
}

/* Directories for the file, in order of preference. */
static int list_directories(const char *directories[3])
{
    int count = 0;
    const char *temporary = getenv("TMPDIR");
    directories[count++] = "/dev/shm";
    if (temporary && *temporary == '/')
        directories[count++] = temporary;
    directories[count++] = "/tmp";
    return count;
}

static struct flock bytes(short type, off_t start, off_t count)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = count};
}

static bool lock_byte(int file, int rank)
{
    struct flock range = bytes(F_WRLCK, rank, 1);
    return fcntl(file, F_SETLK, &range) == 0;
}

static bool is_linked(int file)
{
    struct stat status;
    return fstat(file, &status) == 0 && status.st_nlink > 0;
}

static bool is_own_file(int file)
{
    struct stat status;
    return fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid();
}

static struct attachment *find_attachment(const char *name)
{
    struct attachment *attachment = attachments;
    while (attachment && strcmp(attachment->name, name) != 0)
        attachment = attachment->next;
    return attachment;
}

/* Removes files that no process uses any more. */
static void remove_abandoned(const char *directory)
{
    DIR *entries = opendir(directory);
    if (!entries)
        return;
    for (struct dirent *entry; (entry = readdir(entries));) {
        char name[2 * ID_SIZE + 1];
        if (strncmp(entry->d_name, PREFIX, sizeof PREFIX - 1) != 0)
            continue;
        snprintf(name, sizeof name, "%s", entry->d_name + sizeof PREFIX - 1);
        if (find_attachment(name))
            continue;
        int file = openat(dirfd(entries), entry->d_name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (file < 0)
            continue;
        struct flock all = bytes(F_WRLCK, 0, 0);
        if (is_own_file(file) && fcntl(file, F_SETLK, &all) == 0 && is_linked(file))
            unlinkat(dirfd(entries), entry->d_name, 0);
        close(file);
    }
    closedir(entries);
}

static size_t round_up(size_t size)
{
    return (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static struct shared_state plan(int ranks)
{
    size_t count = (size_t)ranks;
    struct shared_state shared = {.magic = SHARED_MAGIC, .ranks = ranks};
    size_t mailbox = smaller(MOST_FOR_ONE_MAILBOX, MOST_FOR_MAILBOXES / (count * count));
    mailbox = mailbox / CACHE_LINE * CACHE_LINE;
    shared.mailbox_size = mailbox - sizeof(struct mailbox);
    shared.slot_size = smaller(MOST_FOR_ONE_SLOT, MOST_FOR_SLOTS / count) / (2 * CACHE_LINE) * (2 * CACHE_LINE);
    shared.mailboxes = round_up(sizeof(struct shared_state) + count * sizeof(struct member));
    shared.slots = shared.mailboxes + count * count * mailbox;
    shared.size = shared.slots + count * shared.slot_size;
    return shared;
}

static int reserve(int file, size_t size)
{
    int error;
    if (!is_within_file_limit(size))
        return EFBIG;
    do
        error = posix_fallocate(file, 0, (off_t)size);
    while (error == EINTR);
    return error;
}

static struct attachment *new_attachment(const char *name, const char *path, int file, struct shared_state *shared)
{
    struct attachment *attachment = calloc(1, sizeof *attachment);
    char *copy = strdup(path);
    if (!attachment || !copy) {
        free(attachment);
        free(copy);
        return NULL;
    }
    snprintf(attachment->name, sizeof attachment->name, "%s", name);
    attachment->path = copy;
    attachment->file = file;
    attachment->shared = shared;
    attachment->next = attachments;
    attachments = attachment;
    return attachment;
}

/* Creates the file under a temporary name, so that no other rank opens it unfinished. Returns EAGAIN if another process
 * removed it as abandoned before it was locked. */
static int make_in(const char *directory, const char *name, int ranks, struct attachment **made)
{
    char path[PATH_SIZE], unfinished[PATH_SIZE + 8];
    if (snprintf(path, sizeof path, "%s/" PREFIX "%s", directory, name) >= (int)sizeof path)
        return ENAMETOOLONG;
    snprintf(unfinished, sizeof unfinished, "%s.new", path);
    int file = open(unfinished, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return errno;
    const struct shared_state planned = plan(ranks);
    struct shared_state *shared = MAP_FAILED;
    int error = lock_byte(file, 0) && is_linked(file) ? reserve(file, planned.size) : EAGAIN;
    if (error == 0)
        shared = mmap(NULL, planned.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (error == 0 && shared == MAP_FAILED)
        error = errno;
    if (error == 0) {
        *shared = planned;
        if (rename(unfinished, path) != 0)
            error = errno == ENOENT ? EAGAIN : errno;
        else if (!(*made = new_attachment(name, path, file, shared))) {
            unlink(path);
            error = ENOMEM;
        }
    }
    if (error != 0) {
        unlink(unfinished);
        if (shared != MAP_FAILED)
            munmap(shared, planned.size);
        close(file);
    }
    return error;
}

static ncclResult_t make(const char *name, int ranks, struct attachment **made)
{
    enum { ATTEMPTS = 20 };
    const char *directories[3];
    int count = list_directories(directories), error = 0;
    for (int i = 0; i < count; i++)
        remove_abandoned(directories[i]);
    for (int i = 0; i < count; i++) {
        for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
            error = make_in(directories[i], name, ranks, made);
            if (error != EAGAIN)
                break;
        }
        if (error == 0)
            return ncclSuccess;
    }
    return fail(ncclSystemError, "cannot reserve %zu bytes of shared memory for %d ranks in /dev/shm, TMPDIR or /tmp: %s",
                plan(ranks).size, ranks, file_error_text(error));
}

/* Opens the file if it exists, and locks the rank's byte first. */
static struct attachment *find_file(const char *name, int rank)
{
    const char *directories[3];
    int count = list_directories(directories);
    for (int i = 0; i < count; i++) {
        char path[PATH_SIZE];
        struct stat status;
        if (snprintf(path, sizeof path, "%s/" PREFIX "%s", directories[i], name) >= (int)sizeof path)
            continue;
        int file = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
        if (file < 0)
            continue;
        if (is_own_file(file) && lock_byte(file, rank) && is_linked(file) && fstat(file, &status) == 0 &&
            (size_t)status.st_size >= sizeof(struct shared_state)) {
            struct shared_state *shared = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (shared != MAP_FAILED) {
                struct attachment *attachment = NULL;
                if (shared->magic == SHARED_MAGIC && shared->size == (size_t)status.st_size)
                    attachment = new_attachment(name, path, file, shared);
                if (attachment)
                    return attachment;
                munmap(shared, (size_t)status.st_size);
            }
        }
        close(file);
    }
    return NULL;
}

static void remove_path(struct attachment *attachment)
{
    if (!attachment->path)
        return;
    unlink(attachment->path);
    free(attachment->path);
    attachment->path = NULL;
}

/* Closes the file when no rank of this process uses it. Called with the lock held. */
static void release(struct attachment *attachment)
{
    if (attachment->references > 0)
        return;
    for (struct attachment **link = &attachments; *link; link = &(*link)->next)
        if (*link == attachment) {
            *link = attachment->next;
            break;
        }
    munmap(attachment->shared, attachment->shared->size);
    close(attachment->file);
    free(attachment->path);
    free(attachment);
}

static ncclResult_t become_member(struct comm *comm, struct attachment *attachment)
{
    struct shared_state *shared = attachment->shared;
    if (shared->ranks != comm->ranks)
        return fail(ncclInvalidUsage, "rank %d says that there are %d ranks, rank 0 says %d", comm->rank, comm->ranks,
                    shared->ranks);
    struct member *member = &shared->members[comm->rank];
    if (member->state != MEMBER_ABSENT || !lock_byte(attachment->file, comm->rank))
        return fail(ncclInvalidUsage, "there are two ranks %d with this unique id", comm->rank);
    member->gpu = comm->gpu;
    /* First, because a present rank of this process would count as gone: a process does not see its own locks. */
    attachment->is_here[comm->rank] = true;
    member->state = MEMBER_PRESENT;
    attachment->references++;
    comm->attachment = attachment;
    comm->shared = shared;
    if (++shared->attached == shared->ranks)
        remove_path(attachment);
    wake_all(shared);
    return ncclSuccess;
}

ncclResult_t attach(struct comm *comm, bool *is_done)
{
    char name[2 * ID_SIZE + 1];
    ncclResult_t result = ncclSuccess;
    format_name(comm->id.name, name);
    pthread_mutex_lock(&lock);
    struct attachment *attachment = find_attachment(name);
    if (!attachment && comm->rank == 0)
        result = make(name, comm->ranks, &attachment);
    else if (!attachment)
        attachment = find_file(name, comm->rank);
    if (attachment) {
        result = become_member(comm, attachment);
        release(attachment);
    }
    pthread_mutex_unlock(&lock);
    *is_done = result == ncclSuccess && attachment;
    return result;
}

void detach(struct comm *comm, enum member_state state)
{
    struct attachment *attachment = comm->attachment;
    if (!attachment || comm->fork_generation != fork_generation)
        return;
    pthread_mutex_lock(&lock);
    struct shared_state *shared = attachment->shared;
    if (shared->attached < shared->ranks)
        remove_path(attachment); /* no other rank may attach to an incomplete communicator */
    shared->members[comm->rank].state = (int)state;
    wake_all(shared);
    struct flock range = bytes(F_UNLCK, comm->rank, 1);
    fcntl(attachment->file, F_SETLK, &range);
    attachment->is_here[comm->rank] = false;
    attachment->references--;
    comm->attachment = NULL;
    comm->shared = NULL;
    release(attachment);
    pthread_mutex_unlock(&lock);
}

bool is_process_gone(const struct comm *comm, int rank)
{
    struct attachment *attachment = comm->attachment;
    if (attachment->is_here[rank])
        return false;
    struct flock range = bytes(F_WRLCK, rank, 1);
    return fcntl(attachment->file, F_GETLK, &range) == 0 && range.l_type == F_UNLCK;
}
