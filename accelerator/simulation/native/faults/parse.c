/* Faults: reads the rows that fault_words.py writes. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/faults.h"

static const char *const kinds[] = {"error", "lost", "hang", "slow", "link", "flip", "kill", "note", NULL};
static const char *const scopes[] = {"process", "users", "reset", NULL};
static const char *const clocks[] = {"none", "ops", "collectives", "launches", "seconds", NULL};

static int find_word(const char *const *words, const char *word)
{
    for (int i = 0; words[i]; i++)
        if (strcmp(words[i], word) == 0)
            return i;
    return -1;
}

/* A row is "kind scope clock marks xid error recovery gpu node rank at chance seed amount duration|words|text". */
static bool parse(const char *row, struct fault *fault, int *node)
{
    char kind[16], scope[16], clock[16], words[sizeof fault->words] = "", text[sizeof fault->text] = "";
    int gpu;
    memset(fault, 0, sizeof *fault);
    int count = sscanf(row,
                       "%15s %15s %15s %d %d %d %d %d %d %d %" SCNd64 " %" SCNu64 " %" SCNu64 " %" SCNd64 " %" SCNd64
                       "|%159[^|]|%119[^|]",
                       kind, scope, clock, &fault->marks, &fault->xid, &fault->error, &fault->recovery, &gpu, node, &fault->rank,
                       &fault->at, &fault->chance, &fault->seed, &fault->amount, &fault->duration, words, text);
    if (count < 16)
        return false;
    fault->gpu = gpu;
    fault->kind = find_word(kinds, kind);
    fault->scope = find_word(scopes, scope);
    fault->clock = find_word(clocks, clock);
    memcpy(fault->words, words, sizeof words);
    memcpy(fault->text, text, sizeof text);
    return fault->kind >= 0 && fault->scope >= 0 && fault->clock >= 0;
}

/* Claims a place first, because several processes may add faults. */
static struct fault *claim(struct fault_table *table)
{
    static const int32_t states[] = {FAULT_FREE, FAULT_CLEARED, FAULT_OVER};
    for (size_t k = 0; k < sizeof states / sizeof *states; k++)
        for (int i = 0; i < SIM_MAX_FAULTS; i++) {
            int32_t state = states[k];
            if (atomic_compare_exchange_strong(&table->faults[i].state, &state, FAULT_CLAIMED))
                return &table->faults[i];
        }
    return NULL;
}

static const char *add(struct fault_table *table, const char *row, int node, int gpu_count)
{
    enum { ANY_NODE = -1 };
    struct fault fault;
    int of_node;
    if (!parse(row, &fault, &of_node))
        return "a fault is written in the words of another version of accelerator";
    if (of_node != ANY_NODE && of_node != node)
        return NULL;
    if (fault.gpu >= gpu_count)
        return "the machine has no such GPU";
    if (fault.clock == CLOCK_SECONDS)
        fault.at += now();
    struct fault *place = claim(table);
    if (!place)
        return "the machine has no place for more faults";
    const size_t rest = offsetof(struct fault, state) + sizeof place->state;
    memcpy((char *)place + rest, (const char *)&fault + rest, sizeof fault - rest);
    place->state = FAULT_WAITS;
    table->is_used = 1;
    return NULL;
}

const char *faults_add(struct fault_table *table, const char *rows, int node, int gpu_count)
{
    const char *problem = NULL;
    char *copy = strdup(rows), *rest = copy;
    for (char *row; !problem && (row = strsep(&rest, ";"));)
        if (*row)
            problem = add(table, row, node, gpu_count);
    free(copy);
    return problem;
}
