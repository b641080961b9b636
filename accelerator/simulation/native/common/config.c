#include "config.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ERROR_RULES = 64, FUNCTION_NAME_SIZE = 80 };

struct error_rule {
    char function[FUNCTION_NAME_SIZE];
    bool is_prefix;
    int gpu; /* SIM_NO_GPU: any */
    int code;
};

_Atomic int sim_error_rules = -1;

static struct sim_config config;
static struct error_rule error_rules[MAX_ERROR_RULES];
static int cu_init_delay, nvml_init_delay;
static char log_path[4096];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *variable(const char *name, const char *fallback)
{
    char full[64];
    snprintf(full, sizeof full, "ACCELERATOR_SIM_%s", name);
    const char *value = getenv(full);
    return value && *value ? value : fallback;
}

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
    const char *names = variable("NAMES", "Simulated GPU");
    const char *sizes = variable("MEMORY", "8589934592");
    const char *capabilities = variable("CAPABILITIES", "9.0");
    const char *speeds = variable("SPEEDS", "0");
    const char *mig = variable("MIG", "off");
    const char *links = variable("NVLINK", "off");
    const char *nodes = variable("NUMA", "1");
    const char *reasons = variable("CLOCK_REASONS", "0");

    config.gpu_count = bounded(atol(variable("GPUS", "1")), 0, SIM_MAX_GPUS);
    for (int i = 0; i < config.gpu_count; i++) {
        struct sim_gpu *gpu = &config.gpus[i];
        char entry[32];

        next_repeating(&names, ';', gpu->name, sizeof gpu->name);
        next_repeating(&sizes, ',', entry, sizeof entry);
        gpu->memory = strtoull(entry, NULL, 10);
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
static bool parse_error_rule(char *text, struct error_rule *rule)
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
    snprintf(rule->function, sizeof rule->function, "%.*s", FUNCTION_NAME_SIZE - 1, text);
    return true;
}

static void read_error_rules(void)
{
    char *text = strdup(variable("ERRORS", ""));
    char *rest = text;
    int count = 0;
    for (char *entry; count < MAX_ERROR_RULES && (entry = strsep(&rest, ","));)
        count += parse_error_rule(entry, &error_rules[count]);
    free(text);
    sim_error_rules = count;
}

static int read_delay(const char *function)
{
    const char *entry = strstr(variable("INIT_DELAY", ""), function);
    return entry && entry[strlen(function)] == ':' ? atoi(entry + strlen(function) + 1) : 0;
}

static void read_environment(void)
{
    int major = 13, minor = 2;
    sscanf(variable("DRIVER_CUDA", "13.2"), "%d.%d", &major, &minor);
    config.node = atoi(variable("NODE", "0"));
    config.cuda_version = major * 1000 + minor * 10;
    snprintf(config.driver_version, sizeof config.driver_version, "%s", variable("DRIVER_VERSION", "590.44.01"));
    snprintf(log_path, sizeof log_path, "%s", variable("LOG", ""));
    cu_init_delay = read_delay("cuInit");
    nvml_init_delay = read_delay("nvmlInit");
    config.fills_with_nan = strcmp(variable("FILL", "zero"), "nan") == 0;
    read_gpus();
    read_error_rules();
}

const struct sim_config *sim_config(void)
{
    pthread_once(&once, read_environment);
    return &config;
}

/* splitmix64: spreads neighboring numbers over all bits. */
static uint64_t scatter(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void sim_uuid(int gpu, int instance, unsigned char bytes[16], char text[SIM_UUID_SIZE])
{
    /* The first byte differs between GPUs, so that short prefixes can be unique. GPUs 16 apart share the first digit, so
     * that prefixes can also be ambiguous. */
    static const char first_digits[] = {7, 12, 2, 9, 14, 4, 0, 11, 5, 15, 3, 8, 13, 1, 10, 6};
    unsigned char id[16];
    uint64_t seed = (uint64_t)gpu * (SIM_MAX_INSTANCES + 1) + (uint64_t)(instance + 1);
    seed += (uint64_t)sim_config()->node << 32;
    uint64_t halves[2] = {scatter(2 * seed), scatter(2 * seed + 1)};

    memcpy(id, halves, sizeof id);
    id[0] = (unsigned char)(first_digits[(gpu + instance + 1) & 15] << 4 | ((gpu >> 4 ^ 9) & 15));
    id[6] = (id[6] & 0x0f) | 0x40;
    id[8] = (id[8] & 0x3f) | 0x80;
    if (bytes)
        memcpy(bytes, id, sizeof id);
    if (text)
        snprintf(text, SIM_UUID_SIZE, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                 instance == SIM_WHOLE_GPU ? "GPU" : "MIG", id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7],
                 id[8], id[9], id[10], id[11], id[12], id[13], id[14], id[15]);
}

void sim_pci_address(int gpu, unsigned *domain, unsigned *bus)
{
    enum { GPUS_PER_DOMAIN = 250 };
    *domain = (unsigned)gpu / GPUS_PER_DOMAIN;
    *bus = 1 + (unsigned)gpu % GPUS_PER_DOMAIN;
}

uint64_t sim_memory_size(int gpu, int instance)
{
    if (gpu == SIM_HOST)
        return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t memory = sim_config()->gpus[gpu].memory;
    return instance == SIM_WHOLE_GPU ? memory : memory / 8;
}

void sim_display_name(int gpu, int instance, char *text, size_t size)
{
    snprintf(text, size, "%s%s", sim_config()->gpus[gpu].name, instance == SIM_WHOLE_GPU ? "" : " MIG 1g");
}

static bool rule_applies(const struct error_rule *rule, const char *function, int physical_gpu)
{
    if (rule->gpu != SIM_NO_GPU && rule->gpu != physical_gpu)
        return false;
    return rule->is_prefix ? strncmp(function, rule->function, strlen(rule->function)) == 0
                           : strcmp(function, rule->function) == 0;
}

int sim_find_injected(const char *function, int physical_gpu)
{
    sim_config();
    for (int i = 0; i < sim_error_rules; i++)
        if (rule_applies(&error_rules[i], function, physical_gpu))
            return error_rules[i].code;
    return 0;
}

void sim_init_delay(const char *function)
{
    sim_config();
    int milliseconds = strcmp(function, "cuInit") == 0 ? cu_init_delay : nvml_init_delay;
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (milliseconds > 0 && nanosleep(&rest, &rest) != 0)
        ;
}

void sim_log(const char *format, ...)
{
    sim_config();
    if (!*log_path)
        return;
    int file = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0)
        return;

    char line[128];
    int length = snprintf(line, sizeof line, "%d ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    size_t space = sizeof line - (size_t)length - 1;
    int written = vsnprintf(line + length, space, format, arguments);
    va_end(arguments);
    /* vsnprintf also counts the characters that did not fit. */
    length += written < 0 ? 0 : (size_t)written < space ? written : (int)space - 1;
    line[length++] = '\n';
    if (write(file, line, (size_t)length) != length) {
        /* A failing log must not disturb the program; the test that reads the log will fail. */
    }
    close(file);
}
