/* The CUDA runtime: capture of streams: which streams are in it, its end, what invalidates it, and which threads may not
 * make calls that are unsafe meanwhile (calls that ask unsafe_call).
 *
 * A capture appends the work of all its streams to one chain, in the order of the calls. CUDA would build a graph with
 * branches; the chain is one valid order of its nodes. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum capture_mode { GLOBAL, THREAD_LOCAL, RELAXED };
enum capture_status { NOT_CAPTURING, CAPTURING, INVALIDATED };

/* How much work of each stream of a capture something waits for, by the stream's index. It lives as long as the capture. */
struct captured_work {
    struct captured_work *next;
    size_t stream_count;
    size_t counts[];
};

struct capture {
    uint64_t id;
    enum capture_mode mode;
    pthread_t thread;
    enum capture_status status;
    struct graph *graph;
    bool is_graph_callers; /* cudaStreamBeginCaptureToGraph() passed it */
    struct node *last_node;
    struct stream *origin, *streams;
    size_t stream_count;
    struct captured_work *works; /* all of them, to free them */
    struct capture *next;
};

_Atomic int active_captures;

static struct capture *captures;
static uint64_t last_id;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int thread_mode = GLOBAL;

/* Whether the capture forbids unsafe calls in this thread. */
static bool forbids(const struct capture *capture)
{
    if (capture->mode == RELAXED)
        return false;
    return pthread_equal(capture->thread, pthread_self()) || (capture->mode == GLOBAL && thread_mode == GLOBAL);
}

cudaError_t forbid_if_capturing(void)
{
    cudaError_t error = SUCCESS;
    if (thread_mode == RELAXED)
        return SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture; capture = capture->next)
        if (forbids(capture)) {
            capture->status = INVALIDATED;
            error = ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    pthread_mutex_unlock(&lock);
    return error;
}

/* Returns NULL without memory. */
static struct captured_work *copy_work(struct capture *capture, const struct captured_work *work, size_t stream_count)
{
    struct captured_work *copy = calloc(1, sizeof *copy + stream_count * sizeof *copy->counts);
    if (!copy)
        return NULL;
    if (work)
        memcpy(copy->counts, work->counts, work->stream_count * sizeof *copy->counts);
    copy->stream_count = stream_count;
    copy->next = capture->works;
    capture->works = copy;
    return copy;
}

static void free_works(struct capture *capture)
{
    for (struct captured_work *work = capture->works, *next; work; work = next) {
        next = work->next;
        free(work);
    }
}

static bool add_stream(struct capture *capture, struct stream *stream)
{
    if (!(stream->known = copy_work(capture, NULL, capture->stream_count + 1)))
        return false;
    stream->captured_index = capture->stream_count++;
    stream->next = capture->streams;
    capture->streams = stream;
    stream->capture = capture;
    return true;
}

static struct capture *find_capture(uint64_t id)
{
    struct capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

static cudaError_t add_capture(struct stream *stream, struct graph *graph, int mode)
{
    struct capture *capture = calloc(1, sizeof *capture);
    if (!capture || !add_stream(capture, stream) || !(capture->graph = graph ? graph : graph_new())) {
        stream->capture = NULL;
        if (capture)
            free_works(capture);
        free(capture);
        return ERROR_OUT_OF_MEMORY;
    }
    capture->is_graph_callers = graph != NULL;
    capture->id = ++last_id;
    capture->mode = (enum capture_mode)mode;
    capture->thread = pthread_self();
    capture->status = CAPTURING;
    capture->origin = stream;
    capture->next = captures;
    captures = capture;
    active_captures++;
    accelerator_simulation_needs_checks++;
    return SUCCESS;
}

static cudaError_t begin_capture(void *handle, const struct sim_device *device, struct graph *graph, int mode)
{
    struct stream *stream = find_stream(handle, device);
    RETURN_UNLESS(stream, ERROR_INVALID_HANDLE);
    RETURN_UNLESS(mode >= GLOBAL && mode <= RELAXED, ERROR_INVALID_VALUE);
    if ((uintptr_t)handle <= 2)
        return ERROR_STREAM_CAPTURE_UNSUPPORTED; /* CUDA cannot capture the default stream */
    pthread_mutex_lock(&lock);
    cudaError_t error = stream->capture ? ERROR_ILLEGAL_STATE : add_capture(stream, graph, mode);
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT cudaError_t cudaStreamBeginCapture(void *handle, int mode)
{
    ENTER_CONTEXT(device);
    return finish(begin_capture(handle, device, NULL, mode));
}

EXPORT cudaError_t cudaStreamBeginCaptureToGraph(void *handle, struct graph *graph, struct node *const *dependencies,
                                                 const void *edges, size_t count, int mode)
{
    ENTER_CONTEXT(device);
    (void)dependencies, (void)edges, (void)count;
    return finish(graph ? begin_capture(handle, device, graph, mode) : ERROR_INVALID_VALUE);
}

static cudaError_t check_end(const struct capture *capture, const struct stream *stream)
{
    RETURN_UNLESS(capture, ERROR_ILLEGAL_STATE);
    RETURN_UNLESS(capture->origin == stream, ERROR_STREAM_CAPTURE_UNMATCHED);
    if (capture->mode != RELAXED && !pthread_equal(capture->thread, pthread_self()))
        return ERROR_STREAM_CAPTURE_WRONG_THREAD;
    return SUCCESS;
}

static bool knows_all_work_of(const struct captured_work *known, const struct stream *stream)
{
    const size_t index = stream->captured_index;
    return (index < known->stream_count ? known->counts[index] : 0) == stream->known->counts[index];
}

/* Sets `graph` to NULL if the capture is invalid. The caller releases the unused graph, if there is one, without the lock: that
 * calls functions of the program, and takes other locks. */
static cudaError_t remove_capture(struct capture *capture, struct graph **graph, struct graph **unused)
{
    cudaError_t error = capture->status == INVALIDATED ? ERROR_STREAM_CAPTURE_INVALIDATED : SUCCESS;
    for (struct stream *stream = capture->streams, *next; stream; stream = next) {
        next = stream->next;
        if (error == SUCCESS && !knows_all_work_of(capture->origin->known, stream))
            error = ERROR_STREAM_CAPTURE_UNJOINED;
        stream->next = NULL;
        stream->capture = NULL;
    }
    struct capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    active_captures--;
    accelerator_simulation_needs_checks--;

    *unused = error != SUCCESS && !capture->is_graph_callers ? capture->graph : NULL;
    *graph = error == SUCCESS ? capture->graph : NULL;
    free_works(capture);
    free(capture);
    return error;
}

EXPORT cudaError_t cudaStreamEndCapture(void *handle, struct graph **graph)
{
    ENTER_CONTEXT(device);
    struct stream *stream = find_stream(handle, device);
    RETURN_UNLESS(stream && graph, fail(stream ? ERROR_INVALID_VALUE : ERROR_INVALID_HANDLE));
    *graph = NULL;
    struct graph *unused = NULL;
    pthread_mutex_lock(&lock);
    cudaError_t error = check_end(stream->capture, stream);
    if (error == SUCCESS)
        error = remove_capture(stream->capture, graph, &unused);
    pthread_mutex_unlock(&lock);
    if (unused)
        graph_release(unused);
    return finish(error);
}

void **captured_race_world(struct stream *stream)
{
    pthread_mutex_lock(&lock);
    void **world = stream->capture ? &stream->capture->graph->race_world : NULL;
    pthread_mutex_unlock(&lock);
    return world;
}

bool capture_work(struct stream *stream, const struct work *work, cudaError_t *error)
{
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    *error = SUCCESS;
    if (capture && capture->status == INVALIDATED)
        *error = ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (capture && !graph_append(capture->graph, work))
        *error = ERROR_OUT_OF_MEMORY;
    else if (capture)
        stream->known->counts[stream->captured_index]++;
    pthread_mutex_unlock(&lock);
    return capture != NULL;
}

bool capture_event(struct stream *stream, struct event *event, cudaError_t *error)
{
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    *error = capture && capture->status == INVALIDATED ? ERROR_STREAM_CAPTURE_INVALIDATED : SUCCESS;
    if (capture && *error == SUCCESS) {
        event->capture_id = capture->id;
        event->known = copy_work(capture, stream->known, stream->known->stream_count);
        *error = event->known ? SUCCESS : ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    if (capture && *error == SUCCESS)
        IF_RACES(race_hooks->at_record(&stream->races, &event->races));
    return capture != NULL;
}

/* Records that `stream` waits for the work before the event. */
static cudaError_t join(struct capture *capture, struct stream *stream, const struct captured_work *work)
{
    if (!work)
        return ERROR_OUT_OF_MEMORY; /* already when the event was recorded */
    if (work->stream_count > stream->known->stream_count) {
        struct captured_work *longer = copy_work(capture, stream->known, work->stream_count);
        RETURN_UNLESS(longer, ERROR_OUT_OF_MEMORY);
        stream->known = longer;
    }
    for (size_t i = 0; i < work->stream_count; i++)
        if (stream->known->counts[i] < work->counts[i])
            stream->known->counts[i] = work->counts[i];
    return SUCCESS;
}

static cudaError_t wait_in_capture(struct stream *stream, struct event *event, uint64_t capture_id)
{
    struct capture *capture = stream->capture, *source = find_capture(capture_id);
    if (!source && capture_id != 0)
        return ERROR_CAPTURED_EVENT; /* the event's capture has ended */
    RETURN_UNLESS(!capture || capture->status != INVALIDATED, ERROR_STREAM_CAPTURE_INVALIDATED);
    if (!source) {
        if (*event->time == 0)
            return SUCCESS; /* never recorded: nothing to wait for */
        capture->status = INVALIDATED;
        return ERROR_STREAM_CAPTURE_ISOLATION;
    }
    bool is_default = is_default_stream(stream);
    if (!capture && (is_default || source->status == INVALIDATED))
        return is_default ? ERROR_STREAM_CAPTURE_IMPLICIT : ERROR_STREAM_CAPTURE_INVALIDATED;
    RETURN_UNLESS(capture || add_stream(source, stream), ERROR_OUT_OF_MEMORY);
    if (capture && capture != source) {
        capture->status = source->status = INVALIDATED;
        return ERROR_STREAM_CAPTURE_MERGE;
    }
    return join(source, stream, event->known);
}

bool capture_wait(struct stream *stream, struct event *event, cudaError_t *error)
{
    pthread_mutex_lock(&lock);
    const uint64_t capture_id = event->capture_id; /* read once: another thread may record the event */
    const bool is_captured = stream->capture || capture_id != 0;
    *error = is_captured ? wait_in_capture(stream, event, capture_id) : SUCCESS;
    pthread_mutex_unlock(&lock);
    if (is_captured && *error == SUCCESS)
        IF_RACES(race_hooks->at_wait(&stream->races, &event->races));
    return is_captured;
}

cudaError_t refuse_captured_event(const struct event *event)
{
    if (__builtin_expect(event->capture_id == 0, 1))
        return SUCCESS;
    pthread_mutex_lock(&lock);
    struct capture *capture = find_capture(event->capture_id);
    if (capture)
        capture->status = INVALIDATED;
    pthread_mutex_unlock(&lock);
    return ERROR_CAPTURED_EVENT;
}

cudaError_t refuse_captured_stream(struct stream *stream)
{
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    if (capture)
        capture->status = INVALIDATED;
    pthread_mutex_unlock(&lock);
    return capture ? ERROR_STREAM_CAPTURE_UNSUPPORTED : SUCCESS;
}

static cudaError_t read_capture(void *handle, const struct sim_device *device, int *status, unsigned long long *id,
                                struct graph **graph, struct node *const **dependencies, size_t *count)
{
    struct stream *stream = find_stream(handle, device);
    if (!stream || !status)
        return stream ? ERROR_INVALID_VALUE : ERROR_INVALID_HANDLE;
    *status = NOT_CAPTURING;
    if (!stream->capture)
        return SUCCESS;

    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    if (capture) {
        capture->last_node = graph_last_node(capture->graph);
        *status = (int)capture->status;
        if (id)
            *id = capture->id;
        if (graph)
            *graph = capture->graph;
        if (dependencies)
            *dependencies = &capture->last_node;
        if (count)
            *count = capture->last_node != NULL;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT cudaError_t cudaStreamIsCapturing(void *handle, int *status)
{
    ENTER_CONTEXT(device);
    return finish(read_capture(handle, device, status, NULL, NULL, NULL, NULL));
}

#if CUDART == 12
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(void *handle, int *status, unsigned long long *id, struct graph **graph,
                                               struct node *const **dependencies, size_t *count)
{
    ENTER_CONTEXT(device);
    return finish(read_capture(handle, device, status, id, graph, dependencies, count));
}
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *id, struct graph **graph,
                                            struct node *const **dependencies, const void **edges, size_t *count)
{
    ENTER_CONTEXT(device);
    if (edges)
        *edges = NULL;
    return finish(read_capture(handle, device, status, id, graph, dependencies, count));
}
#endif

/* In a chain, each node depends on the previous one only, so there is nothing to update. */
#if CUDART == 12
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(void *handle, struct node **nodes, size_t count, unsigned flags)
#else
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(void *handle, struct node **nodes, const void *edges,
                                                       size_t count, unsigned flags)
#endif
{
    ENTER_CONTEXT(device);
    (void)nodes, (void)count, (void)flags;
#if CUDART != 12
    (void)edges;
#endif
    struct stream *stream = find_stream(handle, device);
    return finish(!stream ? ERROR_INVALID_HANDLE : stream->capture ? SUCCESS : ERROR_ILLEGAL_STATE);
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(mode && *mode >= GLOBAL && *mode <= RELAXED);
    int previous = thread_mode;
    thread_mode = *mode;
    *mode = previous;
    return SUCCESS;
}
