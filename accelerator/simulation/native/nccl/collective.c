/* NCCL: collectives: whether the ranks call the same one, and how data moves between their slots, step by step.
 *
 * A collective proceeds in steps, each as large as half a slot: every rank writes its part into its own slot and, once all
 * ranks have arrived, reads what it needs from the others' slots. One barrier per step is enough, because slots and
 * announcements have two halves: when a rank writes step k, all ranks have arrived at step k - 1, so step k - 2 is over. */
#include "nccl.h"

#include <stdio.h>
#include <string.h>

static char *slot(const struct comm *comm, int rank)
{
    const struct shared_state *shared = comm->shared;
    return (char *)shared + shared->slots + (size_t)rank * shared->slot_size + (comm->steps % 2) * (shared->slot_size / 2);
}

/* Whether each rank writes a separate piece for each other rank. */
static bool has_pieces(const struct operation *operation)
{
    return operation_kinds[operation->code].source & PIECES;
}

static size_t elements_per_step(const struct operation *operation)
{
    const struct comm *comm = operation->comm;
    size_t pieces = has_pieces(operation) ? (size_t)comm->ranks : 1;
    size_t most = comm->shared->slot_size / 2 / pieces / type_size(operation->type), left = operation->count - operation->done;
    return left < most || operation->is_without_data ? left : most;
}

static struct announcement announce(const struct operation *operation)
{
    int reduction = operation->reduction < FIRST_MULTIPLIED ? operation->reduction : FIRST_MULTIPLIED;
    return (struct announcement){operation->count, (int)operation->code, (int)operation->type, reduction, operation->root};
}

static void write_slot(const struct operation *operation, size_t elements)
{
    const struct comm *comm = operation->comm;
    if (operation->is_without_data || !has_source(operation))
        return;
    size_t size = type_size(operation->type);
    char *target = slot(comm, comm->rank);
    const char *source = operation->source + operation->done * size;
    const struct factor *factor = &operation->factor;
    for (int i = 0; i < (has_pieces(operation) ? comm->ranks : 1); i++) {
        if (factor->is_used)
            multiply(target, source, elements, operation->type, factor->address ? factor->address : factor->value);
        else
            memcpy(target, source, elements * size);
        target += elements * size;
        source += operation->count * size;
    }
}

static void read_slots(const struct operation *operation, size_t elements)
{
    const struct comm *comm = operation->comm;
    if (operation->is_without_data || !has_target(operation))
        return;
    size_t size = type_size(operation->type);
    size_t piece = has_pieces(operation) ? (size_t)comm->rank * elements * size : 0;
    char *target = operation->target + operation->done * size, *sources[MAX_RANKS];
    for (int rank = 0; rank < comm->ranks; rank++)
        sources[rank] = slot(comm, rank) + piece;
    switch (operation->code) {
    case ALL_REDUCE:
    case REDUCE:
    case REDUCE_SCATTER:
        reduce(target, sources, comm->ranks, elements, operation->type, operation->reduction);
        break;
    case BROADCAST:
    case SCATTER:
        memcpy(target, sources[operation->root], elements * size);
        break;
    default:
        for (int rank = 0; rank < comm->ranks; rank++)
            memcpy(target + (size_t)rank * operation->count * size, sources[rank], elements * size);
    }
}

/* Writes a call as "ncclAllReduce of 2 int32, sum" or "ncclBroadcast of 3 float32 from rank 0". */
static void call_text(char *text, size_t size, const struct announcement *call)
{
    static const char *const reductions[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
    const bool is_known = call->code >= 0 && call->code < COLLECTIVE_COUNT && call->type >= 0 && call->type < TYPE_COUNT;
    if (!is_known) {
        snprintf(text, size, "an unknown call");
        return;
    }
    const struct operation_kind *kind = &operation_kinds[call->code];
    const bool reduces = call->code == ALL_REDUCE || call->code == REDUCE || call->code == REDUCE_SCATTER;
    const bool has_root = (kind->source | kind->target) & OF_ROOT;
    int length = snprintf(text, size, "%s of %llu %s", kind->call, (unsigned long long)call->count, type_name(call->type));
    if (reduces && call->reduction >= 0 && call->reduction <= FIRST_MULTIPLIED)
        length += snprintf(text + length, size - (size_t)length, ", %s", reductions[call->reduction]);
    if (has_root)
        snprintf(text + length, size - (size_t)length, ", root %d", call->root);
}

static ncclResult_t compare_announcements(const struct operation *operation)
{
    const struct comm *comm = operation->comm;
    const struct announcement mine = announce(operation);
    for (int rank = 0; rank < comm->ranks; rank++) {
        const struct announcement *other = &comm->shared->members[rank].announced[comm->steps % 2];
        if (memcmp(other, &mine, sizeof mine) == 0)
            continue;
        char calls[2][100];
        call_text(calls[0], sizeof calls[0], &mine);
        call_text(calls[1], sizeof calls[1], other);
        return fail(ncclInvalidUsage, "the ranks do not make the same call: rank %d calls %s; rank %d calls %s", comm->rank,
                    calls[0], rank, calls[1]);
    }
    return ncclSuccess;
}

ncclResult_t advance_collective(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct member *member = &comm->shared->members[comm->rank];
    size_t elements = elements_per_step(operation);
    if (!operation->is_posted) {
        member->announced[comm->steps % 2] = announce(operation);
        write_slot(operation, elements);
        arrive(comm, &comm->shared->steps, &member->steps);
        operation->is_posted = *has_progressed = true;
    }
    if (!have_all_arrived(comm, &comm->shared->steps, comm->steps))
        return ncclSuccess;
    ncclResult_t result = operation->has_started ? ncclSuccess : compare_announcements(operation);
    if (result != ncclSuccess)
        return result;
    read_slots(operation, elements);
    comm->steps++;
    operation->is_posted = false;
    operation->has_started = *has_progressed = true;
    operation->done += elements;
    *is_done = operation->done == operation->count;
    return ncclSuccess;
}
