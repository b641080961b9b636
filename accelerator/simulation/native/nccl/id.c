/* NCCL: unique ids.
 *
 * A unique id names its creator, so that a rank with the id of a process that has ended does not wait for the others: after
 * an elastic restart, torch may still hold the id of the previous attempt in its store. */
#include "nccl.h"

#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "common/process.h"

#define ID_MAGIC "accsim2" /* eight bytes with the final zero; changes with the content */

enum { ID_MAGIC_SIZE = 8 };
_Static_assert(ID_MAGIC_SIZE + sizeof(struct id_content) <= sizeof(ncclUniqueId), "the content must fit into a unique id");

static void fill_randomly(unsigned char name[ID_SIZE])
{
    size_t done = 0;
    while (done < ID_SIZE) {
        ssize_t count = getrandom(name + done, ID_SIZE - done, 0);
        if (count > 0)
            done += (size_t)count;
    }
}

/* The inode of the namespace; 0 if it is unknown. */
static uint64_t own_pid_namespace(void)
{
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    RETURN_IF_ERROR(not_null(id, "id"));
    struct process self;
    struct id_content content;
    memset(&content, 0, sizeof content); /* also the padding */
    fill_randomly(content.name);
    content.pid_namespace = own_pid_namespace();
    if (read_process(getpid(), &self)) {
        content.pid = getpid();
        content.start_time = self.start_time;
    }
    memset(id, 0, sizeof *id);
    memcpy(id->internal, ID_MAGIC, ID_MAGIC_SIZE);
    memcpy(id->internal + ID_MAGIC_SIZE, &content, sizeof content);
    return ncclSuccess;
}

ncclResult_t read_id(const ncclUniqueId *id, struct id_content *content)
{
    if (memcmp(id->internal, ID_MAGIC, ID_MAGIC_SIZE) != 0 && !is_alone())
        return fail(ncclInvalidArgument, "the unique id is not from this library; pass the result of ncclGetUniqueId");
    memcpy(content, id->internal + ID_MAGIC_SIZE, sizeof *content);
    return ncclSuccess;
}

ncclResult_t check_creator(const struct comm *comm)
{
    const struct id_content *id = &comm->id;
    struct process creator;
    /* A process of another pid namespace has another number here, or none. */
    if (id->pid == 0 || id->pid_namespace == 0 || id->pid_namespace != own_pid_namespace())
        return ncclSuccess;
    if (read_process(id->pid, &creator) && (creator.start_time == 0 || creator.start_time == id->start_time))
        return ncclSuccess;
    return fail(ncclRemoteError, "rank %d: the creator of this id is gone (process %d); exchange a new id", comm->rank, id->pid);
}

static uint64_t mix(uint64_t state, uint64_t word)
{
    state = (state ^ word) + UINT64_C(0x9e3779b97f4a7c15);
    state = (state ^ state >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    state = (state ^ state >> 27) * UINT64_C(0x94d049bb133111eb);
    return state ^ state >> 31;
}

/* The same words give the same id on every rank. */
void derive_id(struct id_content *id, const struct comm *parent, const uint64_t *words, size_t count)
{
    uint64_t halves[2];
    memcpy(halves, parent->id.name, sizeof halves);
    for (size_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++)
            halves[half] = mix(halves[half] + (uint64_t)half, words[i]);
    memcpy(id->name, halves, sizeof halves);
}
