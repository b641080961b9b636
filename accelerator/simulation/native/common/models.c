/* The models. Fans, PCIe and power limits are those of NVIDIA's data sheets. The other figures of the H100 were read on one, with driver
 * 580.159.04. */
#include "models.h"

#include <stddef.h>
#include <string.h>

#define MODEL(text, fanless, generation, watts, ...)                                                                   \
    {.name = text, .is_passive = fanless, .pcie_generation = generation, .power_limit = watts, __VA_ARGS__}

static const struct sim_model models[] = {
    MODEL("Tesla T4", true, 3, 70),
    MODEL("Tesla V100-SXM2-16GB", true, 3, 300),
    MODEL("Tesla V100-SXM2-32GB", true, 3, 300),
    MODEL("NVIDIA A10", true, 4, 150),
    MODEL("NVIDIA A10G", true, 4, 300),
    MODEL("NVIDIA A30", true, 4, 165),
    MODEL("NVIDIA A40", true, 4, 300),
    MODEL("NVIDIA A100-SXM4-40GB", true, 4, 400),
    MODEL("NVIDIA A100-SXM4-80GB", true, 4, 400),
    MODEL("NVIDIA L4", true, 4, 72),
    MODEL("NVIDIA L40", true, 4, 300),
    MODEL("NVIDIA L40S", true, 4, 350),
    MODEL("NVIDIA H20", true, 5, 500),
    MODEL("NVIDIA H100 80GB HBM3", true, 5, 700, .least_power_limit = 200, .brand = 14, .clocks = {1980, 1980, 2619, 1545},
          .temperature = 87, .slowdown = 2, .shutdown = 8, .cores = 16896, .bus_width = 5120, .bar1 = 131072, .banks = 2560,
          .device_id = 0x233010de, .subsystem_id = 0x16c110de),
    MODEL("NVIDIA H100 PCIe", true, 5, 350),
    MODEL("NVIDIA H100 NVL", true, 5, 400),
    MODEL("NVIDIA H200", true, 5, 700),
    MODEL("NVIDIA GH200 480GB", true, 5, 0),
    MODEL("NVIDIA B200", true, 5, 1000),
    MODEL("NVIDIA GeForce RTX 3090", false, 4, 350),
    MODEL("NVIDIA GeForce RTX 4090", false, 4, 450),
    MODEL("NVIDIA GeForce RTX 5090", false, 5, 575),
    MODEL("NVIDIA RTX A5000", false, 4, 230),
    MODEL("NVIDIA RTX A6000", false, 4, 300),
    MODEL("NVIDIA RTX 6000 Ada Generation", false, 4, 300),
    MODEL("NVIDIA RTX PRO 6000 Blackwell Server Edition", true, 5, 600),
};

const struct sim_model *sim_find_model(const char *name)
{
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (strcmp(models[i].name, name) == 0)
            return &models[i];
    return NULL;
}
