/* How the CUDA runtime and race detection meet. They are in one library and do not include each other.
 *
 * If races are to be found or copies are to be late, race detection sets hooks when the library is loaded, and gets the
 * functions of the runtime that it needs. */
#ifndef ACCELERATOR_SIM_RACE_HOOKS_H
#define ACCELERATOR_SIM_RACE_HOOKS_H

#include <stdbool.h>
#include <stddef.h>

#include "interface/driver_table.h"
#include "interface/race_accesses.h"

/* What race detection knows of a stream. The runtime sets the first three members when it makes the stream. */
struct race_stream {
    int device;
    bool is_default, is_blocking; /* the default stream and the blocking streams wait for each other */
    int index;                    /* of its clock, plus one; 0 until it is used */
    unsigned queries;             /* since its last work */
};

/* What race detection knows of an event. All zeros: it was never recorded. */
struct race_event {
    struct clock *clock; /* of the stream when it was recorded, or NULL */
    unsigned queries;    /* since it was recorded */
    bool is_waited_for;  /* by a stream, since it was recorded */
};

/* A copy of rows. */
struct copy {
    char *target;
    const char *source;
    size_t target_pitch, source_pitch, width, height;
};

/* X(result, name, parameters). `world` is what race detection keeps about the work of a captured graph, or NULL. */
#define RACE_HOOKS(X) \
    X(void, at_record, (struct race_stream *stream, struct race_event *event)) \
    X(void, at_wait, (struct race_stream *stream, struct race_event *event)) \
    X(void, at_event_end, (struct race_event *event)) \
    /* Whether a query must answer that the event or the stream is not ready. */ \
    X(bool, delays_event, (struct race_event *event, const void *caller)) \
    X(bool, delays_stream, (struct race_stream *stream, const void *caller)) \
    /* The host has waited. */ \
    X(void, at_event_wait, (struct race_event *event)) \
    X(void, at_stream_wait, (struct race_stream *stream)) \
    X(void, at_device_wait, (int device)) \
    X(void, at_allocation, (const void *address, int device)) \
    X(void, at_free, (const void *address, size_t size)) \
    X(void, at_copy, (struct race_stream *stream, const struct copy *copy, bool is_synchronous)) \
    X(void, after_copy, (struct race_stream *stream, const struct copy *copy, bool is_synchronous)) \
    /* A kernel from PTX, or a host function of the program, runs in between. It may use pinned memory. */ \
    X(void, before_use, (void)) \
    X(void, after_use, (void)) \
    X(void, at_fill, (struct race_stream *stream, const struct copy *filled)) /* without a source */ \
    X(void, at_collective, (void *handle, int device, const char *name, const void *source, size_t source_size, \
      const void *target, size_t target_size)) \
    /* A kernel of another library has run, and has accessed this. The name lives as long as the process. */ \
    X(void, at_kernel, (struct race_stream *stream, const char *name, struct race_access *accesses, size_t count)) \
    X(void, at_launch, (struct race_stream *stream, void *world)) \
    X(void, at_graph_end, (void *world))
#define RACE_HOOK(result, name, parameters) result(*name) parameters;

struct race_hooks {
    RACE_HOOKS(RACE_HOOK)
    const struct race_functions *functions; /* for the engine; NULL unless races are to be reported */
};

struct race_runtime {
    struct race_stream *(*find_stream)(void *handle, int device); /* NULL if there is none */
    void **(*captured_world)(struct race_stream *stream);         /* of the graph that a stream captures, or NULL */
    bool (*is_capturing)(void);                                   /* whether any stream captures */
    int (*find_memory)(const void *address, struct sim_memory *memory);
};

/* The runtime defines it. */
const struct race_runtime *use_race_hooks(const struct race_hooks *hooks);

#endif
