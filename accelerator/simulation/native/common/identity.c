/* What identifies a simulated GPU: its UUID, PCI address, name and size. */
#include "config.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

void sim_display_name(int gpu, int instance, char *text, size_t size)
{
    snprintf(text, size, "%s%s", sim_config()->gpus[gpu].name, instance == SIM_WHOLE_GPU ? "" : " MIG 1g");
}
