/* Internal declarations of libcudart.so.12 and .13. */
#ifndef ACCELERATOR_SIM_RUNTIME_H
#define ACCELERATOR_SIM_RUNTIME_H

#include <stdbool.h>

#include "driver_errors.h"
#include "driver_table.h"
#include "errors.h"
#include "memory_file.h"
#include "pending.h"

#ifndef CUDART
#error "CUDART is the major version of the runtime to build: 12 or 13"
#endif

#define EXPORT __attribute__((visibility("default")))

typedef int cudaError_t;

/* runtime.c */
extern const struct sim_driver *driver;
extern _Atomic bool is_ready_and_plain; /* the runtime is initialized, and no errors are injected */

cudaError_t enter_slowly(const char *function);
cudaError_t fail(cudaError_t error);
cudaError_t make_context(struct sim_device **device);
int chosen_device(void);
int visible_device_count(void);
cudaError_t check_device(int ordinal);

/* Returns its argument, and makes an error the thread's last error. Entry points return the result of this function. */
static inline cudaError_t finish(cudaError_t error)
{
    return __builtin_expect(error == SUCCESS, 1) ? SUCCESS : fail(error);
}

/* Every entry point first calls enter() or enter_context(), and returns their error if there is one. enter_context()
 * creates a context if the thread has none, and sets `device` to the context's device unless `device` is NULL. */
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

/* runtime_stream.c. The CPU does the work in the call that submits it. A stream records only the time at which a GPU
 * would finish. NCCL's work is the exception (pending.h). */
struct capture;

struct stream {
    uint32_t magic;
    int device;
    int priority;
    _Atomic int64_t idle_at; /* CLOCK_MONOTONIC in nanoseconds; 0 if no work has taken time */
    struct pending pending;
    _Atomic(struct capture *) capture;
    struct stream *next;         /* in the list of the capture's streams, or of free streams */
    size_t captured_index;       /* among the capture's streams */
    struct captured_work *known; /* which captured work it does or waits for */
    bool is_default, is_blocking; /* the default stream and the blocking streams wait for each other */
    int race_index;               /* of its clock, plus one; 0 until it is used with race detection */
    unsigned race_queries;        /* since its last work */
};

enum work_type {
    WORK_KERNEL,
    WORK_NAN_CHECK,
    WORK_BARRIER,
    WORK_COPY,
    WORK_FILL,
    WORK_HOST,
    WORK_RECORD,
    WORK_WAIT,
    WORK_COMPUTATION,
    WORK_TYPE_COUNT,
};

/* One piece of work. It is done at once, or added to a graph and done at each launch of the graph. */
struct work {
    enum work_type type;
    union {
        struct {
            int64_t duration;
        } kernel;
        struct {
            const struct float_type *type;
            const char *data;
            size_t count;
        } nan_check;
        struct {
            _Atomic int32_t *value;
            uint64_t timeout_ms;
        } barrier;
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
            bool submits_work; /* only submits work to the stream, so it starts before pending work ends */
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
extern _Atomic int waiting_count; /* number of streams, events and other holders of a non-empty struct pending */
extern _Atomic int accelerator_simulation_attention;

cudaError_t wait_for_pending(struct pending *pending);
cudaError_t wait_for_pending_on_device(int ordinal);
cudaError_t wait_for_pending_on_stream(void *handle);
void drop_pending(struct pending *pending);
cudaError_t prepare_work(struct stream *stream, const struct work *work); /* before run(), if waiting_count > 0 */
void call_host_function(struct stream *stream, const struct work *work);

/* Submits the next piece of a queue's work to one stream; see `submit` of struct sim_pending. */
uint64_t submit_to_stream(struct pending_queue *queue, struct stream *stream, struct pending *before, int64_t *not_before);
const struct sim_pending *accelerator_simulation_pending(void);

/* runtime_barrier.c */
cudaError_t start_barrier(struct stream *stream, _Atomic int32_t *value, uint64_t timeout_ms);

/* runtime_event.c */
struct event {
    uint32_t magic;
    int device;
    unsigned flags;
    /* When the event is reached, 0 if never recorded. `time` points to own_time; after an export, to shared memory. */
    _Atomic int64_t own_time, *time;
    struct memory_file file; /* the shared memory of an exported event */
    uint64_t id;             /* what the file contains while the event exists */
    struct pending pending;
    _Atomic uint64_t capture_id; /* of the capture in which the event was last recorded, or 0 */
    struct captured_work *known; /* of the stream, when the event was recorded; it lives as long as the capture */
    struct event *next;          /* in the list of free events */
    struct clock *race_clock; /* of the stream when it was recorded, or NULL */
    unsigned race_queries;    /* since it was recorded */
    bool is_waited_for;       /* by a stream, since it was recorded; set with race detection only */
};

struct event *find_event(void *handle);

/* runtime_capture.c */
cudaError_t forbid_if_capturing(void);
cudaError_t capture_work(struct stream *stream, const struct work *work);
cudaError_t capture_event(struct stream *stream, struct event *event);
cudaError_t capture_wait(struct stream *stream, struct event *event);
/* The host cannot query or wait for captured work. If the event or stream is captured, these functions invalidate the
 * capture and return an error. */
cudaError_t refuse_captured_event(const struct event *event);
cudaError_t refuse_captured_stream(struct stream *stream);

extern _Atomic int active_captures;

/* CUDA forbids potentially unsafe calls during a capture. Their entry points call this function after enter(). */
static inline cudaError_t unsafe_call(void)
{
    return __builtin_expect(active_captures == 0, 1) ? SUCCESS : finish(forbid_if_capturing());
}

/* runtime_graph.c */
struct node {
    struct graph *graph;
    struct node *previous; /* a graph is a chain of nodes */
    struct work work;
};

struct graph *graph_new(void);
bool graph_append(struct graph *graph, const struct work *work);
struct node *graph_last_node(struct graph *graph); /* NULL if the graph is empty */
void graph_release(struct graph *graph);

/* runtime_nan.c */
const struct float_type *nan_check_type(const char *kernel); /* the type that a kernel checks, or NULL for others */
cudaError_t check_for_nan(const struct float_type *type, const char *data, size_t count);

/* runtime_kernel.c */
void computation_released(uint64_t id);
void reset_kernel_lock(void);

/* runtime_symbol.c */
void reset_symbol_lock(void);

/* runtime_stream.c. The table of functions that the driver calls. */
const struct sim_runtime *accelerator_sim_runtime(void);

/* race.c: race detection and late copies. Each call costs one branch while they are off. */
extern bool races_on;
struct world;

void race_at_record(struct stream *stream, struct event *event);
void race_at_wait(struct stream *stream, struct event *event);
void race_at_event_end(struct event *event);
bool race_delays_event(struct event *event, const void *caller); /* whether a query must answer that the event is not reached */
bool race_delays_stream(struct stream *stream, const void *caller);
void race_at_event_wait(struct event *event);  /* the host has waited */
void race_at_stream_wait(struct stream *stream);
void race_at_device_wait(int device);
void race_at_free(const void *address, size_t size);
void race_at_copy(struct stream *stream, const struct work *work, bool is_synchronous);
void race_after_copy(struct stream *stream, const struct work *work, bool is_synchronous);
void race_at_fill(struct stream *stream, const void *target, size_t size);
void race_at_collective(void *handle, int device, const char *name, const void *source, size_t source_size,
                        const void *target, size_t target_size);
void race_at_launch(struct stream *stream, struct graph *graph);
void race_at_graph_end(struct world *world);
struct world **graph_world(struct graph *graph);
struct world **capture_world(struct stream *stream); /* NULL if the stream does not capture */

#define IF_RACES(call) \
    do { \
        if (__builtin_expect(races_on, 0)) \
            call; \
    } while (0)

/* runtime_pool.c */
cudaError_t pool_free(const struct sim_memory *memory);

#endif
