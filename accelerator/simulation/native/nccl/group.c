/* NCCL: the calls of the group that a thread has open. */
#include "nccl.h"

_Thread_local struct group group;

ncclResult_t note_group_error(ncclResult_t error)
{
    if (group.depth > 0 && group.error == ncclSuccess)
        group.error = error;
    return error;
}

void group_start(void)
{
    group.depth++;
}

ncclResult_t not_null(const void *pointer, const char *name)
{
    return pointer ? ncclSuccess : note_group_error(fail(ncclInvalidArgument, "the argument '%s' is NULL", name));
}
