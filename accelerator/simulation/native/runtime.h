/* What the files of libcudart.so.12 and .13 share. */
#ifndef ACCELERATOR_SIM_RUNTIME_H
#define ACCELERATOR_SIM_RUNTIME_H

#include <stdbool.h>

#include "driver_errors.h"
#include "driver_table.h"
#include "errors.h"
#include "pending.h"

#ifndef CUDART
#error "CUDART is the major version of the runtime to build: 12 or 13"
#endif

#define EXPORT __attribute__((visibility("default")))

typedef int cudaError_t;

/* runtime.c */
extern const struct sim_driver *driver;
extern _Atomic bool is_ready_and_plain; /* initialized, without injected errors */

cudaError_t enter_slowly(const char *function);
cudaError_t fail(cudaError_t error);
cudaError_t make_context(struct sim_device **device);
int chosen_device(void);
int visible_device_count(void);
cudaError_t check_device(int ordinal);

/* Returns its argument; an error becomes the thread's last error. Entry points return through it. */
static inline cudaError_t finish(cudaError_t error)
{
    return __builtin_expect(error == SUCCESS, 1) ? SUCCESS : fail(error);
}

/* Every entry point calls one of these first. They return the error that ends the call, which is then also the thread's
 * last error. The second also makes sure that the thread has a context, and fills in its device unless `device` is NULL. */
static inline cudaError_t enter(const char *function)
{
    return __builtin_expect(is_ready_and_plain, 1) ? SUCCESS : finish(enter_slowly(function));
}

static inline cudaError_t enter_context(const char *function, struct sim_device **device)
{
    RETURN_IF_ERROR(enter(function));
    struct sim_device *current = driver->current();
    if (__builtin_expect(!current, 0))
        RETURN_IF_ERROR(finish(make_context(&current)));
    if (device)
        *device = current;
    return SUCCESS;
}

/* runtime_stream.c. Work is done at the call; a stream records only the time at which its work would end. */
struct capture;

struct stream {
    uint32_t magic;
    int device;
    int priority;
    _Atomic int64_t idle_at; /* nanoseconds of CLOCK_MONOTONIC; 0 before any work took time */
    struct pending pending;
    _Atomic(struct capture *) capture;
    struct stream *next;     /* of the streams in the same capture, or of the free ones */
    unsigned captured_count; /* pieces of work captured so far */
    bool is_unjoined;        /* the capture's origin does not wait for all of them yet */
};

enum work_type { WORK_KERNEL, WORK_COPY, WORK_FILL, WORK_HOST, WORK_RECORD, WORK_WAIT, WORK_COMPUTATION };

/* One piece of work, done now or recorded in a graph and done at each launch. */
struct work {
    enum work_type type;
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
cudaError_t wait_for_pending_on_stream(void *handle);
void drop_pending(struct pending *pending);
cudaError_t prepare_work(struct stream *stream, const struct work *work); /* before it is done; needed if anything waits */
void call_host_function(struct stream *stream, const struct work *work);

/* runtime_event.c */
struct event {
    uint32_t magic;
    int device;
    unsigned flags;
    _Atomic int64_t own_time, *time; /* when it is reached, 0 if never recorded; shared memory once exported */
    int file;                        /* the shared memory, or -1 */
    struct pending pending;
    _Atomic uint64_t capture_id;     /* the capture in which it was last recorded, or 0 */
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
/* For queries and waits of the host, which invalidate the capture of the event or stream. */
cudaError_t refuse_captured_event(const struct event *event);
cudaError_t refuse_captured_stream(struct stream *stream);

extern _Atomic int active_captures;

/* For calls that CUDA forbids during a capture. */
static inline cudaError_t unsafe_call(void)
{
    return __builtin_expect(active_captures == 0, 1) ? SUCCESS : finish(forbid_if_capturing());
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

/* runtime_stream.c. The table for the driver. */
const struct sim_runtime *accelerator_sim_runtime(void);

/* runtime_pool.c */
cudaError_t pool_free(const struct sim_memory *memory);

#endif
