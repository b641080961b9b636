/* Internal declarations of libcudart.so.12 and .13. */
#ifndef ACCELERATOR_SIM_RUNTIME_H
#define ACCELERATOR_SIM_RUNTIME_H

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "common/clock.h"
#include "common/errors.h"
#include "common/memory_file.h"
#include "interface/cuda_errors.h"
#include "interface/driver_table.h"
#include "interface/pending.h"
#include "interface/race_hooks.h"

#ifndef CUDART
#error "CUDART is the major version of the runtime to build: 12 or 13"
#endif

#define EXPORT __attribute__((visibility("default")))

typedef int cudaError_t;

/* from_races.c. Each hook costs one branch while races are not to be found. */
extern const struct race_hooks *race_hooks; /* or NULL */

#define IF_RACES(call) \
    do { \
        if (__builtin_expect(race_hooks != NULL, 0)) \
            call; \
    } while (0)

/* find_driver.c */
extern const struct sim_driver *driver; /* NULL before load_driver() */
cudaError_t load_driver(void);

/* flags.c */
extern _Atomic(_Atomic int *) accelerator_simulation_fault_flag; /* points to the machine's once the runtime is initialized */
extern _Atomic int accelerator_simulation_needs_checks;

/* errors.c */
cudaError_t fail(cudaError_t error);
cudaError_t finish_launch(cudaError_t error); /* like finish(), of a launch */
cudaError_t unread_launch_error(void); /* of the thread, or SUCCESS */

/* Returns its argument, and makes an error the thread's last error. Entry points return the result of this function. */
static inline cudaError_t finish(cudaError_t error)
{
    return __builtin_expect(error == SUCCESS, 1) ? SUCCESS : fail(error);
}

/* initialization.c */
extern const struct sim_runtime *runtime_table; /* what the driver calls; set when the library is loaded */
extern _Atomic bool is_ready_and_plain; /* the runtime is initialized, and no errors are injected */
extern _Thread_local int thread_device; /* the device that the thread has chosen */

cudaError_t enter_slowly(const char *function);
int visible_device_count(void);

/* current.c */
cudaError_t make_context(struct sim_device **device);
int chosen_device(void);
cudaError_t reset_context(int ordinal);

/* Every entry point first calls enter() or enter_context(), and returns their error if there is one. enter_context()
 * creates a context if the thread has none, and sets `device` to the context's device unless `device` is NULL. */
static inline cudaError_t enter(const char *function)
{
    return __builtin_expect(is_ready_and_plain, 1) ? SUCCESS : finish(enter_slowly(function));
}

static inline bool has_faults(void)
{
    _Atomic int *are_used = atomic_load_explicit(&accelerator_simulation_fault_flag, memory_order_relaxed);
    return __builtin_expect(atomic_load_explicit(are_used, memory_order_relaxed) != 0, 0);
}

/* The error of this process on the device, if a fault, a failed assertion or a failed kernel has broken its context. */
static inline cudaError_t unless_broken(int ordinal)
{
    return has_faults() ? driver->faults_error(driver->devices[ordinal].gpu) : SUCCESS;
}

static inline cudaError_t enter_context(const char *function, struct sim_device **device)
{
    RETURN_IF_ERROR(enter(function));
    struct sim_device *current = driver->current();
    if (__builtin_expect(!current, 0))
        RETURN_IF_ERROR(finish(make_context(&current)));
    RETURN_IF_ERROR(finish(unless_broken(current->ordinal)));
    if (device)
        *device = current;
    return SUCCESS;
}

/* What copies, waits and queries return that have succeeded: the error of a refused launch that the program has not read, or
 * that of the broken context. */
static inline cudaError_t unless_failed(int device)
{
    return __builtin_expect(*driver->pending_refusal != 0, 0) ? ERROR_NOT_SUPPORTED : unless_broken(device);
}

/* First line of an entry point: declares the device that enter_context() sets. */
#define ENTER_CONTEXT(device) \
    struct sim_device *device; \
    RETURN_IF_ERROR(enter_context(__func__, &device))

/* The same for the stream that enter_stream() finds. */
#define ENTER_STREAM(stream, handle) \
    struct stream *stream; \
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream))

/* Ends an entry point if an argument is not valid. */
#define REQUIRE(is_valid) RETURN_UNLESS(is_valid, fail(ERROR_INVALID_VALUE))

/* streams.c. The CPU does the work in the call that submits it. A stream records only the time at which a GPU would
 * finish. NCCL's work is the exception (pending.h). */
struct capture;
struct captured_work;

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
    pthread_mutex_t running;     /* held while a kernel runs that is not torch's own: threads may share the stream */
    struct race_stream races;
};

struct stream *find_stream(void *handle, const struct sim_device *device);
/* Enters a call like enter_context(), and finds the stream or returns an error. */
cudaError_t enter_stream(const char *function, void *handle, struct stream **stream);
struct stream *new_stream(int device, int priority, bool is_blocking);
void free_stream(struct stream *stream);
bool is_default_stream(const struct stream *stream);
void delay_stream(struct stream *stream, int64_t until);

/* events.c */
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
    _Atomic uint64_t refusal; /* that was pending when it was recorded, or 0 */
    struct race_event races;
};

enum { BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 }; /* flags */

struct event *find_event(void *handle);
struct event *new_event(int device, unsigned flags);
void free_event(struct event *event);

/* event_sharing.c */
void leave_sharing(struct event *event);

/* One piece of work. It is done at once, or added to a graph and done at each launch of the graph. */
struct work {
    const struct work_type *type;
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
        struct copy copy;
        struct {
            int value;
            struct copy rows; /* without a source */
        } fill;
        struct {
            void (*function)(void *argument);
            void *argument;
        } host;
        struct {
            bool (*compute)(uint64_t id);
            uint64_t id;
        } computation;
        struct ptx_launch *launch;
        struct event *event;
    };
};

static inline void copy_rows(const struct copy *copy)
{
    char *target = copy->target;
    const char *source = copy->source;
    for (size_t row = 0; row < copy->height; row++) {
        memmove(target, source, copy->width);
        target += copy->target_pitch;
        source += copy->source_pitch;
    }
}

/* What a kind of work does. Each is defined beside the calls that submit it. */
struct work_type {
    const char *node; /* the kind of a graph's node */
    cudaError_t (*run)(struct stream *stream, const struct work *work);
    /* Called before run() while unfinished work is pending, or NULL: work that only submits other work does not wait. */
    cudaError_t (*prepare)(struct stream *stream, const struct work *work);
    bool (*keep)(struct work *work); /* lets a graph's copy of the work own what it points to, or NULL; false without memory */
    void (*release)(const struct work *work); /* called when a graph with the work is destroyed, or NULL */
};

/* pending.c */
extern _Atomic int waiting_count; /* number of streams, events and other holders of a non-empty struct pending */

/* These seven are in the table that pending.h declares. */
uint64_t pending_submit(struct pending_queue *queue, int device, void *const *handles, size_t count, struct pending *before,
                        int64_t *not_before);
enum pending_status pending_wait(struct pending *pending, int milliseconds);
void pending_interrupt(void);
void pending_clear(struct pending *pending);
void pending_complete(struct pending_queue *queue, uint64_t sequence);
void pending_release(struct pending_queue *queue);
void pending_fail(struct pending_queue *queue);

cudaError_t wait_for_pending(struct pending *pending, int ordinal); /* of the device; a fault of it ends the wait */
cudaError_t wait_for_pending_on_device(int ordinal);
cudaError_t wait_for_pending_on_stream(void *handle);
void drop_pending(struct pending *pending);
cudaError_t record_pending(struct stream *stream, const struct work *work);
cudaError_t add_pending_of_event(struct stream *stream, const struct work *work);
cudaError_t wait_for_earlier_work(struct stream *stream, const struct work *work);
cudaError_t copy_later(struct stream *stream, const struct copy *copy); /* when the work before it has ended */

/* Sets the stream whose host function the thread runs, and returns the one before. */
struct stream *set_launching_stream(struct stream *stream);

/* graphs.c. A graph is a chain of nodes. */
struct node {
    struct graph *graph;
    struct node *previous;
    struct work work;
};

struct user_object {
    int references;
    void *argument;
    void (*destroy)(void *argument);
};

/* An instance shares its graph and uses the nodes that existed when it was made. */
struct graph {
    int references;
    struct node **nodes;
    size_t node_count, node_capacity;
    struct user_object **objects; /* one entry for each reference */
    size_t object_count, object_capacity;
    void *race_world; /* of race detection, or NULL */
};

struct graph *graph_new(void);
bool graph_append(struct graph *graph, const struct work *work);
struct node *graph_last_node(struct graph *graph); /* NULL if the graph is empty */
size_t graph_retain(struct graph *graph); /* returns the number of nodes */
void graph_release(struct graph *graph);
bool graph_add_object(struct graph *graph, struct user_object *object, unsigned count, bool is_moved);
void release_object(struct user_object *object, int count);

/* capture.c */
cudaError_t forbid_if_capturing(void);
/* Return false if the stream does not capture any more, or nothing captured the event: another thread has just ended the capture,
 * or recorded the event. */
bool capture_work(struct stream *stream, const struct work *work, cudaError_t *error);
bool capture_event(struct stream *stream, struct event *event, cudaError_t *error);
bool capture_wait(struct stream *stream, struct event *event, cudaError_t *error);
/* The host cannot query or wait for captured work. If the event or stream is captured, these functions invalidate the
 * capture and return an error. */
cudaError_t refuse_captured_event(const struct event *event);
cudaError_t refuse_captured_stream(struct stream *stream);
void **captured_race_world(struct stream *stream); /* of the graph that the stream captures, or NULL */

extern _Atomic int active_captures;

/* CUDA forbids potentially unsafe calls during a capture. Their entry points call this function after enter(). */
static inline cudaError_t unsafe_call(void)
{
    return __builtin_expect(active_captures == 0, 1) ? SUCCESS : finish(forbid_if_capturing());
}

/* fault_waits.c. Sleeps until work of a device ends, or returns the error of a fault that ends the wait. */
cudaError_t sleep_on_device(int64_t time, int ordinal);
/* When work ends: its time, or when the hang was over that the time stands for; INT64_MAX while that lasts. */
int64_t end_of(int64_t time);
bool has_come(int64_t time); /* of a stream or an event */
void end_hang(_Atomic int64_t *time); /* puts the end of a hang that is over in the place of the time that stands for it */
void end_hang_of_stream(struct stream *stream);

/* work.c */
cudaError_t submit(struct stream *stream, const struct work *work);
cudaError_t wait_for_stream(struct stream *stream);
cudaError_t wait_for_device(const struct sim_device *device);

/* host_functions.c. A function that only submits work to the stream starts before pending work ends. */
cudaError_t submit_host_function(struct stream *stream, void (*function)(void *argument), void *argument, bool submits_work);

/* ops.c. Counts an op or a kernel for the faults, and returns their error or delays the stream. */
cudaError_t fail_or_delay(struct stream *stream);

/* barrier.c, nan.c, spin.c: the kernels that run */
extern const struct work_type barrier_kernel, nan_check, spin_kernel;

const struct float_type *nan_check_type(const char *kernel); /* the type that a kernel checks, or NULL for others */
bool is_barrier_kernel(const char *name);
bool is_spin_kernel(const char *name);

/* registration.c. A kernel of torch that simulated GPUs do themselves: it spins, waits, or checks for NaN. */
struct torch_kernel {
    const void *function;
    const struct work_type *type;
    const struct float_type *checked; /* of a check for NaN */
};

bool computes(void); /* whether simulated GPUs compute */
const struct torch_kernel *find_torch_kernel(const void *function); /* NULL for a kernel that does not run */
/* Returns a kernel's name, or NULL if it is unknown, and whether this function was called for the kernel before. */
const char *name_to_report(const void *function, bool *is_reported);

/* refusal.c. Without a reason, the kernel is one of those that are never simulated. */
cudaError_t refuse_kernel(const void *function, const char *reason);
cudaError_t report_refusal(const char *mangled, const char *reason, bool is_reported);
const char *refusal_of_launch(bool has_clusters); /* why no such launch runs, or NULL */
char *demangle(const char *name); /* NULL for a name that is not mangled */

/* device.c */
cudaError_t check_device(int ordinal);
bool has_peer_access(int device, int peer);
void reset_peer_access(int ordinal);

/* cudaPitchedPtr, with the width and the height in elements that it was made for, and cudaExtent */
struct pitched_pointer {
    void *address;
    size_t pitch, width, height;
};

struct extent {
    size_t width, height, depth;
};

/* unsupported.c */
cudaError_t refuse_arrays(const char *function); /* of textures and surfaces, which are not simulated */

/* memory.c */
int is_device_memory(const void *address);
void note_free(const void *address); /* tells race detection */

/* modules.c: what the driver does with modules and their functions, for the table */
cudaError_t load_module(const void *data, size_t limit, char *log, size_t log_size, void **module);
bool is_module(void *handle);
bool is_function(void *handle);
cudaError_t unload_module(void *module);
cudaError_t find_function(void *module, const char *name, void **function);
cudaError_t find_global(void *module, const char *name, void **address, size_t *size);
cudaError_t launch_function(void *function, const struct sim_launch *launch, void *stream, void **parameters,
                            const struct sim_parameter_buffer *buffer);
cudaError_t function_attribute(void *function, int attribute, int *value);
cudaError_t set_function_attribute(void *function, int attribute, int value);
cudaError_t function_occupancy(void *function, int threads, size_t dynamic_shared, int *blocks);

/* default_pool.c */
cudaError_t pool_free(const struct sim_memory *memory);
void reset_pool(int ordinal); /* whose memory is freed */

#endif
