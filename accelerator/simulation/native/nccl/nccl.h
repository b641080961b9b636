/* Internal declarations of libnccl.so.2.
 *
 * Simulated device memory is host memory. The ranks of a communicator copy through one file of shared memory. A thread per
 * communicator does the work, so that calls return at once; until it is done, the streams are pending (pending.h). */
#ifndef ACCELERATOR_SIM_NCCL_H
#define ACCELERATOR_SIM_NCCL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/clock.h"
#include "common/errors.h"
#include "interface/pending.h"
#include "interface/settings.h"

#define EXPORT __attribute__((visibility("default")))

/* The values of results, types and reductions are NCCL's. */
typedef enum {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress,
    ncclTimeout,
} ncclResult_t;

/* X(type, the name of its functions in reduce.c, size) */
#define DATA_TYPES(X)                                                                                                  \
    X(INT8, int8, 1)                                                                                                   \
    X(UINT8, uint8, 1)                                                                                                 \
    X(INT32, int32, 4)                                                                                                 \
    X(UINT32, uint32, 4)                                                                                               \
    X(INT64, int64, 8)                                                                                                 \
    X(UINT64, uint64, 8)                                                                                               \
    X(FLOAT16, float16, 2)                                                                                             \
    X(FLOAT32, float32, 4)                                                                                             \
    X(FLOAT64, float64, 8)                                                                                             \
    X(BFLOAT16, bfloat16, 2)                                                                                           \
    X(FLOAT8_E4M3, e4m3, 1)                                                                                            \
    X(FLOAT8_E5M2, e5m2, 1)

#define DATA_TYPE(type, name, size) type,
enum data_type { DATA_TYPES(DATA_TYPE) TYPE_COUNT };
#undef DATA_TYPE

enum reduction {
    SUM,
    PROD,
    MAX,
    MIN,
    AVG,
    FIRST_MULTIPLIED, /* from here on: sums of values that were multiplied before, each with its own factor */
};

enum { ID_SIZE = 16, UUID_SIZE = 16, UUID_TEXT_SIZE = 41, MAX_RANKS = SIM_MAX_RANKS, CACHE_LINE = 64 };

/* Which GPU of which machine a rank uses. Compared as bytes. */
struct gpu_identity {
    uint64_t state_device, state_inode; /* the file of the machine's state; 0: there is none */
    unsigned char uuid[UUID_SIZE];
    uint64_t is_instance; /* it is a MIG instance */
};

typedef struct {
    char internal[128];
} ncclUniqueId;

/* What a unique id contains. */
struct id_content {
    unsigned char name[ID_SIZE]; /* random */
    int pid;                     /* of the creator; 0: unknown, because the ranks computed the id */
    uint64_t start_time, pid_namespace; /* tell the creator from other processes with the same pid */
};

/* The first members of the caller's structure, in every version of NCCL. */
typedef struct {
    size_t size;
    unsigned magic, version;
} ncclConfig_t;

/* ---- Shared memory. ---- */

enum member_state { MEMBER_ABSENT, MEMBER_PRESENT, MEMBER_LEFT, MEMBER_ABORTED, MEMBER_REVOKED };

/* A rank's arguments of a collective, which must be equal on all ranks. */
struct announcement {
    uint64_t count;
    int code, type, reduction, root;
};

/* The ranks of a parent exchange these to make a new communicator. */
struct exchange_record {
    int color, key;
    bool has_id;
    ncclUniqueId id;
};

/* One rank. Arrays of two are indexed by the step modulo 2, because no rank can be two steps ahead of another. */
struct member {
    _Alignas(CACHE_LINE) _Atomic int state;
    _Atomic uint32_t wakeups;      /* a futex; changes when the rank may be able to go on */
    _Atomic uint32_t sleepers; /* threads that sleep on the futex */
    _Atomic uint64_t steps, exchanges;
    struct gpu_identity gpu;
    struct announcement announced[2];
    struct exchange_record exchange[2];
};

/* A ring of bytes from one rank to another: each message after a word with its size. */
struct mailbox {
    _Alignas(CACHE_LINE) _Atomic uint64_t written, read;
    _Alignas(CACHE_LINE) char data[];
};

/* Layout of the file: this, a mailbox for every pair of ranks, a slot for every rank. */
struct shared_state {
    uint64_t magic;
    int ranks;
    size_t size, mailboxes, mailbox_size, slots, slot_size; /* offsets in the file, and sizes */
    _Atomic int attached;
    _Atomic uint64_t failure;           /* 0, or the reason that ended the communicator for all ranks */
    _Atomic uint64_t steps, exchanges; /* of all ranks together */
    struct member members[];
};

/* ---- One process. ---- */

/* A file that this process has opened. Ranks of one communicator that are threads of this process share it. */
struct attachment {
    struct attachment *next;
    char name[2 * ID_SIZE + 1];
    char *path; /* NULL once the file is unlinked */
    int file;
    int references;
    _Atomic bool is_here[MAX_RANKS]; /* the rank belongs to this process */
    struct shared_state *shared;
};

/* What a rank passes to a call or gets from it: one piece of `count` elements, or one for each rank. */
enum { NOTHING = 0, PIECE = 1, PIECES = 2, OF_ROOT = 4 /* other ranks pass or get nothing */ };

/* X(code, NCCL's name, the source, the target). Collectives come before messages. */
#define OPERATIONS(X)                                                                                                  \
    X(ALL_REDUCE, AllReduce, PIECE, PIECE)                                                                             \
    X(REDUCE, Reduce, PIECE, PIECE | OF_ROOT)                                                                          \
    X(BROADCAST, Broadcast, PIECE | OF_ROOT, PIECE)                                                                    \
    X(ALL_GATHER, AllGather, PIECE, PIECES)                                                                            \
    X(REDUCE_SCATTER, ReduceScatter, PIECES, PIECE)                                                                    \
    X(ALL_TO_ALL, AlltoAll, PIECES, PIECES)                                                                            \
    X(GATHER, Gather, PIECE, PIECES | OF_ROOT)                                                                         \
    X(SCATTER, Scatter, PIECES | OF_ROOT, PIECE)                                                                       \
    X(SEND, Send, PIECE, NOTHING)                                                                                      \
    X(RECEIVE, Recv, NOTHING, PIECE)

#define OPERATION_CODE(code, name, source, target) code,
enum operation_code { OPERATIONS(OPERATION_CODE) COLLECTIVE_COUNT = SEND };
#undef OPERATION_CODE

struct operation_kind {
    const char *name, *call;
    int source, target;
};

/* A factor in the type of the data. A factor in device memory is read when the work is done. */
struct factor {
    bool is_used;
    enum data_type type;
    const void *address; /* in device memory; NULL: use `value` */
    _Alignas(8) char value[8];
};

struct operation {
    enum operation_code code;
    struct comm *comm;
    void *stream;
    const char *source;
    char *target;
    size_t count;
    enum data_type type;
    int reduction, root; /* the root, or the peer of a message */
    struct factor factor;
    /* Progress. */
    size_t done; /* elements; bytes of a message */
    bool is_posted, has_started;
    bool is_without_data; /* rehearsal.c */
    struct operation *next;
};

struct queue {
    struct operation *first, *last;
};

struct comm {
    _Atomic uint32_t magic;
    int fork_generation;
    struct id_content id;
    int rank, ranks, device;
    int64_t timeout_ms; /* read once: a worker must not read the environment while the program writes it */
    struct gpu_identity gpu;
    struct attachment *attachment;
    struct shared_state *shared;
    _Atomic int users; /* threads inside a call that needs the communicator */
    pthread_mutex_t lock; /* of the jobs and the worker */
    pthread_cond_t changed;
    struct job *first_job, *last_job; /* the first may be in progress */
    pthread_t worker;
    bool has_worker, is_stopping, has_stopped;
    bool has_broken; /* a fault has broken the context, and the streams say so: the communicator has no error, as on a GPU */
    struct pending_queue work;
    _Atomic bool is_aborted, is_revoked, is_finalized, is_suspended;
    _Atomic int asynchronous_error;
    uint64_t steps, exchanges; /* how many this rank has completed */
    uint64_t children;         /* how many communicators were made of this one without an exchange */
    bool has_growth_id;
    bool is_rehearsed, is_alone, has_unknown_size; /* rehearsal.c */
    struct queue collectives, sends[MAX_RANKS], receives[MAX_RANKS]; /* of the job in progress */
    struct factor *factors;
    int factor_count;
    struct comm *next; /* in the list of destroyed communicators */
};

/* The operations of one call, or of one group, on one communicator. */
struct job {
    struct job *next;
    struct operation *operations;
    size_t count;
    struct pending before; /* what its streams waited for when it was submitted */
    int64_t not_before;    /* when their other work ends */
    uint64_t sequence;
};

/* errors.c */
const char *ncclGetLastError(const struct comm *comm);
ncclResult_t fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* forks.c */
extern int fork_generation; /* how many forks separate this process from the first one */

/* settings.c */
bool is_alone(void);
bool is_rehearsed(void);
int64_t read_timeout_ms(void);

/* group.c. The end of an open group returns the first error in it. */
struct batch {
    struct operation *operations;
    size_t count, capacity;
};

struct group {
    int depth; /* of nested groups; 0: no group is open */
    ncclResult_t error; /* of the first call that failed */
    struct batch batch;
    struct joining **joinings; /* one for each communicator that the group creates */
    size_t joining_count, joining_capacity;
};

extern _Thread_local struct group group;

void group_start(void);
ncclResult_t note_group_error(ncclResult_t error); /* returns its argument */
ncclResult_t not_null(const void *pointer, const char *name);

/* cuda.c */
struct capture_info {
    unsigned long long id; /* 0: the stream does not capture */
    void *graph;
};

ncclResult_t current_device(int *device, struct gpu_identity *gpu);
void format_uuid(const struct gpu_identity *gpu, char text[UUID_TEXT_SIZE]);
ncclResult_t use_device(int device);
ncclResult_t get_capture_info(void *stream, struct capture_info *info);
/* The graph that the stream captures will call `function` at each launch, and `release` when it is destroyed. */
ncclResult_t capture_call(void *stream, int device, const struct capture_info *info, void (*function)(void *),
                          void (*release)(void *), void *argument);
const struct sim_pending *pending_runtime(void);
ncclResult_t device_malloc(void **address, size_t size);
ncclResult_t device_free(void *address);

/* id.c */
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t read_id(const ncclUniqueId *id, struct id_content *content);
ncclResult_t check_creator(const struct comm *comm); /* fails if the process that created the unique id is gone */
void derive_id(struct id_content *id, const struct comm *parent, const uint64_t *words, size_t count);

/* communicator.c */
bool is_comm(const struct comm *comm);
ncclResult_t check_comm(const struct comm *comm);
ncclResult_t check_usable(struct comm *comm); /* by collectives and messages */
struct comm *new_comm(int rank, int ranks);
void open_comm(struct comm *comm);
bool close_comm(struct comm *comm); /* returns false if it was not open */
void retire(struct comm *comm);
void pause_briefly(void);

/* wakeups.c */
static inline int64_t now_ms(void)
{
    return now() / MILLISECOND;
}

void wake(struct member *member);
void wake_all(struct shared_state *shared);
void sleep_until_woken(struct member *member, uint32_t wakeups, int milliseconds);
void arrive(const struct comm *comm, _Atomic uint64_t *total, _Atomic uint64_t *own);
bool have_all_arrived(const struct comm *comm, _Atomic uint64_t *total, uint64_t step);

/* failure.c. Ends the communicator for all ranks and names the rank that caused it. */
enum failure_reason { GONE = 1, LATE, LEFT, MISMATCH };
ncclResult_t break_communicator(struct comm *comm, enum failure_reason reason, int culprit, const char *what);
ncclResult_t report_failure(struct comm *comm);
const char *departure(enum member_state state);

/* rendezvous.c. Rank 0 creates the file; other ranks open it. Sets `is_done` to false if the file does not exist yet. */
ncclResult_t attach(struct comm *comm, bool *is_done);
void detach(struct comm *comm, enum member_state state);
bool is_process_gone(const struct comm *comm, int rank);

/* reduce.c */
size_t type_size(enum data_type type);
const char *type_name(enum data_type type);
void reduce(char *target, char *const *sources, int count, size_t elements, enum data_type type, int reduction);
void multiply(char *target, const char *source, size_t elements, enum data_type type, const void *factor);

/* operation.c */
extern const struct operation_kind operation_kinds[];

bool has_source(const struct operation *operation);
bool has_target(const struct operation *operation);
size_t source_size(const struct operation *operation); /* in bytes */
size_t target_size(const struct operation *operation);

/* factors.c */
ncclResult_t use_factor(struct operation *operation);

/* collective.c */
ncclResult_t advance_collective(struct operation *operation, bool *has_progressed, bool *is_done);

/* message.c */
struct mailbox *mailbox(const struct comm *comm, int from, int to);
void advance_send(struct operation *operation, bool *has_progressed, bool *is_done);
ncclResult_t advance_receive(struct operation *operation, bool *has_progressed, bool *is_done);

/* split.c, exchange.c, joining.c */
enum { SPLIT_NO_COLOR = -1 }; /* NCCL_SPLIT_NOCOLOR */

struct joining {
    struct comm *comm; /* NULL if this rank belongs to no new communicator (a split without color) */
    struct comm **handle;
    struct comm *parent; /* whose ranks exchange records first, or NULL */
    struct exchange_record mine, all[MAX_RANKS];
    bool is_attached, has_posted, has_exchanged;
    uint64_t exchange_count; /* of the parent, this one included */
};

ncclResult_t exchange_records(struct joining **joinings, size_t count);
ncclResult_t check_config(const ncclConfig_t *config);
ncclResult_t check_rank(int rank, int ranks);
ncclResult_t new_joining(struct comm **handle, int rank, int ranks, struct comm *parent, struct joining **joining);
ncclResult_t join_all(struct joining **joinings, size_t count);
void abandon_joining(struct joining *joining);

/* rehearsal.c */
bool leaves_data(const struct operation *operation);
ncclResult_t join_alone(struct joining *joining); /* takes ownership */
ncclResult_t complete_alone(const struct operation *operations, size_t count);

/* worker.c */
ncclResult_t check_running(const struct comm *comm);
/* All operations belong to one communicator. `in_graph` submits them to the stream that launches the graph. */
ncclResult_t submit_operations(const struct operation *operations, size_t count, bool in_graph);
void drain(struct comm *comm);
void stop_worker(struct comm *comm);

/* submission.c */
ncclResult_t submit(const struct operation *operation);
ncclResult_t submit_joining(struct joining *joining); /* takes ownership */
ncclResult_t group_end(bool is_to_run);

/* initialization.c, lifetime.c */
ncclResult_t init_rank(struct comm **handle, int ranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config);
ncclResult_t stop_operations(struct comm *comm);

#endif
