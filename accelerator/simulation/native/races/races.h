/* Race detection finds accesses to the same memory that nothing orders: what its files share, and how they work together.
 *
 * Each stream has a vector clock (clocks.c). Work on a stream advances it, and events, waits and synchronization join
 * clocks. Each access is recorded with the time of its stream, by address (accesses.c). A new access races with an older
 * one to the same bytes (layout.c), one of them a write, whose time its own clock does not cover. guards.c finds accesses
 * of the host to pinned memory, places.c the lines of the program, and report.c words and stores what was found.
 *
 * One lock, race_lock, guards all of it. No function takes Python's GIL while it holds that lock. */
#ifndef ACCELERATOR_SIM_RACE_H
#define ACCELERATOR_SIM_RACE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/arrays.h"
#include "interface/race_accesses.h"
#include "interface/race_hooks.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- state.c ---- */

extern pthread_mutex_t race_lock; /* says so if the thread holds it: the handler of faults may run meanwhile */
extern bool races_are_reported, races_are_raised; /* if not reported, only late copies need the clocks */
extern const struct race_runtime *race_runtime; /* the functions of the runtime */

extern const struct race_storages *race_storages; /* of the engine, or NULL: then no access has an owner */

/* ---- layout.c ---- */

struct race_range {
    uintptr_t start, end;
};

struct race_range layout_range(const struct race_layout *layout);
bool layout_is_dense(const struct race_layout *layout);
size_t layout_bytes(const struct race_layout *layout);
bool layouts_are_equal(const struct race_layout *first, const struct race_layout *second);
/* The number of bytes that both have; exact unless one of them has very many pieces. */
size_t layout_overlap(const struct race_layout *first, const struct race_layout *second);
struct race_layout layout_of_bytes(const void *address, size_t size);

/* ---- clocks.c ---- */

struct clock {
    uint32_t *times; /* by stream */
    size_t length, capacity;
    uint64_t version; /* changes with the times */
};

void clock_join(struct clock *clock, const struct clock *other);
void clock_set(struct clock *clock, const struct clock *other);
uint32_t clock_advance(struct clock *clock, size_t stream);
bool clock_covers(const struct clock *clock, size_t stream, uint32_t time);
void clock_clear(struct clock *clock);

struct known_stream {
    int device, number; /* the number of the stream on its device, 0 for the default stream */
    bool is_blocking;   /* the default stream waits for it, and it for the default stream */
};

/* The clocks of streams, and what was accessed: one for the work that streams do, and one for each capture. */
struct world {
    struct clock *clocks; /* by stream */
    size_t clock_count, clock_capacity;
    uint64_t *joined; /* by stream: the version of the host's clock that it has joined */
    size_t joined_capacity;
    struct sorted segments; /* by their start */
    struct access **list;   /* of a capture: all accesses, in order */
    size_t count, list_capacity;
};

extern struct world present;     /* what streams do */
extern struct clock host_clock;  /* what the host has waited for */
extern struct clock reuse_clock; /* what an allocator, or NCCL's watchdog, has seen end: it orders the reuse of memory alone */

struct clock *clock_of(struct world *world, struct race_stream *stream, size_t *index);
/* A new piece of work of a stream: advances its clock, which it returns. */
struct clock *begin_work(struct world *world, struct race_stream *stream, size_t *index);
const struct known_stream *stream_at(size_t index);
void join_device(struct clock *clock, int device);

/* ---- accesses.c ---- */

/* The storage that holds accessed memory. Accesses share it. */
struct owner {
    int references;
    void *storage;  /* a weak reference */
    uintptr_t data; /* when it was accessed */
};

struct access {
    int references;
    int stream; /* its index; ON_HOST for the host */
    uint32_t time;
    int flags;
    const char *dtype; /* or NULL */
    int place, launch; /* where the program caused it, and where it launched the graph, or 0 */
    const char *name;
    struct race_layout layout;
    struct owner *owner; /* or NULL */
    bool is_freed;       /* the memory was freed since */
    const struct access *compared; /* with which it was compared last */
};

enum { ON_HOST = -1 };

void record_access(struct world *world, struct access *access, const struct clock *clock);
void list_access(struct world *world, struct access *access);
struct access *new_access(const struct race_access *given, size_t stream, uint32_t time, const char *name, int place);
void release_access(struct access *access);
void mark_freed(uintptr_t start, uintptr_t end);
void forget_accesses(uintptr_t start, uintptr_t end);
void replay_accesses(struct world *captured, struct race_stream *stream, int place);
void world_free(struct world *world);

/* ---- guards.c ---- */

extern bool copies_are_late;
extern _Thread_local bool is_in_copy; /* the thread performs a copy of a stream, which may touch guarded memory */

void prepare_guard(struct access *copy); /* close_guards() guards the copy's pinned memory; takes over the reference */
void open_guards(const void *address, size_t size);
void close_guards(void);
void lend_guards(void); /* opens all until take_guards_back(); late copies have landed meanwhile */
void take_guards_back(void);
void release_guards(void); /* those of copies for which the host has waited */
void forget_guards(uintptr_t start, uintptr_t end);
void open_guards_in_child(void);

/* ---- waits.c ---- */

void join_host(const struct clock *clock);  /* the host has waited */
void join_reuse(const struct clock *clock); /* torch has seen that work has ended */

/* ---- places.c ---- */

/* The line of the program that the calling thread is at, as a number; 0 if it is unknown. */
int place_of_thread(void);
bool is_thread_of_python(void);
const char *place_text(int place);
int race_place(const char *text);
int race_set_place(int place);
int race_code_owner(const char *path, const char *function); /* RACE_OF_... */

/* ---- report.c ---- */

void report_race(const struct access *first, const struct access *second, size_t bytes, bool is_reuse);
int accelerator_simulation_race_take(char *target, size_t size);
void report_host_race(const struct access *copy, uintptr_t address, bool is_write, int place);

/* ---- recording.c ---- */

struct race_op {
    struct race_access *accesses;
    size_t count;
    const char *name;
};

extern _Thread_local struct race_op race_op;

struct world *world_of(struct race_stream *stream);
struct race_access describe(const void *address, size_t size, int flags);
void record(struct world *world, const struct race_access *given, size_t index, const struct clock *clock, const char *name,
            int place);
bool is_on_host(const void *address, bool *is_known);

/* ---- ops.c ---- */

extern const struct race_functions race_functions;

/* ---- order.c, queries.c, copies.c: the hooks ---- */

#define DECLARE_HOOK(result, name, parameters) result race_##name parameters;
RACE_HOOKS(DECLARE_HOOK)
#undef DECLARE_HOOK

void forget_allocation(uintptr_t address);
int stream_of_memory(uintptr_t address); /* the index of the stream that torch's allocator gives the memory; -1 if unknown */

#endif
