/* libcuda.so.1: faults, for Python: of this process's machine if there is no path, or of the machine with the state at a path. */
#include "driver.h"

/* Returns a problem, or NULL. */
static const char *find_faults(const char *path, struct fault_table **table)
{
    struct sim_state *state = NULL;
    const char *problem = path ? sim_state_attach(path, &state) : NULL;
    if (problem)
        return problem;
    state = path ? state : sim_state_open();
    if (!state)
        return "the state of the machine cannot be opened";
    *table = sim_state_faults(state);
    return NULL;
}

SIM_EXPORT const char *accelerator_sim_faults_add(const char *path, const char *rows, int node)
{
    struct fault_table *table;
    const char *problem = find_faults(path, &table);
    return problem ? problem : faults_add(table, rows, path ? node : sim_config()->node);
}

SIM_EXPORT const char *accelerator_sim_faults_end(const char *path, int gpu, int is_reset)
{
    struct fault_table *table;
    const char *problem = find_faults(path, &table);
    if (!problem)
        (is_reset ? faults_reset : faults_clear)(table, gpu);
    return problem;
}

SIM_EXPORT const char *accelerator_sim_faults_describe(const char *path, int only_unfired, char *text, size_t size)
{
    struct fault_table *table;
    const char *problem = find_faults(path, &table);
    if (!problem)
        faults_describe(table, only_unfired, text, size);
    return problem;
}
