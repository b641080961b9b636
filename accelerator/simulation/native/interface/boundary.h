/* What crosses languages, or libraries that are compiled apart: these headers and what they include.
 *
 * SIM_BOUNDARY, on the command line of each compiler, is a hash of their texts. Each table that crosses begins with it. A
 * library that finds another one's refuses to start: the two were compiled from different headers. */
#ifndef ACCELERATOR_SIM_BOUNDARY_H
#define ACCELERATOR_SIM_BOUNDARY_H

#include "interface/engine_runtime.h"
#include "interface/op_rules.h"
#include "interface/race_accesses.h"

#ifndef __cplusplus
#include "interface/cuda_errors.h"
#include "interface/driver_table.h"
#include "interface/fault_effects.h"
#include "interface/kernel_runs.h"
#include "interface/module_handles.h"
#include "interface/nvml_types.h"
#include "interface/pending.h"
#include "interface/processor_signals.h"
#include "interface/race_hooks.h"
#endif

#ifndef SIM_BOUNDARY
#error "SIM_BOUNDARY is the version of the headers in interface/"
#endif

#endif
