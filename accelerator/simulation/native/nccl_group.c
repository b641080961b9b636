/* NCCL: groups, and the way of the work to the streams. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>

struct group {
    int depth;
    ncclResult_t error; /* of the first call that failed */
    struct batch batch;
    struct joining **joinings;
    size_t joining_count, joining_capacity;
};

static _Thread_local struct group group;

/* ---- Running, or capturing. ---- */

static void replay(void *argument)
{
    struct batch *batch = argument;
    ncclResult_t result = run_batch(batch);
    if (result == ncclSuccess)
        return;
    /* There is nobody to return it to. */
    for (size_t i = 0; i < batch->count; i++)
        if (is_comm(batch->operations[i].comm))
            batch->operations[i].comm->asynchronous_error = (int)result;
    fail(result, "in the launch of a graph: %s", ncclGetLastError(NULL));
    fprintf(stderr, "NCCL (simulated): %s\n", ncclGetLastError(NULL));
}

static void release(void *argument)
{
    struct batch *batch = argument;
    free(batch->operations);
    free(batch);
}

static ncclResult_t capture(const struct batch *batch, void *stream, const struct capture_info *info)
{
    struct batch *copy = calloc(1, sizeof *copy);
    if (copy)
        copy->operations = malloc(batch->count * sizeof *copy->operations);
    if (!copy || !copy->operations) {
        free(copy);
        return fail(ncclSystemError, "out of memory");
    }
    for (copy->count = 0; copy->count < batch->count; copy->count++)
        copy->operations[copy->count] = batch->operations[copy->count];
    return capture_call(stream, info, replay, release, copy);
}

/* What was submitted to the streams before is done, so the batch runs now; in a graph, at each of its launches. */
static ncclResult_t launch(struct batch *batch)
{
    struct capture_info first = {0}, info;
    for (size_t i = 0; i < batch->count; i++) {
        if (i > 0 && batch->operations[i].stream == batch->operations[i - 1].stream)
            continue;
        ncclResult_t result = get_capture_info(batch->operations[i].stream, &info);
        if (result != ncclSuccess)
            return result;
        if (i == 0)
            first = info;
        if (info.id != first.id)
            return fail(ncclInvalidUsage, "the streams of a group must all belong to one capture, or none to any");
    }
    return first.id != 0 ? capture(batch, batch->operations[0].stream, &first) : run_batch(batch);
}

/* ---- Groups. ---- */

static ncclResult_t record_error(ncclResult_t error)
{
    if (group.depth > 0 && group.error == ncclSuccess)
        group.error = error;
    return error;
}

static bool grow(void **array, size_t count, size_t *capacity, size_t size)
{
    if (count < *capacity)
        return true;
    size_t wanted = *capacity ? 2 * *capacity : 16;
    void *grown = realloc(*array, wanted * size);
    if (!grown)
        return false;
    *array = grown;
    *capacity = wanted;
    return true;
}

ncclResult_t submit(const struct operation *operation)
{
    struct operation alone = *operation;
    struct batch *batch = &group.batch;
    if (group.depth == 0)
        return launch(&(struct batch){&alone, 1, 1});
    if (!grow((void **)&batch->operations, batch->count, &batch->capacity, sizeof *batch->operations))
        return record_error(fail(ncclSystemError, "out of memory"));
    batch->operations[batch->count++] = alone;
    return ncclSuccess;
}

ncclResult_t submit_joining(struct joining *joining)
{
    if (group.depth == 0) {
        ncclResult_t result = join_all(&joining, 1);
        free(joining);
        return result;
    }
    if (!grow((void **)&group.joinings, group.joining_count, &group.joining_capacity, sizeof(struct joining *))) {
        free(joining);
        return record_error(fail(ncclSystemError, "out of memory"));
    }
    group.joinings[group.joining_count++] = joining;
    return ncclSuccess;
}

void group_start(void)
{
    group.depth++;
}

ncclResult_t note_group_error(ncclResult_t error)
{
    return record_error(error);
}

ncclResult_t group_end(bool is_to_run)
{
    if (group.depth == 0)
        return fail(ncclInvalidUsage, "there is no group to end");
    if (--group.depth > 0)
        return ncclSuccess;
    /* Taken out of the thread's group first: what runs may start groups itself. */
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
