/* What is known of models of GPUs, by their full names, beside the memory and capability in known_gpus.py. */
#ifndef ACCELERATOR_SIM_MODELS_H
#define ACCELERATOR_SIM_MODELS_H

#include <stdbool.h>

/* 0 for what is not known. */
struct sim_model {
    const char *name;
    bool is_passive;                         /* it has no fan */
    unsigned pcie_generation;                /* of 16 lanes */
    unsigned power_limit, least_power_limit; /* watts; the first one is the default and the maximum */
    unsigned brand;                          /* as NVML numbers it */
    unsigned clocks[4];                      /* maxima of graphics, SM, memory and video, in megahertz */
    unsigned temperature, slowdown, shutdown; /* the highest of operation, in degrees Celsius; degrees beyond it */
    unsigned cores, bus_width;               /* the width of the memory's bus in bits */
    unsigned bar1;                           /* MiB */
    unsigned banks;                          /* of memory, whose rows can be remapped */
    unsigned device_id, subsystem_id;        /* PCI */
};

/* Returns NULL for an unknown model. */
const struct sim_model *sim_find_model(const char *name);

#endif
