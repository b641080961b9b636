/* NCCL: how many bytes an operation reads and writes on a rank. */
#include "nccl.h"

#define OPERATION_KIND(code, name, source, target) {#name, "nccl" #name, source, target},
const struct operation_kind operation_kinds[] = {OPERATIONS(OPERATION_KIND)};
#undef OPERATION_KIND

static bool concerns(const struct operation *operation, int pieces)
{
    return pieces != NOTHING && (!(pieces & OF_ROOT) || operation->root == operation->comm->rank);
}

static size_t size_of(const struct operation *operation, int pieces)
{
    size_t size = operation->count * type_size(operation->type);
    return !concerns(operation, pieces) ? 0 : pieces & PIECES ? size * (size_t)operation->comm->ranks : size;
}

bool has_source(const struct operation *operation)
{
    return concerns(operation, operation_kinds[operation->code].source);
}

bool has_target(const struct operation *operation)
{
    return concerns(operation, operation_kinds[operation->code].target);
}

size_t source_size(const struct operation *operation)
{
    return size_of(operation, operation_kinds[operation->code].source);
}

size_t target_size(const struct operation *operation)
{
    return size_of(operation, operation_kinds[operation->code].target);
}
