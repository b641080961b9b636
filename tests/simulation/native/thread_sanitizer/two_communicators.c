/* Use two communicators in one process. Each rank is a thread with its own device and uses both communicators. Another
 * thread queries events and errors meanwhile.
 *
 * `python -m tests.simulation.native.thread_sanitizer` builds it with ThreadSanitizer. The exit status is 0 if every result is right. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 3, ROUNDS = 30, COUNT = 200000, FLOAT32 = 7, SUM = 0, NOT_READY = 600, RECURRING = 7 };

typedef struct {
    char internal[128];
} ncclUniqueId;

int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank);
int ncclCommSplit(void *comm, int color, int key, void **new_comm, void *config);
int ncclCommDestroy(void *comm);
int ncclCommAbort(void *comm);
int ncclCommGetAsyncError(void *comm, int *error);
int ncclAllReduce(const void *source, void *target, size_t count, int type, int reduction, void *comm, void *stream);
int ncclSend(const void *source, size_t count, int type, int peer, void *comm, void *stream);
int ncclRecv(void *target, size_t count, int type, int peer, void *comm, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int cudaSetDevice(int device);
int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);
int cudaMemcpyAsync(void *target, const void *source, size_t size, int direction, void *stream);
int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamDestroy(void *stream);
int cudaStreamSynchronize(void *stream);
int cudaStreamQuery(void *stream);
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags);
int cudaEventCreateWithFlags(void **event, unsigned flags);
int cudaEventDestroy(void *event);
int cudaEventRecord(void *event, void *stream);
int cudaEventQuery(void *event);
int cudaDeviceSynchronize(void);

static ncclUniqueId first_id, second_id;
static pthread_barrier_t submitted;
static _Atomic bool is_done;
static void *_Atomic watched_comms[RANKS], *_Atomic watched_events[RANKS];

static void check(int result, const char *call)
{
    if (result == 0)
        return;
    fprintf(stderr, "%s returned %d\n", call, result);
    exit(1);
}

#define CHECK(call) check(call, #call)

static void check_values(const float *values, float expected)
{
    for (size_t i = 0; i < COUNT; i += 999)
        if (values[i] != expected) {
            fprintf(stderr, "element %zu is %g, not %g\n", i, (double)values[i], (double)expected);
            exit(1);
        }
}

static void run_round(int rank, int round, void *const comms[2], void *const streams[2], float *const device[2], float *host)
{
    const int next = (rank + 1) % RANKS, previous = (rank + RANKS - 1) % RANKS;
    void *event = watched_events[rank];
    for (int i = 0; i < COUNT; i++)
        host[i] = (float)(rank + round);
    for (int side = 0; side < 2; side++) {
        CHECK(cudaMemcpyAsync(device[side], host, COUNT * sizeof *host, 1, streams[side]));
        CHECK(cudaStreamSynchronize(streams[side]));
    }
    /* The ranks use the communicators in different orders. */
    for (int i = 0; i < 2; i++) {
        int side = (i + rank) % 2;
        CHECK(ncclAllReduce(device[side], device[side], COUNT, FLOAT32, SUM, comms[side], streams[side]));
    }
    CHECK(cudaEventRecord(event, streams[0]));
    CHECK(cudaStreamWaitEvent(streams[1], event, 0));
    CHECK(ncclGroupStart());
    CHECK(ncclSend(device[0], COUNT, FLOAT32, next, comms[1], streams[1]));
    CHECK(ncclRecv(device[1], COUNT, FLOAT32, previous, comms[1], streams[1]));
    CHECK(ncclGroupEnd());
    CHECK(cudaMemcpyAsync(host, device[1], COUNT * sizeof *host, 2, streams[1]));
    CHECK(cudaStreamSynchronize(streams[1]));
    check_values(host, (float)(RANKS * (RANKS - 1) / 2 + RANKS * round));
}

static void *run_rank(void *argument)
{
    const int rank = (int)(size_t)argument;
    void *comms[2], *streams[2], *event;
    float *device[2], *host = malloc(COUNT * sizeof *host);
    CHECK(cudaSetDevice(rank));
    CHECK(ncclCommInitRank(&comms[0], RANKS, first_id, rank));
    CHECK(ncclCommInitRank(&comms[1], RANKS, second_id, rank));
    for (int side = 0; side < 2; side++) {
        CHECK(cudaStreamCreateWithFlags(&streams[side], 1));
        CHECK(cudaMalloc((void **)&device[side], COUNT * sizeof(float)));
    }
    CHECK(cudaEventCreateWithFlags(&event, 2));
    watched_events[rank] = event;
    watched_comms[rank] = comms[0];
    for (int round = 0; round < ROUNDS; round++) {
        run_round(rank, round, comms, streams, device, host);
        if (round % RECURRING == 0) {
            void *child;
            CHECK(ncclCommSplit(comms[0], 0, -rank, &child, NULL));
            CHECK(ncclAllReduce(device[0], device[0], COUNT, FLOAT32, SUM, child, streams[0]));
            CHECK(ncclCommDestroy(child));
        }
    }
    CHECK(cudaDeviceSynchronize());
    watched_comms[rank] = NULL;
    CHECK(ncclCommDestroy(comms[0]));
    /* Rank 0 does not submit this work, so only the abort ends it. Work that is submitted after an abort is refused. */
    if (rank != 0)
        CHECK(ncclAllReduce(device[1], device[1], COUNT, FLOAT32, SUM, comms[1], streams[1]));
    pthread_barrier_wait(&submitted);
    CHECK(ncclCommAbort(comms[1]));
    CHECK(cudaStreamSynchronize(streams[1]));
    for (int side = 0; side < 2; side++) {
        CHECK(cudaFree(device[side]));
        CHECK(cudaStreamDestroy(streams[side]));
    }
    free(host);
    return NULL;
}

/* Query events and errors, as torch's watchdog does. The events outlive this thread. A query of a destroyed communicator
 * returns an error, which is ignored. */
static void *watch(void *argument)
{
    while (!is_done)
        for (int rank = 0; rank < RANKS; rank++) {
            int error;
            if (watched_comms[rank])
                ncclCommGetAsyncError(watched_comms[rank], &error);
            if (watched_events[rank])
                cudaEventQuery(watched_events[rank]);
        }
    return argument;
}

int main(void)
{
    pthread_t ranks[RANKS], watcher;
    CHECK(ncclGetUniqueId(&first_id));
    CHECK(ncclGetUniqueId(&second_id));
    pthread_barrier_init(&submitted, NULL, RANKS);
    for (size_t rank = 0; rank < RANKS; rank++)
        pthread_create(&ranks[rank], NULL, run_rank, (void *)rank);
    pthread_create(&watcher, NULL, watch, NULL);
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(ranks[rank], NULL);
    is_done = true;
    pthread_join(watcher, NULL);
    for (int rank = 0; rank < RANKS; rank++)
        CHECK(cudaEventDestroy(watched_events[rank]));
    puts("every result is right");
    return 0;
}
