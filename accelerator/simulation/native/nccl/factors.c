/* NCCL: factors of reductions (reduce.c multiplies by them). */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

#include "common/fork.h"

/* Protects the factors of all communicators. */
RENEWED_LOCK(lock)

ncclResult_t use_factor(struct operation *operation)
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

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(int *reduction, void *scalar, int type, int residence, struct comm *comm)
{
    enum { IN_DEVICE, IMMEDIATE };
    ncclResult_t result = check_usable(comm);
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
