/* How a kernel that torch's overrides do not replace is launched, or refused: what the driver and the runtime have in common. */
#ifndef ACCELERATOR_SIM_LAUNCH_H
#define ACCELERATOR_SIM_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sim_launch {
    uint32_t grid[3], block[3];
    size_t shared_memory;
    bool is_cooperative, has_clusters;
};

/* Whether the grid and the block are within the limits of all GPUs. */
static inline bool is_valid_shape(const struct sim_launch *launch)
{
    static const uint32_t most[2][3] = {{INT32_MAX, 65535, 65535}, {1024, 1024, 64}};
    const uint32_t *block = launch->block;
    for (int i = 0; i < 3; i++)
        if (launch->grid[i] == 0 || launch->grid[i] > most[0][i] || block[i] == 0 || block[i] > most[1][i])
            return false;
    return block[0] * block[1] * block[2] <= most[1][0];
}

/* cudaLaunchAttribute and CUlaunchAttribute */
struct launch_attribute {
    int id;
    char padding[4];
    union {
        int cooperative;
        unsigned cluster[3];
        char bytes[64];
    } value;
};
_Static_assert(sizeof(struct launch_attribute) == 72, "as in CUDA's ABI");

static inline void read_launch_attributes(struct sim_launch *launch, const struct launch_attribute *attributes, unsigned count)
{
    enum { COOPERATIVE = 2, CLUSTER = 4 };
    for (unsigned i = 0; i < count; i++) {
        const struct launch_attribute *attribute = &attributes[i];
        const unsigned *cluster = attribute->value.cluster;
        launch->is_cooperative |= attribute->id == COOPERATIVE && attribute->value.cooperative;
        launch->has_clusters |= attribute->id == CLUSTER && (uint64_t)cluster[0] * cluster[1] * cluster[2] > 1;
    }
}

#endif
