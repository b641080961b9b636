/* NCCL: the calls ncclCommInitRank, ...RankConfig, ...RankScalable, ...All, which joining.c completes. */
#include "nccl.h"

#include <stdlib.h>

ncclResult_t init_rank(struct comm **handle, int ranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config)
{
    struct joining *joining;
    struct id_content content;
    RETURN_IF_ERROR(check_rank(rank, ranks));
    RETURN_IF_ERROR(check_config(config));
    RETURN_IF_ERROR(read_id(id, &content));
    RETURN_IF_ERROR(new_joining(handle, rank, ranks, NULL, &joining));
    joining->comm->id = content;
    ncclResult_t result = check_creator(joining->comm); /* first, because its file may still be there */
    if (result == ncclSuccess)
        return submit_joining(joining);
    abandon_joining(joining);
    free(joining);
    return result;
}

EXPORT ncclResult_t ncclCommInitRankConfig(struct comm **comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    RETURN_IF_ERROR(not_null(comm, "comm"));
    return note_group_error(init_rank(comm, ranks, &id, rank, config));
}

EXPORT ncclResult_t ncclCommInitRank(struct comm **comm, int ranks, ncclUniqueId id, int rank)
{
    RETURN_IF_ERROR(not_null(comm, "comm"));
    return note_group_error(init_rank(comm, ranks, &id, rank, NULL));
}

EXPORT ncclResult_t ncclCommInitRankScalable(struct comm **comm, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                             ncclConfig_t *config)
{
    RETURN_IF_ERROR(not_null(comm, "comm"));
    RETURN_IF_ERROR(not_null(ids, "ids"));
    if (id_count < 1 || id_count > ranks)
        return note_group_error(fail(ncclInvalidArgument, "%d unique ids for %d ranks; pass from 1 to %d", id_count, ranks,
                                     ranks));
    return note_group_error(init_rank(comm, ranks, ids, rank, config));
}

EXPORT ncclResult_t ncclCommInitAll(struct comm **comms, int count, const int *devices)
{
    ncclUniqueId id;
    int device;
    struct gpu_identity gpu;
    RETURN_IF_ERROR(not_null(comms, "comms"));
    RETURN_IF_ERROR(check_rank(0, count));
    RETURN_IF_ERROR(current_device(&device, &gpu));
    RETURN_IF_ERROR(ncclGetUniqueId(&id));
    group_start();
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < count && result == ncclSuccess; rank++) {
        result = use_device(devices ? devices[rank] : rank);
        if (result == ncclSuccess)
            result = init_rank(&comms[rank], count, &id, rank, NULL);
        note_group_error(result);
    }
    use_device(device);
    return group_end(true);
}
