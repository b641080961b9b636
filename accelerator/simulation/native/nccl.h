/* The inside of libnccl.so.2: what its files share.
 *
 * Simulated device memory is host memory and simulated streams do their work at the call, so a communication is done at
 * the call as well: the ranks meet in one file of shared memory per communicator and copy through it. */
#ifndef ACCELERATOR_SIM_NCCL_H
#define ACCELERATOR_SIM_NCCL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Results, types and reductions have NCCL's numbers. */
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

enum data_type {
    INT8,
    UINT8,
    INT32,
    UINT32,
    INT64,
    UINT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    TYPE_COUNT,
};

enum reduction {
    SUM,
    PROD,
    MAX,
    MIN,
    AVG,
    FIRST_MULTIPLIED, /* this and higher numbers: sums of numbers multiplied before, each with its own factor */
};

enum { ID_SIZE = 16, UUID_SIZE = 16, MAX_RANKS = 128, CACHE_LINE = 64 };

typedef struct {
    char internal[128];
} ncclUniqueId;

/* What the caller's structure begins with, in every version of NCCL. */
typedef struct {
    size_t size;
    unsigned magic, version;
} ncclConfig_t;

/* ---- Shared memory. ---- */

enum member_state { MEMBER_ABSENT, MEMBER_PRESENT, MEMBER_LEFT, MEMBER_ABORTED, MEMBER_REVOKED };

/* What a rank is about to do in a collective; all ranks must say the same. */
struct announcement {
    uint64_t count;
    int code, type, reduction, root;
};

/* What the ranks tell each other to make one communicator of another. */
struct exchange_record {
    int color, key;
    bool has_id;
    ncclUniqueId id;
};

/* One rank's place. Of the pairs, the step's number decides which half is used: nobody can be two steps ahead. */
struct member {
    _Alignas(CACHE_LINE) _Atomic int state;
    _Atomic uint32_t wakeups;      /* a futex: changes when something came that the rank may wait for */
    _Atomic uint32_t sleepers; /* the rank sleeps on its wakeups */
    _Atomic uint64_t steps, exchanges;
    unsigned char gpu[UUID_SIZE];
    struct announcement announced[2];
    struct exchange_record exchange[2];
};

/* From one rank to one other: a stream of bytes, each message after a word with its size. */
struct mailbox {
    _Alignas(CACHE_LINE) _Atomic uint64_t written, read;
    _Alignas(CACHE_LINE) char data[];
};

/* The file: this, a mailbox for every pair of ranks, a slot for every rank. */
struct shared_state {
    uint64_t magic;
    int ranks;
    size_t size, mailboxes, mailbox_size, slots, slot_size; /* offsets in the file, and sizes */
    _Atomic int attached;
    _Atomic uint64_t failure;           /* 0, or what ended the communicator for all */
    _Atomic uint64_t steps, exchanges; /* of all ranks together */
    struct member members[];
};

/* ---- One process. ---- */

/* This process's hold on a file, shared by those of the communicator's ranks that are its threads. */
struct attachment {
    struct attachment *next;
    char name[2 * ID_SIZE + 1];
    char *path; /* NULL once the file has no name any more */
    int file;
    int references;
    bool is_here[MAX_RANKS]; /* the rank is of this process */
    struct shared_state *shared;
};

enum operation_code {
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    COLLECTIVE_COUNT,
    SEND = COLLECTIVE_COUNT,
    RECEIVE,
    EXCHANGE,
};

/* A factor to multiply by, in the type of the data; read when the work is done if it lies in device memory. */
struct factor {
    bool is_used;
    enum data_type type;
    const void *address; /* NULL: the value is here */
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
    int reduction, root; /* root: also the peer */
    struct factor factor;
    struct exchange_record *mine, *all; /* of an exchange */
    /* Progress. */
    size_t done; /* elements; bytes of a message */
    bool is_posted, has_started;
    struct operation *next;
};

struct queue {
    struct operation *first, *last;
};

struct comm {
    _Atomic uint32_t magic;
    int fork_generation;
    unsigned char id[ID_SIZE];
    int rank, ranks, device;
    unsigned char gpu[UUID_SIZE];
    struct attachment *attachment;
    struct shared_state *shared;
    pthread_mutex_t lock; /* held while operations run */
    _Atomic int users;    /* threads that hold the lock or wait for it */
    _Atomic bool is_aborted, is_revoked, is_finalized, is_suspended;
    _Atomic int asynchronous_error;
    uint64_t steps, exchanges; /* this rank's, so far */
    uint64_t children;         /* communicators made of this one without an exchange */
    bool has_growth_id;
    struct queue collectives, exchanging, sends[MAX_RANKS], receives[MAX_RANKS];
    struct factor *factors;
    int factor_count;
    struct comm *next; /* of those that are gone */
};

struct batch {
    struct operation *operations;
    size_t count, capacity;
};

/* nccl.c */
const char *ncclGetLastError(const struct comm *comm);
ncclResult_t fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* nccl_cuda.c */
struct capture_info {
    unsigned long long id; /* 0: the stream does not capture */
    void *graph;
};

ncclResult_t current_device(int *device, unsigned char gpu[UUID_SIZE]);
ncclResult_t use_device(int device);
ncclResult_t get_capture_info(void *stream, struct capture_info *info);
ncclResult_t capture_call(void *stream, const struct capture_info *info, void (*function)(void *), void (*release)(void *),
                          void *argument);
ncclResult_t device_malloc(void **address, size_t size);
ncclResult_t device_free(void *address);

/* nccl_rendezvous.c */
extern int fork_generation; /* how many forks this process is away from the first */

void new_id(unsigned char id[ID_SIZE]);
/* Takes the rank's member if that can be done now; `is_done` tells. Rank 0 makes the file, the others find it. */
ncclResult_t attach(struct comm *comm, bool *is_done);
void detach(struct comm *comm, enum member_state state);
void remove_file_name(struct attachment *attachment); /* removes the file's name */
bool is_process_gone(const struct comm *comm, int rank);

/* nccl_progress.c */
int64_t now_ms(void);
int64_t timeout_ms(void);
ncclResult_t run_batch(struct batch *batch);
void wake(struct member *member);
void wake_all(struct shared_state *shared);
/* Ends the communicator for all ranks, because of the culprit. */
enum failure_reason { GONE = 1, LATE, LEFT, MISMATCH };
ncclResult_t break_communicator(struct comm *comm, enum failure_reason reason, int culprit, const char *what);
ncclResult_t report_failure(struct comm *comm);
const char *departure(enum member_state state);

/* nccl_group.c */
struct joining {
    struct comm *comm; /* NULL once it is known that this rank belongs to no new communicator */
    struct comm **handle;
    struct comm *parent; /* whose ranks exchange words before, or NULL */
    struct exchange_record mine, all[MAX_RANKS];
    bool is_attached;
};

ncclResult_t submit(const struct operation *operation);
ncclResult_t submit_joining(struct joining *joining); /* which was allocated, and is freed */
ncclResult_t note_group_error(ncclResult_t error); /* the end of the group, if one is open, will answer it too */
void group_start(void);
ncclResult_t group_end(bool is_to_run);

/* nccl_comm.c */
ncclResult_t join_all(struct joining **joinings, size_t count);
void abandon_joining(struct joining *joining);
bool is_comm(const struct comm *comm);

/* nccl_reduce.c */
size_t type_size(enum data_type type);
void reduce(char *target, char *const *sources, int count, size_t elements, enum data_type type, int reduction);
void multiply(char *target, const char *source, size_t elements, enum data_type type, const void *factor);

#endif
