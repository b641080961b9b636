/* The models: those of known_gpus.py, and figures that were read on an H100 with driver 580.159.04. */
#include "models.h"

#include <stddef.h>
#include <string.h>

#include "interface/settings.h"

#define MODEL(text, has_fan, generation, watts)                                                                        \
    {.name = text, .is_passive = !(has_fan), .pcie_generation = generation, .power_limit = watts},

static const struct sim_model models[] = {
    {.name = "NVIDIA H100 80GB HBM3", .is_passive = true, .pcie_generation = 5, .power_limit = 700, .least_power_limit = 200,
     .brand = 14, .clocks = {1980, 1980, 2619, 1545}, .temperature = 87, .slowdown = 2, .shutdown = 8, .cores = 16896,
     .bus_width = 5120, .bar1 = 131072, .banks = 2560, .device_id = 0x233010de, .subsystem_id = 0x16c110de},
    SIM_KNOWN_GPUS(MODEL)
};

const struct sim_model *sim_find_model(const char *name)
{
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (strcmp(models[i].name, name) == 0)
            return &models[i];
    return NULL;
}
