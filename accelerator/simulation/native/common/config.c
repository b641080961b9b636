/* Reads the variables of interface/settings.h. */
#include "config.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(SIM_MAX_NUMA_NODES <= 8 * sizeof((struct sim_gpu){0}.nodes), "a bit for each node");

_Atomic int sim_error_rules = -1;

static struct sim_config config;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *read_setting(const char *variable, const char *fallback)
{
    const char *value = getenv(variable);
    return value && *value ? value : fallback;
}

#define READ(setting) read_setting(SETTING_##setting, SETTING_##setting##_DEFAULT)

/* Copies the entry at *cursor, up to `separator`, and moves the cursor to the next one. The last entry repeats. */
static void next_repeating(const char **cursor, char separator, char *entry, size_t size)
{
    size_t length = (size_t)(strchrnul(*cursor, separator) - *cursor);
    snprintf(entry, size, "%.*s", (int)length, *cursor);
    if ((*cursor)[length] != '\0')
        *cursor += length + 1;
}

static int bounded(long value, int low, int high)
{
    return value < low ? low : value > high ? high : (int)value;
}

static void read_gpus(void)
{
    const char *names = READ(NAMES);
    const char *sizes = READ(MEMORY);
    const char *reserves = READ(RESERVES);
    const char *capabilities = READ(CAPABILITIES);
    const char *speeds = READ(SPEEDS);
    const char *mig = READ(MIG);
    const char *links = READ(NVLINK);
    const char *nodes = READ(NUMA);
    const char *reasons = READ(CLOCK_REASONS);

    config.gpu_count = bounded(atol(READ(GPUS)), 0, SIM_MAX_GPUS);
    for (int i = 0; i < config.gpu_count; i++) {
        struct sim_gpu *gpu = &config.gpus[i];
        char entry[32];

        next_repeating(&names, ';', gpu->name, sizeof gpu->name);
        next_repeating(&sizes, ',', entry, sizeof entry);
        gpu->memory = strtoull(entry, NULL, 10);
        next_repeating(&reserves, ',', entry, sizeof entry);
        gpu->reserve = strtoull(entry, NULL, 10);
        next_repeating(&capabilities, ',', entry, sizeof entry);
        sscanf(entry, "%d.%d", &gpu->major, &gpu->minor);
        next_repeating(&speeds, ',', entry, sizeof entry);
        gpu->speed = atoi(entry);
        next_repeating(&mig, ',', entry, sizeof entry);
        gpu->instances = strcmp(entry, "off") == 0 ? SIM_MIG_OFF : bounded(atol(entry), 0, SIM_MAX_INSTANCES);
        next_repeating(&links, ',', entry, sizeof entry);
        gpu->link_group = strcmp(entry, "off") == 0 ? SIM_NO_LINKS : atoi(entry);
        next_repeating(&nodes, ',', entry, sizeof entry);
        gpu->nodes = strtoull(entry, NULL, 10);
        next_repeating(&reasons, ',', entry, sizeof entry);
        gpu->clock_reasons = (unsigned)strtoul(entry, NULL, 10);
    }
}

/* One rule is "function:code" or "function@gpu:code"; a function that ends in '*' is a prefix. */
static bool parse_error_rule(char *text, struct sim_error_rule *rule)
{
    char *colon = strrchr(text, ':');
    if (!colon)
        return false;
    *colon = '\0';
    rule->code = atoi(colon + 1);

    char *at = strchr(text, '@');
    rule->gpu = at ? atoi(at + 1) : SIM_NO_GPU;
    if (at)
        *at = '\0';

    size_t length = strlen(text);
    rule->is_prefix = length > 0 && text[length - 1] == '*';
    if (rule->is_prefix)
        text[length - 1] = '\0';
    snprintf(rule->function, sizeof rule->function, "%.*s", (int)sizeof rule->function - 1, text);
    return true;
}

static void read_error_rules(void)
{
    char *text = strdup(READ(ERRORS));
    char *rest = text;
    int count = 0;
    for (char *entry; count < SIM_MAX_ERROR_RULES && (entry = strsep(&rest, ","));)
        count += parse_error_rule(entry, &config.error_rules[count]);
    free(text);
    sim_error_rules = count;
}

static int read_delay(const char *function)
{
    const char *entry = strstr(READ(INIT_DELAY), function);
    return entry && entry[strlen(function)] == ':' ? atoi(entry + strlen(function) + 1) : 0;
}

static void read_environment(void)
{
    int major = 0, minor = 0;
    sscanf(READ(DRIVER_CUDA), "%d.%d", &major, &minor);
    config.node = atoi(READ(NODE));
    config.cuda_version = major * 1000 + minor * 10;
    snprintf(config.driver_version, sizeof config.driver_version, "%s", READ(DRIVER_VERSION));
    snprintf(config.log_path, sizeof config.log_path, "%s", READ(LOG));
    config.cu_init_delay = read_delay("cuInit");
    config.nvml_init_delay = read_delay("nvmlInit");
    config.fills_with_nan = strcmp(READ(FILL), "nan") == 0;
    config.is_rehearsed = *READ(REHEARSE) != 0;
    read_gpus();
    read_error_rules();
}

const struct sim_config *sim_config(void)
{
    pthread_once(&once, read_environment);
    return &config;
}
