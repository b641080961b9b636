/* NCCL: messages between two ranks, through the mailbox of the pair. */
#include "nccl.h"

#include <string.h>

struct mailbox *mailbox(const struct comm *comm, int from, int to)
{
    struct shared_state *shared = comm->shared;
    size_t size = sizeof(struct mailbox) + shared->mailbox_size;
    return (struct mailbox *)((char *)shared + shared->mailboxes +
                              ((size_t)from * (size_t)comm->ranks + (size_t)to) * size);
}

/* The mailbox is a ring buffer; a copy may wrap around its end. */
static void copy_in(struct mailbox *box, size_t capacity, uint64_t position, const char *source, size_t size)
{
    size_t offset = position % capacity, first = size < capacity - offset ? size : capacity - offset;
    memcpy(box->data + offset, source, first);
    memcpy(box->data, source + first, size - first);
}

static void copy_out(const struct mailbox *box, size_t capacity, uint64_t position, char *target, size_t size)
{
    size_t offset = position % capacity, first = size < capacity - offset ? size : capacity - offset;
    memcpy(target, box->data + offset, first);
    memcpy(target + first, box->data, size - first);
}

void advance_send(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct mailbox *box = mailbox(comm, comm->rank, operation->root);
    size_t capacity = comm->shared->mailbox_size, total = operation->count * type_size(operation->type);
    uint64_t written = box->written;
    size_t space = capacity - (size_t)(written - box->read);
    if (!operation->has_started) {
        uint64_t header = total;
        if (space < sizeof header)
            return;
        copy_in(box, capacity, written, (const char *)&header, sizeof header);
        written += sizeof header;
        space -= sizeof header;
        operation->has_started = true;
        operation->done = operation->is_without_data ? total : 0;
    }
    size_t size = total - operation->done < space ? total - operation->done : space;
    if (size > 0)
        copy_in(box, capacity, written, operation->source + operation->done, size);
    operation->done += size;
    *is_done = operation->done == total;
    if (written + size == box->written)
        return;
    box->written = written + size;
    wake(&comm->shared->members[operation->root]);
    *has_progressed = true;
}

ncclResult_t advance_receive(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct mailbox *box = mailbox(comm, operation->root, comm->rank);
    size_t capacity = comm->shared->mailbox_size, total = operation->count * type_size(operation->type);
    uint64_t read = box->read;
    size_t available = (size_t)(box->written - read);
    if (!operation->has_started) {
        uint64_t header;
        if (available < sizeof header)
            return ncclSuccess;
        copy_out(box, capacity, read, (char *)&header, sizeof header);
        if (header != total) {
            fail(ncclInvalidUsage, "rank %d sends %llu bytes to rank %d, which receives %zu", operation->root,
                 (unsigned long long)header, comm->rank, total);
            return break_communicator(comm, MISMATCH, operation->root, "Recv");
        }
        read += sizeof header;
        available -= sizeof header;
        operation->has_started = true;
        operation->done = operation->is_without_data ? total : 0;
    }
    size_t size = total - operation->done < available ? total - operation->done : available;
    if (size > 0)
        copy_out(box, capacity, read, operation->target + operation->done, size);
    operation->done += size;
    *is_done = operation->done == total;
    if (read + size == box->read)
        return ncclSuccess;
    box->read = read + size;
    wake(&comm->shared->members[operation->root]);
    *has_progressed = true;
    return ncclSuccess;
}
