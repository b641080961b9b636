/* NCCL: submission of calls: groups end here, and captures get their nodes.
 *
 * Each thread collects the calls of its open group. The end of the outermost group submits them to the workers of their
 * communicators, or adds them to the graph that their streams capture. A call outside a group is submitted at once. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/arrays.h"

/* ---- Submission: at once, or at each launch of a captured graph. ---- */

struct captured_job {
    size_t count;
    struct operation operations[];
};

static void replay(void *argument)
{
    const struct captured_job *captured = argument;
    ncclResult_t result = submit_operations(captured->operations, captured->count, true);
    if (result == ncclSuccess)
        return;
    /* A graph's host function returns nothing, so stderr reports the error too. */
    fail(result, "in the launch of a graph: %s", ncclGetLastError(NULL));
    fprintf(stderr, "NCCL (simulated): %s\n", ncclGetLastError(NULL));
}

static ncclResult_t capture(const struct operation *operations, size_t count, const struct capture_info *info)
{
    struct captured_job *captured = malloc(sizeof *captured + count * sizeof *operations);
    if (!captured)
        return fail(ncclSystemError, "out of memory");
    captured->count = count;
    memcpy(captured->operations, operations, count * sizeof *operations);
    return capture_call(operations->stream, operations->comm->device, info, replay, free, captured);
}

/* Keeps the order within each communicator, because ranks match their operations by it. Returns the number moved. */
static size_t move_first_comm_to_front(struct operation *operations, size_t count)
{
    size_t moved = 0;
    for (size_t i = 0; i < count; i++) {
        if (operations[i].comm != operations[0].comm)
            continue;
        struct operation operation = operations[i];
        memmove(operations + moved + 1, operations + moved, (i - moved) * sizeof *operations);
        operations[moved++] = operation;
    }
    return moved;
}

static void note_accesses(const struct operation *operations, size_t count)
{
    if (!is_comm(operations->comm) || !pending_runtime()->note_accesses)
        return;
    for (size_t i = 0; i < count; i++) {
        const struct operation *each = &operations[i];
        pending_runtime()->note_accesses(each->stream, each->comm->device, operation_kinds[each->code].call, each->source,
                                         source_size(each), each->target, target_size(each));
    }
}

static ncclResult_t launch(struct batch *batch)
{
    struct capture_info first = {0}, info;
    for (size_t i = 0; i < batch->count; i++) {
        if (i > 0 && batch->operations[i].stream == batch->operations[i - 1].stream)
            continue;
        RETURN_IF_ERROR(get_capture_info(batch->operations[i].stream, &info));
        if (i == 0)
            first = info;
        if (info.id != first.id)
            return fail(ncclInvalidUsage, "the streams of a group belong to different captures, or only some capture; "
                                          "capture all of them in one graph, or none");
    }
    for (size_t start = 0, count; start < batch->count; start += count) {
        struct operation *operations = batch->operations + start;
        count = move_first_comm_to_front(operations, batch->count - start);
        note_accesses(operations, count);
        RETURN_IF_ERROR(first.id != 0 ? capture(operations, count, &first) : submit_operations(operations, count, false));
    }
    return ncclSuccess;
}

/* ---- Groups. ---- */

ncclResult_t submit(const struct operation *operation)
{
    struct operation single = *operation;
    struct batch *batch = &group.batch;
    if (group.depth == 0)
        return launch(&(struct batch){&single, 1, 1});
    if (!array_reserve((void **)&batch->operations, &batch->capacity, batch->count + 1, sizeof *batch->operations))
        return note_group_error(fail(ncclSystemError, "out of memory"));
    batch->operations[batch->count++] = single;
    return ncclSuccess;
}

ncclResult_t submit_joining(struct joining *joining)
{
    if (is_alone())
        return join_alone(joining);
    if (group.depth == 0) {
        ncclResult_t result = join_all(&joining, 1);
        free(joining);
        return result;
    }
    if (!array_reserve((void **)&group.joinings, &group.joining_capacity, group.joining_count + 1, sizeof(struct joining *))) {
        free(joining);
        return note_group_error(fail(ncclSystemError, "out of memory"));
    }
    group.joinings[group.joining_count++] = joining;
    return ncclSuccess;
}

ncclResult_t group_end(bool is_to_run)
{
    if (group.depth == 0)
        return fail(ncclInvalidUsage, "ncclGroupEnd was called without ncclGroupStart");
    if (--group.depth > 0)
        return ncclSuccess;
    /* The thread's group is reset before the launch, because the launch may start a group itself. */
    struct group ended = group;
    group = (struct group){0};
    ncclResult_t result = ended.error;
    if (result == ncclSuccess && is_to_run && ended.batch.count > 0)
        result = launch(&ended.batch);
    if (ended.joining_count > 0) {
        if (result == ncclSuccess && is_to_run)
            result = join_all(ended.joinings, ended.joining_count);
        else
            for (size_t i = 0; i < ended.joining_count; i++)
                abandon_joining(ended.joinings[i]);
    }
    for (size_t i = 0; i < ended.joining_count; i++)
        free(ended.joinings[i]);
    free(ended.joinings);
    free(ended.batch.operations);
    return result;
}
