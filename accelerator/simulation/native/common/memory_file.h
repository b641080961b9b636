/* Anonymous files (memfds): memory that processes share.
 *
 * Another process opens such a file under /proc, by the descriptor that a handle names. A program may have closed that
 * descriptor with all others, and the system may have reused its number. So the file is used and closed only while its inode
 * is the same, and a handle opens nothing but its own file. */
#ifndef ACCELERATOR_SIM_MEMORY_FILE_H
#define ACCELERATOR_SIM_MEMORY_FILE_H

#include "file_limit.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "interface/settings.h"

struct memory_file {
    int descriptor;
    dev_t file_system;
    ino_t inode; /* 0: there is no file */
};

static inline bool memory_file_is_open(const struct memory_file *file)
{
    struct stat status;
    return file->inode != 0 && fstat(file->descriptor, &status) == 0 && status.st_dev == file->file_system &&
           status.st_ino == file->inode;
}

static inline void memory_file_close(struct memory_file *file)
{
    if (memory_file_is_open(file))
        close(file->descriptor);
    file->inode = 0;
}

/* Takes ownership of the descriptor, which may be -1. */
static inline bool memory_file_from(struct memory_file *file, int descriptor)
{
    struct stat status;
    *file = (struct memory_file){.descriptor = -1};
    if (descriptor < 0)
        return false;
    if (fstat(descriptor, &status) != 0) {
        close(descriptor);
        return false;
    }
    *file = (struct memory_file){descriptor, status.st_dev, status.st_ino};
    return true;
}

static inline bool memory_file_create(struct memory_file *file, const char *name)
{
    return memory_file_from(file, memfd_create(name, MFD_CLOEXEC));
}

static inline bool memory_file_resize(const struct memory_file *file, uint64_t size)
{
    return is_within_file_limit(size) && ftruncate(file->descriptor, (off_t)size) == 0;
}

/* Only anonymous files have seals: writes must not reach another file. */
static inline bool is_anonymous_file(int descriptor)
{
    return fcntl(descriptor, F_GET_SEALS) >= 0;
}

/* What a handle says about a file: who has it open, and an id that the file contains as long as the handle is valid. */
struct memory_file_name {
    int node, pid, descriptor; /* the node: simulated machines of one cluster share the host's process ids */
    uint64_t inode, id, id_offset;
};

/* Read once: other threads must not read the environment while the program writes it. */
static inline int memory_file_node(void)
{
    static _Atomic int known = -1;
    if (known < 0) {
        const char *node = getenv(SETTING_NODE);
        known = node ? atoi(node) : 0;
    }
    return known;
}

static inline bool memory_file_write_id(const struct memory_file *file, uint64_t id, uint64_t id_offset)
{
    return memory_file_is_open(file) && is_within_file_limit(id_offset + sizeof id) &&
           pwrite(file->descriptor, &id, sizeof id, (off_t)id_offset) == sizeof id;
}

/* Writes the id and fills in the name. */
static inline bool memory_file_export(const struct memory_file *file, uint64_t id, uint64_t id_offset,
                                      struct memory_file_name *name)
{
    *name = (struct memory_file_name){memory_file_node(), getpid(), file->descriptor, file->inode, id, id_offset};
    return memory_file_write_id(file, id, id_offset);
}

/* Opens the file in another process of this machine. Returns -1 if the file is gone or the id is not in it any more. */
static inline int memory_file_open(const struct memory_file_name *name)
{
    char path[64];
    struct stat status;
    uint64_t id;
    if (name->node != memory_file_node())
        return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name->pid, name->descriptor);
    /* O_NONBLOCK: opening a FIFO must not wait for its other end. */
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return -1;
    if (fstat(descriptor, &status) == 0 && status.st_ino == name->inode && is_anonymous_file(descriptor) &&
        pread(descriptor, &id, sizeof id, (off_t)name->id_offset) == sizeof id && id == name->id)
        return descriptor;
    close(descriptor);
    return -1;
}

#endif
