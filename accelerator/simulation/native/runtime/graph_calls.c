/* The CUDA runtime: the calls for graphs (cudaGraphInstantiate, cudaGraphLaunch, ...). A graph is a chain of work; launching
 * it does the work, in order. */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>

struct instance {
    struct graph *graph;
    size_t node_count;
};

EXPORT cudaError_t cudaGraphInstantiateWithFlags(struct instance **handle, struct graph *graph, unsigned long long flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)flags;
    struct instance *instance = handle && graph ? malloc(sizeof *instance) : NULL;
    REQUIRE(instance);
    *instance = (struct instance){graph, graph_retain(graph)};
    *handle = instance;
    return SUCCESS;
}

EXPORT cudaError_t cudaGraphInstantiate(struct instance **handle, struct graph *graph, unsigned long long flags)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaGraphInstantiateWithFlags(handle, graph, flags);
}

EXPORT cudaError_t cudaGraphLaunch(struct instance *instance, void *stream_handle)
{
    ENTER_STREAM(stream, stream_handle);
    RETURN_UNLESS(instance, fail(ERROR_INVALID_HANDLE));
    if (has_faults())
        driver->faults_at(CLOCK_LAUNCHES, driver->devices[stream->device].gpu);
    IF_RACES(race_hooks->at_launch(&stream->races, instance->graph->race_world));
    for (size_t i = 0; i < instance->node_count; i++)
        RETURN_IF_ERROR(finish(submit(stream, &instance->graph->nodes[i]->work)));
    return SUCCESS;
}

EXPORT cudaError_t cudaGraphDestroy(struct graph *graph)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(graph);
    graph_release(graph);
    return SUCCESS;
}

EXPORT cudaError_t cudaGraphExecDestroy(struct instance *instance)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(instance);
    graph_release(instance->graph);
    free(instance);
    return SUCCESS;
}

/* Fills in as many nodes as the caller's array holds, or, without an array, their number. */
static void list_nodes(struct node *const *nodes, size_t available, struct node **target, size_t *count)
{
    if (!target || available < *count)
        *count = available;
    for (size_t i = 0; target && i < *count; i++)
        target[i] = nodes[i];
}

EXPORT cudaError_t cudaGraphGetNodes(struct graph *graph, struct node **nodes, size_t *count)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(graph && count);
    list_nodes(graph->nodes, graph->node_count, nodes, count);
    return SUCCESS;
}

#if CUDART == 12
EXPORT cudaError_t cudaGraphNodeGetDependencies(struct node *node, struct node **nodes, size_t *count)
#else
EXPORT cudaError_t cudaGraphNodeGetDependencies(struct node *node, struct node **nodes, uint64_t *edges, size_t *count)
#endif
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(node && count);
    list_nodes(&node->previous, node->previous != NULL, nodes, count);
#if CUDART != 12
    for (size_t i = 0; edges && i < *count; i++)
        edges[i] = 0; /* an ordinary edge */
#endif
    return SUCCESS;
}

EXPORT cudaError_t cudaGraphDebugDotPrint(struct graph *graph, const char *path, unsigned flags)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)flags;
    FILE *file = graph && path ? fopen(path, "w") : NULL;
    REQUIRE(file);
    fputs("digraph dot {\n", file);
    for (size_t i = 0; i < graph->node_count; i++) {
        fprintf(file, "\"node_%zu\" [label=\"%s\"];\n", i, graph->nodes[i]->work.type->node);
        if (i > 0)
            fprintf(file, "\"node_%zu\" -> \"node_%zu\";\n", i - 1, i);
    }
    fputs("}\n", file);
    fclose(file);
    return SUCCESS;
}

EXPORT cudaError_t cudaUserObjectCreate(struct user_object **handle, void *argument, void (*destroy)(void *argument),
                                        unsigned references, unsigned flags)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)flags;
    struct user_object *object = handle && destroy && references > 0 ? malloc(sizeof *object) : NULL;
    REQUIRE(object);
    *object = (struct user_object){(int)references, argument, destroy};
    *handle = object;
    return SUCCESS;
}

EXPORT cudaError_t cudaUserObjectRelease(struct user_object *object, unsigned count)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(object);
    release_object(object, (int)count);
    return SUCCESS;
}

EXPORT cudaError_t cudaGraphRetainUserObject(struct graph *graph, struct user_object *object, unsigned count, unsigned flags)
{
    enum { MOVE = 1 };
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(graph && object && count != 0);
    bool has_space = graph_add_object(graph, object, count, flags & MOVE);
    return finish(has_space ? SUCCESS : ERROR_OUT_OF_MEMORY);
}

/* Graphs allocate no memory: an allocation during capture happens once, at the call. */
EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int ordinal, int attribute, void *value)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)attribute;
    RETURN_IF_ERROR(check_device(ordinal));
    REQUIRE(value);
    *(uint64_t *)value = 0;
    return SUCCESS;
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int ordinal, int attribute, void *value)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)attribute;
    RETURN_IF_ERROR(check_device(ordinal));
    return finish(value ? SUCCESS : ERROR_INVALID_VALUE);
}
