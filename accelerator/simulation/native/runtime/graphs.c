/* The CUDA runtime: the objects behind handles of graphs: a chain of nodes. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>

#include "common/arrays.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct graph *graph_new(void)
{
    struct graph *graph = calloc(1, sizeof *graph);
    if (graph)
        graph->references = 1;
    return graph;
}

bool graph_append(struct graph *graph, const struct work *work)
{
    if (!array_reserve((void **)&graph->nodes, &graph->node_capacity, graph->node_count + 1, sizeof *graph->nodes))
        return false;
    struct node *node = malloc(sizeof *node);
    if (!node)
        return false;
    *node = (struct node){graph, graph_last_node(graph), *work};
    if (work->type->keep && !work->type->keep(&node->work)) {
        free(node);
        return false;
    }
    graph->nodes[graph->node_count++] = node;
    return true;
}

struct node *graph_last_node(struct graph *graph)
{
    return graph->node_count ? graph->nodes[graph->node_count - 1] : NULL;
}

size_t graph_retain(struct graph *graph)
{
    pthread_mutex_lock(&lock);
    graph->references++;
    size_t node_count = graph->node_count;
    pthread_mutex_unlock(&lock);
    return node_count;
}

void release_object(struct user_object *object, int count)
{
    pthread_mutex_lock(&lock);
    object->references -= count;
    bool is_unused = object->references <= 0;
    pthread_mutex_unlock(&lock);
    if (is_unused) {
        object->destroy(object->argument);
        free(object);
    }
}

void graph_release(struct graph *graph)
{
    pthread_mutex_lock(&lock);
    bool is_unused = --graph->references == 0;
    pthread_mutex_unlock(&lock);
    if (!is_unused)
        return;
    for (size_t i = 0; i < graph->object_count; i++)
        release_object(graph->objects[i], 1);
    for (size_t i = 0; i < graph->node_count; i++) {
        const struct work *work = &graph->nodes[i]->work;
        if (work->type->release)
            work->type->release(work);
        free(graph->nodes[i]);
    }
    if (graph->race_world)
        race_hooks->at_graph_end(graph->race_world);
    free(graph->objects);
    free(graph->nodes);
    free(graph);
}

/* A moved reference was the caller's. */
bool graph_add_object(struct graph *graph, struct user_object *object, unsigned count, bool is_moved)
{
    pthread_mutex_lock(&lock);
    bool has_space = array_reserve((void **)&graph->objects, &graph->object_capacity, graph->object_count + count,
                                   sizeof *graph->objects);
    if (has_space) {
        for (unsigned i = 0; i < count; i++)
            graph->objects[graph->object_count++] = object;
        object->references += is_moved ? 0 : (int)count;
    }
    pthread_mutex_unlock(&lock);
    return has_space;
}
