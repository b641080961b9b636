/* CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, as the driver reads them.
 *
 * The CUDA guide leaves some of the grammar open. As with the driver of CUDA 13.0, the first invalid entry ends the list, a
 * repeat before it is an error, and UUIDs are compared digit by digit. GPUs with MIG on follow PyTorch's own parser.
 * Queries have the same grammar in Python (_machine/visibility.py). */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { UUID_DIGITS = 32 };

struct list {
    struct visible_device *devices;
    int count;
};

/* The entries of a variable, as pointers into `text`. */
struct entries {
    char *text;
    char **items;
    int count;
};

static struct entries split(const char *value)
{
    struct entries entries = {.text = strdup(value), .count = 1};
    for (const char *c = value; *c; c++)
        entries.count += *c == ',';
    entries.items = calloc((size_t)entries.count, sizeof *entries.items);

    char *rest = entries.text;
    for (int i = 0; i < entries.count; i++)
        entries.items[i] = strsep(&rest, ",");
    return entries;
}

static void free_entries(struct entries *entries)
{
    free(entries->items);
    free(entries->text);
}

/* Fills in the physical GPUs in CUDA's order. */
static int cuda_order(int order[SIM_MAX_GPUS])
{
    const struct sim_config *config = sim_config();
    const char *wanted = getenv("CUDA_DEVICE_ORDER");
    bool fastest_first = !wanted || strcmp(wanted, "PCI_BUS_ID") != 0;

    for (int i = 0; i < config->gpu_count; i++) {
        int place = i;
        while (fastest_first && place > 0 && config->gpus[order[place - 1]].speed < config->gpus[i].speed) {
            order[place] = order[place - 1];
            place--;
        }
        order[place] = i;
    }
    return config->gpu_count;
}

/* Finds the device that a GPU is: its first instance where MIG is on. Returns false if there is MIG but no instance. */
static bool find_by_gpu(int gpu, struct visible_device *device)
{
    int instances = sim_config()->gpus[gpu].instances;
    *device = (struct visible_device){gpu, instances == SIM_MIG_OFF ? SIM_WHOLE_GPU : 0};
    return instances != 0;
}

static bool append_gpu(struct list *list, int gpu)
{
    bool is_found = find_by_gpu(gpu, &list->devices[list->count]);
    list->count += is_found;
    return is_found;
}

static bool has_prefix(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* "MIG-<GPU UUID>/<GPU instance>/<compute instance>", the form before driver R470. */
static bool is_old_instance_name(const char *entry, int gpu, int instance)
{
    char uuid[SIM_UUID_SIZE], name[SIM_UUID_SIZE + 32];
    sim_uuid(gpu, SIM_WHOLE_GPU, NULL, uuid);
    snprintf(name, sizeof name, "MIG-%s/%d/0", uuid, instance + 1);
    return strcmp(entry, name) == 0;
}

/* Writes the digits of a UUID or its beginning in lower case. Dashes may be anywhere, and what follows 32 digits is ignored.
 * Returns false if another character is among them, or if nothing follows the prefix. */
static bool read_uuid(const char *entry, char digits[UUID_DIGITS + 1])
{
    int count = 0;
    const char *c = entry + strlen("GPU-");
    bool is_uuid = *c != '\0';
    for (; is_uuid && *c && count < UUID_DIGITS; c++) {
        char lower = *c >= 'A' && *c <= 'F' ? (char)(*c - 'A' + 'a') : *c;
        if ((lower >= '0' && lower <= '9') || (lower >= 'a' && lower <= 'f'))
            digits[count++] = lower;
        else
            is_uuid = lower == '-';
    }
    digits[count] = '\0';
    return is_uuid;
}

static bool names(const char *entry, int gpu, int instance)
{
    char uuid[SIM_UUID_SIZE], digits[UUID_DIGITS + 1], wanted[UUID_DIGITS + 1];
    sim_uuid(gpu, instance, NULL, uuid);
    if (instance != SIM_WHOLE_GPU && is_old_instance_name(entry, gpu, instance))
        return true;
    return read_uuid(entry, wanted) && read_uuid(uuid, digits) && has_prefix(digits, wanted);
}

static bool is_uuid_entry(const char *entry)
{
    return has_prefix(entry, "GPU-") || has_prefix(entry, "MIG-");
}

/* Finds the only device whose UUID begins with the entry: with "MIG-", an instance if its GPU has any. */
static bool find_by_uuid(const char *entry, struct visible_device *device)
{
    int matches = 0;
    for (int gpu = 0; gpu < sim_config()->gpu_count; gpu++) {
        bool mig = entry[0] == 'M' && sim_config()->gpus[gpu].instances != SIM_MIG_OFF;
        int first = mig ? 0 : SIM_WHOLE_GPU;
        int last = mig ? sim_config()->gpus[gpu].instances - 1 : SIM_WHOLE_GPU;
        for (int instance = first; instance <= last; instance++)
            if (names(entry, gpu, instance)) {
                *device = (struct visible_device){gpu, instance};
                matches++;
            }
    }
    return matches == 1;
}

static bool contains(const struct list *list, struct visible_device device)
{
    for (int i = 0; i < list->count; i++)
        if (list->devices[i].gpu == device.gpu && list->devices[i].instance == device.instance)
            return true;
    return false;
}

/* A list of UUIDs ends at the first entry of another type. */
static bool read_uuids(const struct entries *entries, struct list *list)
{
    struct visible_device matched[SIM_MAX_GPUS * SIM_MAX_INSTANCES];
    struct list named = {matched, 0};
    for (int i = 0; i < entries->count && is_uuid_entry(entries->items[i]); i++) {
        struct visible_device device;
        if (!find_by_uuid(entries->items[i], &device))
            break;
        if (device.instance == SIM_WHOLE_GPU && !find_by_gpu(device.gpu, &device))
            break;
        if (contains(&named, device))
            return false;
        named.devices[named.count++] = device;
        if (list->count < SIM_MAX_GPUS)
            list->devices[list->count++] = device;
    }
    return true;
}

/* Reads like strtol, but skips only ASCII blanks. Returns -1 for an entry that ends the list. */
static long read_ordinal(const char *entry)
{
    entry += strspn(entry, " \t\n\v\f\r");
    bool negative = *entry == '-';
    if (*entry == '-' || *entry == '+')
        entry++;
    if (*entry < '0' || *entry > '9')
        return -1;

    long value = 0;
    for (; *entry >= '0' && *entry <= '9'; entry++)
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *entry - '0', &value))
            value = LONG_MAX;
    return negative && value != 0 ? -1 : value;
}

/* A list of ordinals ends at the first entry that is not the ordinal of a GPU. */
static bool read_ordinals(const struct entries *entries, const int *order, int gpu_count, struct list *list)
{
    bool is_listed[SIM_MAX_GPUS] = {false};
    for (int i = 0; i < entries->count; i++) {
        long ordinal = read_ordinal(entries->items[i]);
        if (ordinal < 0 || ordinal >= gpu_count)
            break;
        if (is_listed[ordinal])
            return false;
        is_listed[ordinal] = true;
        if (!append_gpu(list, order[ordinal]))
            break;
    }
    return true;
}

/* Returns false if a device is repeated. */
static bool read_variable(const char *value, const int *order, int gpu_count, struct list *list)
{
    struct entries entries = split(value);
    bool is_valid = is_uuid_entry(value) ? read_uuids(&entries, list) : read_ordinals(&entries, order, gpu_count, list);
    free_entries(&entries);
    return is_valid;
}

/* A process that has any instance enumerates one instance and nothing else. */
static void apply_mig_rule(struct list *list)
{
    for (int i = 0; i < list->count; i++)
        if (list->devices[i].instance != SIM_WHOLE_GPU) {
            list->devices[0] = list->devices[i];
            list->count = 1;
        }
}

int visible_devices(struct visible_device visible[SIM_MAX_GPUS])
{
    int order[SIM_MAX_GPUS];
    int gpu_count = cuda_order(order);
    struct list list = {visible, 0};

    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    if (value && !read_variable(value, order, gpu_count, &list))
        return REPEATED_DEVICE;
    if (!value)
        for (int i = 0; i < gpu_count; i++)
            append_gpu(&list, order[i]);
    apply_mig_rule(&list);
    return list.count;
}
