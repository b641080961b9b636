/* Work that is submitted to streams and done later, by a thread of another library: NCCL's collectives.
 *
 * All other work is done when it is submitted. Each stream, event and device therefore records only which pieces of
 * unfinished work it waits for. The runtime exports the table below; a runtime of each major has its own. */
#ifndef ACCELERATOR_SIM_PENDING_H
#define ACCELERATOR_SIM_PENDING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_PENDING_SYMBOL "accelerator_simulation_pending"

/* Pieces of work that are done one after the other, in the order of their sequence numbers. Never freed. */
struct pending_queue {
    uint64_t submitted; /* the last sequence number */
    bool has_failed;    /* what is unfinished stays unfinished until the queue is released */
};

struct pending_item {
    struct pending_queue *queue;
    uint64_t sequence; /* this piece and all before it */
};

/* The items that a stream, an event, a device, a thread or a piece of work waits for. All zeros: none. */
struct pending {
    _Atomic int count; /* of the items; may be read without the lock */
    size_t capacity;
    struct pending_item *items;
    struct pending *next;        /* in the list of those that wait */
    _Atomic int64_t *reached_at; /* of an event: gets the time at which the last item is finished */
};

enum pending_status { PENDING_DONE, PENDING_WAITS, PENDING_FAILED };

enum device_hold { NOT_HELD, HELD, BROKEN }; /* whether faults hold the collectives of a device, or have broken its context */

struct sim_pending {
    /* Submits the next piece of work of a queue to streams of a device, or, if there are none, to the stream whose host
     * function the calling thread runs. `before` receives what the streams wait for so far, `not_before` the time at which
     * their other work ends. Returns the sequence number; 0 if a stream is invalid, a kernel was refused or memory is short. */
    uint64_t (*submit)(struct pending_queue *queue, int device, void *const *streams, size_t count, struct pending *before,
                       int64_t *not_before);
    /* Blocks until nothing is left, work has failed, somebody called `interrupt`, or the time is over. */
    enum pending_status (*wait)(struct pending *pending, int milliseconds);
    void (*interrupt)(void);
    void (*clear)(struct pending *pending);
    void (*complete)(struct pending_queue *queue, uint64_t sequence);
    void (*fail)(struct pending_queue *queue);
    /* Removes all items of the queue, whether the work was done or not. */
    void (*release)(struct pending_queue *queue);
    /* Tells race detection what an operation on a stream reads and writes; NULL if races are not to be found. */
    void (*note_accesses)(void *stream, int device, const char *name, const void *source, size_t source_size,
                          const void *target, size_t target_size);
    void (*at_collective)(int device); /* for the faults; a collective begins */
    enum device_hold (*hold)(int device);
    int64_t (*end_of)(int64_t time); /* of `not_before`, which may stand for a hang: INT64_MAX while it lasts */
    /* Adds a host function that submits work to the graph which a stream captures. */
    int (*capture)(void *stream, int device, void (*function)(void *argument), void *argument);
};

#endif
