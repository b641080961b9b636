/* Health: ECC errors, remapped rows, the recommended action, and the events of a GPU. Without faults all counters are 0. */
#include "nvml.h"

#include <stdlib.h>

#include "common/clock.h"

enum { CORRECTED, UNCORRECTED, ERROR_TYPES };
enum { VOLATILE, AGGREGATE, COUNTERS };

static struct gpu_health no_faults;

const struct gpu_health *nvml_health(int gpu)
{
    struct fault_table *table = used_faults;
    return table ? &table->gpus[gpu] : &no_faults;
}

/* Every GPU has ECC. */
SIM_EXPORT int nvmlDeviceGetEccMode(nvml_handle handle, unsigned *current, unsigned *pending)
{
    NVML_ENTER_GPU(current && pending);
    *current = *pending = 1;
    return NVML_OK;
}

NVML_FIGURE(nvmlDeviceGetDefaultEccMode, unsigned, 1)

static uint64_t count_errors(int gpu, unsigned type, unsigned counter)
{
    const struct gpu_health *health = nvml_health(gpu);
    if (type == CORRECTED)
        return counter == VOLATILE ? health->volatile_corrected : health->aggregate_corrected;
    return counter == VOLATILE ? health->volatile_errors : health->aggregate_errors;
}

SIM_EXPORT int nvmlDeviceGetTotalEccErrors(nvml_handle handle, unsigned type, unsigned counter, unsigned long long *count)
{
    NVML_ENTER_GPU(count && type < ERROR_TYPES && counter < COUNTERS);
    *count = count_errors(device.gpu, type, counter);
    return NVML_OK;
}

/* All errors are in the memory of the device. */
SIM_EXPORT int nvmlDeviceGetMemoryErrorCounter(nvml_handle handle, unsigned type, unsigned counter, unsigned location,
                                               unsigned long long *count)
{
    enum { DEVICE_MEMORY = 2, LOCATIONS = 8 };
    struct nvml_device device;
    const bool is_valid = count && type < ERROR_TYPES && counter < COUNTERS && location < LOCATIONS;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, is_valid, &device));
    *count = location == DEVICE_MEMORY ? count_errors(device.gpu, type, counter) : 0;
    return NVML_OK;
}

struct detailed_errors {
    unsigned long long l1_cache, l2_cache, device_memory, register_file;
};

SIM_EXPORT int nvmlDeviceGetDetailedEccErrors(nvml_handle handle, unsigned type, unsigned counter, struct detailed_errors *errors)
{
    NVML_ENTER_GPU(errors && type < ERROR_TYPES && counter < COUNTERS);
    *errors = (struct detailed_errors){.device_memory = count_errors(device.gpu, type, counter)};
    return NVML_OK;
}

struct remapper_histogram {
    unsigned all, most, some, few, none; /* banks by how many more of their rows can be remapped */
};

SIM_EXPORT int nvmlDeviceGetRowRemapperHistogram(nvml_handle handle, struct remapper_histogram *histogram)
{
    NVML_ENTER_GPU(histogram);
    const unsigned banks = nvml_model(&device)->banks;
    RETURN_UNLESS(banks != 0, NVML_NOT_SUPPORTED);
    const unsigned remapped = nvml_health(device.gpu)->remapped, used = remapped < banks ? remapped : banks;
    *histogram = (struct remapper_histogram){.all = banks - used, .most = used};
    return NVML_OK;
}

/* NVML documents that the rows are not supported while the GPU has MIG instances. */
static bool has_row_counts(int gpu)
{
    return sim_config()->gpus[gpu].instances <= 0;
}

SIM_EXPORT int nvmlDeviceGetRemappedRows(nvml_handle handle, unsigned *correctable, unsigned *uncorrectable,
                                         unsigned *is_pending, unsigned *has_failed)
{
    struct nvml_device device;
    const bool is_valid = correctable && uncorrectable && is_pending && has_failed;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, is_valid, &device));
    RETURN_UNLESS(has_row_counts(device.gpu), NVML_NOT_SUPPORTED);
    const struct gpu_health *health = nvml_health(device.gpu);
    *correctable = 0;
    *uncorrectable = health->remapped;
    *is_pending = health->is_remap_pending;
    *has_failed = health->has_remap_failed;
    return NVML_OK;
}

bool nvml_health_field(int gpu, unsigned field, uint64_t *value, bool *is_long)
{
    enum { ECC_CURRENT = 1, ECC_PENDING, CORRECTED_VOLATILE, UNCORRECTED_VOLATILE, CORRECTED_AGGREGATE, UNCORRECTED_AGGREGATE };
    enum { REMAPPED_CORRECTABLE = 142, REMAPPED_UNCORRECTABLE, REMAPPED_PENDING, REMAPPED_FAILURE, RECOVERY_ACTION = 230 };
    const struct gpu_health *health = nvml_health(gpu);
    *is_long = field != RECOVERY_ACTION;
    switch (field) {
    case ECC_CURRENT:
    case ECC_PENDING:
        *value = 1;
        return true;
    case CORRECTED_VOLATILE:
    case UNCORRECTED_VOLATILE:
    case CORRECTED_AGGREGATE:
    case UNCORRECTED_AGGREGATE:
        *value = count_errors(gpu, (field - CORRECTED_VOLATILE) % ERROR_TYPES, (field - CORRECTED_VOLATILE) / ERROR_TYPES);
        return true;
    case REMAPPED_CORRECTABLE:
        *value = 0;
        return has_row_counts(gpu);
    case REMAPPED_UNCORRECTABLE:
        *value = health->remapped;
        return has_row_counts(gpu);
    case REMAPPED_PENDING:
        *value = health->is_remap_pending;
        return has_row_counts(gpu);
    case REMAPPED_FAILURE:
        *value = health->has_remap_failed;
        return has_row_counts(gpu);
    case RECOVERY_ACTION:
        *value = health->recovery;
        return true;
    default:
        return false;
    }
}

/* ---- Events. ---- */

/* Types of events. Those of performance states and clocks do not occur, because both are constant. */
enum {
    SINGLE_BIT_EVENT = 1,
    DOUBLE_BIT_EVENT = 2,
    STATE_EVENT = 4,
    XID_EVENT = 8,
    CLOCK_EVENT = 16,
    ALL_EVENTS = SINGLE_BIT_EVENT | DOUBLE_BIT_EVENT | STATE_EVENT | XID_EVENT | CLOCK_EVENT,
};
enum { DOUBLE_BIT_XID = 48, SINGLE_BIT_XID = 92 };

struct event_set {
    uint32_t next; /* the number of the first event that it has not reported */
    bool has_begun;
    unsigned long long types[SIM_MAX_GPUS];
};

struct event_data {
    nvml_handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct event_data) == 32, "NVML's layout");

SIM_EXPORT int nvmlEventSetCreate(struct event_set **set)
{
    enum { OUT_OF_MEMORY = 20 };
    RETURN_IF_ERROR(nvml_enter(__func__, set));
    *set = calloc(1, sizeof **set);
    return *set ? NVML_OK : OUT_OF_MEMORY;
}

SIM_EXPORT int nvmlEventSetFree(struct event_set *set)
{
    RETURN_IF_ERROR(nvml_enter(__func__, set));
    free(set);
    return NVML_OK;
}

NVML_FIGURE(nvmlDeviceGetSupportedEventTypes, unsigned long long, ALL_EVENTS)

SIM_EXPORT int nvmlDeviceRegisterEvents(nvml_handle handle, unsigned long long types, struct event_set *set)
{
    NVML_ENTER_GPU(set);
    RETURN_UNLESS(!(types & ~(unsigned long long)ALL_EVENTS), NVML_NOT_SUPPORTED);
    set->types[device.gpu] |= types;
    struct fault_table *table = used_faults;
    if (!set->has_begun && table)
        set->next = table->event_count;
    set->has_begun = true;
    return NVML_OK;
}

/* Takes the next event of the set's GPUs. */
static bool take_event(struct event_set *set, struct event_data *event)
{
    struct fault_table *table = used_faults;
    while (table && set->next != table->event_count) {
        const uint32_t count = table->event_count;
        if (count - set->next > SIM_MAX_EVENTS)
            set->next = count - SIM_MAX_EVENTS; /* the earlier ones are overwritten */
        const uint64_t found = table->events[set->next % SIM_MAX_EVENTS];
        const int gpu = (int)(found >> 16 & UINT16_MAX), xid = (int)(found & UINT16_MAX);
        const int32_t ahead = (int32_t)((uint32_t)(found >> 32) - 1 - set->next);
        if (ahead < 0) /* the event is written just now */
            return false;
        if (ahead > 0) /* it was overwritten just now, and the count is higher */
            continue;
        set->next++;
        const unsigned long long type = set->types[gpu] & XID_EVENT ? XID_EVENT
                                        : xid == DOUBLE_BIT_XID     ? DOUBLE_BIT_EVENT
                                        : xid == SINGLE_BIT_XID     ? SINGLE_BIT_EVENT
                                                                    : 0;
        if (!(set->types[gpu] & type))
            continue;
        *event = (struct event_data){nvml_encode(gpu, SIM_WHOLE_GPU), type, type == XID_EVENT ? (unsigned)xid : 0, ~0u, ~0u};
        return true;
    }
    return false;
}

SIM_EXPORT int nvmlEventSetWait_v2(struct event_set *set, struct event_data *event, unsigned milliseconds)
{
    enum { TIMEOUT = 10, STEP_MS = 10 };
    RETURN_IF_ERROR(nvml_enter(__func__, set && event));
    const int64_t end = now() + (int64_t)milliseconds * MILLISECOND;
    for (;;) {
        bool is_lost = false;
        for (int gpu = 0; gpu < sim_config()->gpu_count; gpu++)
            if (set->types[gpu])
                is_lost |= nvml_is_lost(gpu);
        if (take_event(set, event))
            return NVML_OK;
        RETURN_UNLESS(!is_lost, NVML_GPU_IS_LOST);
        const int64_t time = now();
        if (time >= end)
            return TIMEOUT;
        sleep_until(time + STEP_MS * MILLISECOND < end ? time + STEP_MS * MILLISECOND : end);
    }
}

SIM_EXPORT int nvmlEventSetWait(struct event_set *set, struct event_data *event, unsigned milliseconds)
{
    return nvmlEventSetWait_v2(set, event, milliseconds);
}
