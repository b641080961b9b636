/* libcuda.so.1: faults, for Python: of this process's machine if there is no path, or of the machine with the state at a path. */
#include "driver.h"

/* Returns a problem, or NULL. */
static const char *find_machine(const char *path, struct sim_state **state)
{
    const char *problem = path ? sim_state_attach(path, state) : NULL;
    if (problem)
        return problem;
    if (!path)
        *state = sim_state_open();
    return *state ? NULL : "the state of the machine cannot be opened";
}

static void leave_machine(const char *path, struct sim_state *state)
{
    if (path)
        sim_state_detach(state);
}

SIM_EXPORT const char *accelerator_sim_faults_add(const char *path, const char *rows, int node)
{
    struct sim_state *state;
    const char *problem = find_machine(path, &state);
    if (problem)
        return problem;
    problem = faults_add(sim_state_faults(state), rows, path ? node : sim_config()->node, sim_state_gpu_count(state));
    leave_machine(path, state);
    return problem;
}

SIM_EXPORT const char *accelerator_sim_faults_end(const char *path, int gpu, int is_reset)
{
    struct sim_state *state;
    const char *problem = find_machine(path, &state);
    if (problem)
        return problem;
    if (gpu >= sim_state_gpu_count(state))
        problem = "the machine has no such GPU";
    else
        (is_reset ? faults_reset : faults_clear)(sim_state_faults(state), gpu);
    leave_machine(path, state);
    return problem;
}

SIM_EXPORT const char *accelerator_sim_faults_describe(const char *path, int only_unfired, char *text, size_t size)
{
    struct sim_state *state;
    const char *problem = find_machine(path, &state);
    if (problem)
        return problem;
    faults_describe(sim_state_faults(state), only_unfired, text, size);
    leave_machine(path, state);
    return NULL;
}
