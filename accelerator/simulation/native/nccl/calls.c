/* NCCL: errors, collectives and messages, reductions with a factor, memory registration. */
#include "nccl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 23007, TEXT_SIZE = 512 };

EXPORT const char accelerator_simulation[] = "nccl";

static char last_error[TEXT_SIZE];
static ncclResult_t last_result;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects the text and all factors */

void reset_error_lock(void)
{
    pthread_mutex_init(&lock, NULL);
}

ncclResult_t fail(ncclResult_t result, const char *format, ...)
{
    char text[TEXT_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    memcpy(last_error, text, sizeof text);
    last_result = result;
    pthread_mutex_unlock(&lock);
    return result;
}

/* The text is not per thread: torch's watchdog reads errors of other threads. */
EXPORT const char *ncclGetLastError(const struct comm *comm)
{
    static _Thread_local char text[TEXT_SIZE];
    (void)comm;
    pthread_mutex_lock(&lock);
    memcpy(text, last_error, sizeof text);
    pthread_mutex_unlock(&lock);
    return text;
}

/* With the reason, because torch's process group of 2.15 shows only this text. */
EXPORT const char *ncclGetErrorString(ncclResult_t result)
{
    static _Thread_local char with_reason[TEXT_SIZE + 64];
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "system error", "internal error", "invalid argument", "invalid usage",
        "remote process ended or cannot be reached", "in progress", "timed out"};
    const char *text = (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
    pthread_mutex_lock(&lock);
    bool has_reason = result == last_result && *last_error;
    if (has_reason)
        snprintf(with_reason, sizeof with_reason, "%s: %s", text, last_error);
    pthread_mutex_unlock(&lock);
    return has_reason ? with_reason : text;
}

EXPORT ncclResult_t ncclGetVersion(int *version)
{
    if (!version)
        return fail(ncclInvalidArgument, "ncclGetVersion: the argument is NULL");
    *version = VERSION;
    return ncclSuccess;
}

/* ---- Communication. ---- */

static ncclResult_t check_usable_now(struct comm *comm)
{
    if (!is_comm(comm))
        return fail(ncclInvalidArgument, "the communicator is NULL, was destroyed or belongs to this process' parent");
    if (comm->is_finalized)
        return fail(ncclInvalidUsage, "the communicator was finalized");
    if (comm->is_suspended)
        return fail(ncclInvalidUsage, "the communicator is suspended");
    return ncclSuccess;
}

static ncclResult_t use_factor(struct operation *operation)
{
    struct comm *comm = operation->comm;
    int index = operation->reduction - FIRST_MULTIPLIED;
    ncclResult_t result = ncclSuccess;
    if (index < 0)
        return ncclSuccess;
    pthread_mutex_lock(&lock);
    if (index < comm->factor_count)
        operation->factor = comm->factors[index];
    pthread_mutex_unlock(&lock);
    if (!operation->factor.is_used)
        result = fail(ncclInvalidArgument, "there is no reduction %d", operation->reduction);
    else if (operation->factor.type != operation->type)
        result = fail(ncclInvalidArgument, "the reduction was made for type %d, not %d", (int)operation->factor.type,
                      (int)operation->type);
    return result;
}

static bool reads(const struct operation *operation)
{
    if (operation->code == RECEIVE)
        return false;
    return (operation->code != BROADCAST && operation->code != SCATTER) || operation->root == operation->comm->rank;
}

static bool writes(const struct operation *operation)
{
    if (operation->code == SEND)
        return false;
    return (operation->code != REDUCE && operation->code != GATHER) || operation->root == operation->comm->rank;
}

static ncclResult_t communicate(struct operation operation)
{
    ncclResult_t result = check_usable_now(operation.comm);
    if (result == ncclSuccess && (unsigned)operation.type >= TYPE_COUNT)
        result = fail(ncclInvalidArgument, "there is no type %d", (int)operation.type);
    if (result == ncclSuccess && (operation.root < 0 || operation.root >= operation.comm->ranks))
        result = fail(ncclInvalidArgument, "there is no rank %d among %d", operation.root, operation.comm->ranks);
    if (result == ncclSuccess && operation.reduction < 0)
        result = fail(ncclInvalidArgument, "there is no reduction %d", operation.reduction);
    if (result == ncclSuccess)
        result = use_factor(&operation);
    if (result == ncclSuccess && operation.count > SIZE_MAX / 8 / MAX_RANKS)
        result = fail(ncclInvalidArgument, "a count of %zu is too large", operation.count);
    if (result == ncclSuccess && operation.count > 0 &&
        ((reads(&operation) && !operation.source) || (writes(&operation) && !operation.target)))
        result = fail(ncclInvalidArgument, "a buffer is NULL");
    if (result == ncclSuccess && operation.count == 0)
        return ncclSuccess; /* NCCL does not wait for the other ranks either */
    if (result == ncclSuccess)
        result = submit(&operation);
    return note_group_error(result);
}

EXPORT ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, int type, int reduction, struct comm *comm,
                                  void *stream)
{
    return communicate((struct operation){.code = ALL_REDUCE, .comm = comm, .stream = stream, .source = source,
                                          .target = target, .count = count, .type = (enum data_type)type,
                                          .reduction = reduction});
}

EXPORT ncclResult_t ncclReduce(const void *source, void *target, size_t count, int type, int reduction, int root,
                               struct comm *comm, void *stream)
{
    return communicate((struct operation){.code = REDUCE, .comm = comm, .stream = stream, .source = source, .target = target,
                                          .count = count, .type = (enum data_type)type, .reduction = reduction, .root = root});
}

EXPORT ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count, int type, int reduction,
                                      struct comm *comm, void *stream)
{
    return communicate((struct operation){.code = REDUCE_SCATTER, .comm = comm, .stream = stream, .source = source,
                                          .target = target, .count = count, .type = (enum data_type)type,
                                          .reduction = reduction});
}

/* Calls without a reduction. */
static ncclResult_t move(enum operation_code code, const void *source, void *target, size_t count, int type, int root,
                         struct comm *comm, void *stream)
{
    return communicate((struct operation){.code = code, .comm = comm, .stream = stream, .source = source, .target = target,
                                          .count = count, .type = (enum data_type)type, .root = root});
}

EXPORT ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, int type, int root, struct comm *comm,
                                  void *stream)
{
    return move(BROADCAST, source, target, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclBcast(void *buffer, size_t count, int type, int root, struct comm *comm, void *stream)
{
    return move(BROADCAST, buffer, buffer, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclAllGather(const void *source, void *target, size_t count, int type, struct comm *comm, void *stream)
{
    return move(ALL_GATHER, source, target, count, type, 0, comm, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void *source, void *target, size_t count, int type, struct comm *comm, void *stream)
{
    return move(ALL_TO_ALL, source, target, count, type, 0, comm, stream);
}

EXPORT ncclResult_t ncclGather(const void *source, void *target, size_t count, int type, int root, struct comm *comm,
                               void *stream)
{
    return move(GATHER, source, target, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclScatter(const void *source, void *target, size_t count, int type, int root, struct comm *comm,
                                void *stream)
{
    return move(SCATTER, source, target, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclSend(const void *source, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return move(SEND, source, NULL, count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclRecv(void *target, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return move(RECEIVE, NULL, target, count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclGroupStart(void)
{
    group_start();
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void)
{
    return group_end(true);
}

EXPORT ncclResult_t ncclGroupSimulateEnd(void *info)
{
    struct {
        size_t size;
        unsigned magic, version;
        float time;
    } *estimate = info;
    if (estimate)
        estimate->time = 0;
    return group_end(false);
}

/* ---- Reductions with a factor. ---- */

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(int *reduction, void *scalar, int type, int residence, struct comm *comm)
{
    enum { IN_DEVICE, IMMEDIATE };
    ncclResult_t result = check_usable_now(comm);
    if (result != ncclSuccess)
        return result;
    if (!reduction || !scalar || (unsigned)type >= TYPE_COUNT || residence < IN_DEVICE || residence > IMMEDIATE)
        return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: a pointer is NULL, or type %d or residence %d is unknown",
                    type, residence);
    struct factor factor = {.is_used = true, .type = (enum data_type)type};
    if (residence == IMMEDIATE)
        memcpy(factor.value, scalar, type_size(factor.type));
    else
        factor.address = scalar;
    pthread_mutex_lock(&lock);
    int index = 0;
    while (index < comm->factor_count && comm->factors[index].is_used)
        index++;
    struct factor *factors = comm->factors;
    if (index == comm->factor_count) {
        factors = realloc(comm->factors, (size_t)(index + 1) * sizeof *factors);
        if (factors) {
            comm->factors = factors;
            comm->factor_count++;
        }
    }
    if (factors) {
        factors[index] = factor;
        *reduction = FIRST_MULTIPLIED + index;
    }
    pthread_mutex_unlock(&lock);
    return factors ? ncclSuccess : fail(ncclSystemError, "out of memory");
}

EXPORT ncclResult_t ncclRedOpDestroy(int reduction, struct comm *comm)
{
    ncclResult_t result = ncclInvalidArgument;
    if (!is_comm(comm))
        return fail(result, "the communicator is NULL or was destroyed");
    int index = reduction - FIRST_MULTIPLIED;
    pthread_mutex_lock(&lock);
    if (index >= 0 && index < comm->factor_count && comm->factors[index].is_used) {
        comm->factors[index].is_used = false;
        result = ncclSuccess;
    }
    pthread_mutex_unlock(&lock);
    return result == ncclSuccess ? result : fail(result, "there is no reduction %d to destroy", reduction);
}

/* ---- Memory. All of it is host memory, so registration does nothing. ---- */

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

/* ---- Not simulated: a process cannot access another one's memory. ---- */

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
