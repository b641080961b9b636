/* The limit on the size of files (ulimit -f). A file that grows beyond it raises SIGXFSZ, which ends most programs without a word. */
#ifndef ACCELERATOR_SIM_FILE_LIMIT_H
#define ACCELERATOR_SIM_FILE_LIMIT_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

static inline bool is_within_file_limit(uint64_t size)
{
    struct rlimit limit;
    return size <= INT64_MAX && getrlimit(RLIMIT_FSIZE, &limit) == 0 && size <= limit.rlim_cur;
}

static inline const char *file_error_text(int error)
{
    return error == EFBIG ? "the file would be larger than the limit on the size of files (ulimit -f) allows" : strerror(error);
}

/* Whether the bytes can be appended to an open file. */
static inline bool is_room_in_file(int file, uint64_t size)
{
    struct stat status;
    return fstat(file, &status) == 0 && is_within_file_limit((uint64_t)status.st_size + size);
}

#endif
