/* NCCL: memory of GPUs that programs allocate, or register, which does nothing. */
#include "nccl.h"

EXPORT ncclResult_t ncclMemAlloc(void **address, size_t size)
{
    return address ? device_malloc(address, size) : fail(ncclInvalidArgument, "ncclMemAlloc: the argument is NULL");
}

EXPORT ncclResult_t ncclMemFree(void *address)
{
    return device_free(address);
}

/* The registered address serves as the handle. */
static ncclResult_t register_memory(const struct comm *comm, void *address, void **handle)
{
    if (!is_comm(comm) || !address || !handle)
        return fail(ncclInvalidArgument, "registration needs a communicator, an address and a pointer for the handle");
    *handle = address;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommRegister(const struct comm *comm, void *address, size_t size, void **handle)
{
    (void)size;
    return register_memory(comm, address, handle);
}

EXPORT ncclResult_t ncclCommDeregister(const struct comm *comm, void *handle)
{
    return is_comm(comm) && handle ? ncclSuccess : fail(ncclInvalidArgument, "the handle is not registered");
}

EXPORT ncclResult_t ncclCommWindowRegister(struct comm *comm, void *address, size_t size, void **window, int flags)
{
    (void)size, (void)flags;
    return register_memory(comm, address, window);
}

EXPORT ncclResult_t ncclCommWindowDeregister(struct comm *comm, void *window)
{
    return is_comm(comm) && window ? ncclSuccess : fail(ncclInvalidArgument, "the handle is not registered");
}

EXPORT ncclResult_t ncclWinGetUserPtr(struct comm *comm, void *window, void **address)
{
    return register_memory(comm, window, address);
}

/* What needs access to the memory of another process is not simulated. */
static ncclResult_t not_simulated(const char *function)
{
    return note_group_error(fail(ncclInvalidUsage, "%s is not simulated: no process can reach another one's memory", function));
}

#define NOT_SIMULATED(NAME)                                                                                            \
    EXPORT ncclResult_t NAME(void)                                                                                     \
    {                                                                                                                  \
        return not_simulated(#NAME);                                                                                   \
    }

NOT_SIMULATED(ncclPutSignal)
NOT_SIMULATED(ncclSignal)
NOT_SIMULATED(ncclWaitSignal)
NOT_SIMULATED(ncclDevCommCreate)
NOT_SIMULATED(ncclDevCommDestroy)
NOT_SIMULATED(ncclGetLsaMultimemDevicePointer)
NOT_SIMULATED(ncclGetPeerDevicePointer)
