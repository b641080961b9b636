/* libcuda.so.1: the table of functions for the runtime. */
#include "driver.h"

#include "api.h"
#include "interface/module_handles.h"

#define ROW(name, exported, parameters) .name = exported,

static int has_injections(void)
{
    sim_config();
    return sim_error_rules != 0;
}

static _Atomic int *fault_flag(void)
{
    return &used_faults->is_used;
}

SIM_EXPORT const struct sim_driver *accelerator_sim_driver(void)
{
    static const struct sim_driver table = {
        SIM_DRIVER_FUNCTIONS(ROW)
        .handles = &module_handles,
        .devices = devices,
        .current = current_context,
        .find_memory = find_memory,
        .is_valid_range = is_valid_range,
        .find_nearest = find_nearest,
        .set_pool = set_pool,
        .set_idle = set_idle,
        .free_idle = free_idle,
        .fill_with_zeros = accelerator_simulation_zero,
        .use_runtime = use_runtime,
        .export_memory = export_memory,
        .import_memory = import_memory,
        .close_imported = close_imported,
        .pending_refusal = &pending_refusal,
        .refuse_launch = refuse_launch,
        .read_refusal = read_refusal,
        .note_refusals = note_refusals,
        .injected = sim_find_injected,
        .has_injections = has_injections,
        .fault_flag = fault_flag,
        .faults_error = faults_error,
        .faults_at_op = faults_at_op,
        .faults_at = faults_at,
        .faults_block = faults_block,
        .faults_end_of = faults_end_of,
        .faults_flip = faults_flip,
        .faults_flipped = faults_flipped,
        .faults_sleep = faults_sleep,
        .limit_of = limit_of,
        .faults_break = faults_break,
        .log = sim_log,
    };
    return &table;
}
