/* The inside of libcudart.so.12 and .13: what their files share. */
#ifndef ACCELERATOR_SIM_RUNTIME_H
#define ACCELERATOR_SIM_RUNTIME_H

#include <stdbool.h>

#include "driver_errors.h"
#include "driver_table.h"
#include "pending.h"

#ifndef CUDART
#error "CUDART is the major version of the runtime to build: 12 or 13"
#endif

#define EXPORT __attribute__((visibility("default")))

typedef int cudaError_t;

/* runtime.c */
extern const struct sim_driver *driver;
extern _Atomic bool is_ready_and_plain; /* initialized, and no errors are to be injected */

cudaError_t enter_slowly(const char *function);
cudaError_t fail(cudaError_t error);
struct sim_device *make_context(void);
cudaError_t context_error(void); /* why make_context answered NULL */
int chosen_device(void);
int visible_device_count(void);

/* Every result of an entry point passes here: a failure becomes the thread's last error. */
static inline cudaError_t finish(cudaError_t error)
{
    return __builtin_expect(error == SUCCESS, 1) ? SUCCESS : fail(error);
}

#define RETURN_IF_ERROR(expression)                                                                                    \
    do {                                                                                                               \
        cudaError_t error_ = (expression);                                                                             \
        if (__builtin_expect(error_ != SUCCESS, 0))                                                                    \
            return fail(error_);                                                                                       \
    } while (0)

/* The first statement of an entry point. The second form also makes sure that the thread has a context, which is then
 * that of `device`. */
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (__builtin_expect(!is_ready_and_plain, 0))                                                                  \
            RETURN_IF_ERROR(enter_slowly(__func__));                                                                   \
    } while (0)

#define ENTER_CONTEXT(device)                                                                                          \
    __attribute__((unused)) struct sim_device *device = NULL;                                                          \
    do {                                                                                                               \
        ENTER();                                                                                                       \
        device = driver->current();                                                                                    \
        if (__builtin_expect(!device, 0) && !(device = make_context()))                                                \
            return fail(context_error());                                                                              \
    } while (0)

/* runtime_stream.c. A stream's work is done at the call; what remains of it is the time at which it would end. */
struct capture;

struct stream {
    uint32_t magic;
    int device;
    int priority;
    _Atomic int64_t idle_at; /* nanoseconds of CLOCK_MONOTONIC; 0 if nothing ever took time */
    struct pending pending;
    _Atomic(struct capture *) capture;
    struct stream *next;     /* of the streams in the same capture, or of the free ones */
    unsigned captured_count; /* pieces of work captured so far */
    bool is_unjoined;        /* some of them are not waited for, directly or not, by the capture's origin */
};

enum work_kind { WORK_KERNEL, WORK_COPY, WORK_FILL, WORK_HOST, WORK_RECORD, WORK_WAIT, WORK_COMPUTATION };

/* One piece of work, to be done now or to be recorded in a graph and done at its launches. */
struct work {
    enum work_kind kind;
    union {
        struct {
            int64_t duration;
        } kernel;
        struct {
            char *target;
            const char *source;
            size_t target_pitch, source_pitch, width, height;
        } copy;
        struct {
            char *target;
            int value;
            size_t size;
        } fill;
        struct {
            void (*function)(void *argument);
            void *argument;
            bool submits_work; /* to the stream, rather than doing it */
        } host;
        struct {
            bool (*compute)(uint64_t id);
            uint64_t id;
        } computation;
        struct event *event;
    };
};

int64_t now(void);
void sleep_until(int64_t time);
struct stream *find_stream(void *handle, const struct sim_device *device);
cudaError_t submit(struct stream *stream, const struct work *work);
cudaError_t run(struct stream *stream, const struct work *work);
cudaError_t wait_for_stream(struct stream *stream);
void delay_stream(struct stream *stream, int64_t until);

/* runtime_pending.c */
extern _Atomic int waiting_count; /* of streams, events and whatever else waits for unfinished work */
extern _Atomic int accelerator_simulation_attention;

cudaError_t wait_for_pending(struct pending *pending);
cudaError_t wait_for_pending_on_device(int ordinal);
void drop_pending(struct pending *pending);
cudaError_t prepare_work(struct stream *stream, const struct work *work); /* before it is done; needed if anything waits */
void call_host_function(struct stream *stream, const struct work *work);

/* runtime_event.c */
struct event {
    uint32_t magic;
    int device;
    unsigned flags;
    _Atomic int64_t own_time, *time; /* when it is reached, 0 if never recorded; in shared memory once exported */
    int file;                        /* ... which this file holds, or -1 */
    struct pending pending;
    uint64_t capture_id;             /* the capture in which it was last recorded, or 0 */
    struct stream *captured_on;
    unsigned captured_count; /* of that stream, at that time */
    struct event *next;      /* of the free events */
};

struct event *find_event(void *handle);

/* runtime_capture.c */
cudaError_t forbid_if_capturing(void);
cudaError_t capture_work(struct stream *stream, const struct work *work);
cudaError_t capture_event(struct stream *stream, struct event *event);
cudaError_t capture_wait(struct stream *stream, struct event *event);
/* For queries and waits of the host: they end the capture that the event or stream is part of. */
cudaError_t refuse_captured_event(const struct event *event);
cudaError_t refuse_captured_stream(struct stream *stream);

extern _Atomic int active_captures;

/* For calls that CUDA forbids while a capture is under way. */
static inline cudaError_t unsafe_call(void)
{
    return __builtin_expect(active_captures == 0, 1) ? SUCCESS : forbid_if_capturing();
}

/* runtime_graph.c */
struct node {
    struct graph *graph;
    struct node *previous; /* graphs are chains */
    struct work work;
};

struct graph *graph_new(void);
bool graph_append(struct graph *graph, const struct work *work);
struct node *graph_last_node(struct graph *graph); /* NULL while it is empty */
void graph_release(struct graph *graph);

/* runtime_kernel.c */
void computation_released(uint64_t id);

/* Entry points that the table for the driver mentions. */
cudaError_t cudaStreamIsCapturing(void *handle, int *status);
const struct sim_runtime *accelerator_sim_runtime(void);

/* runtime_pool.c */
cudaError_t pool_free(const struct sim_memory *memory);

#endif
