/* The CUDA runtime: images, which are fat binaries of programs and what the driver loads as a module, and the PTX in them. */
#include "images.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"

enum { WRAPPER_MAGIC = 0x466243b1, FAT_BINARY_MAGIC = 0xba55ed50, PRELINKED = 2, KIND_PTX = 1, KIND_CODE = 2 };
enum { FLAG_LZ4 = 0x2000, FLAG_ZSTD = 0x8000 };

struct wrapper {
    uint32_t magic, version;
    const void *data;
    const void *const *prelinked; /* of version 2: the fat binaries that were linked, NULL at the end */
};

struct fat_binary {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
};

struct entry {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size;
    uint32_t compressed_size, options;
    uint16_t minor, major;
    uint32_t architecture, name_offset, name_size;
    uint64_t flags, zero, text_size;
} __attribute__((packed));
_Static_assert(sizeof(struct entry) == 64, "as in fat binaries");

RENEWED_LOCK(lock)

struct image *new_image(const void *data)
{
    struct image *image = calloc(1, sizeof *image);
    const struct wrapper *wrapper = data;
    if (!image)
        return NULL;
    image->data = data;
    if (data && wrapper->magic == WRAPPER_MAGIC) {
        image->data = wrapper->data;
        image->prelinked = wrapper->version == PRELINKED ? wrapper->prelinked : NULL;
    }
    return image;
}

/* What the entries of a fat binary are: the best PTX, and the architectures of its machine code. */
struct contents {
    struct part best;
    int architecture; /* of the best, or 0 */
    char code[200];
};

/* The newest that is not newer than the GPU; else the oldest, since wheels ship PTX for their newest architecture only. */
static bool is_better(int candidate, int best, int wanted)
{
    if (best == 0)
        return true;
    return candidate <= wanted ? best > wanted || candidate > best : best > wanted && candidate < best;
}

static void add_code(struct contents *contents, uint32_t architecture)
{
    char text[16];
    size_t length = strlen(contents->code);
    snprintf(text, sizeof text, "%u.%u", architecture / 10, architecture % 10);
    if (!strstr(contents->code, text))
        snprintf(contents->code + length, sizeof contents->code - length, "%s%s", length ? ", " : "", text);
}

static void look_into(const char *data, int wanted, struct contents *contents)
{
    const struct fat_binary *binary = (const struct fat_binary *)data;
    if (binary->magic != FAT_BINARY_MAGIC)
        return;
    const char *at = data + binary->header_size, *end = at + binary->size;
    while (at + sizeof(struct entry) <= end) {
        struct entry entry;
        memcpy(&entry, at, sizeof entry);
        if (entry.kind == KIND_CODE)
            add_code(contents, entry.architecture);
        if (entry.kind == KIND_PTX && is_better((int)entry.architecture, contents->architecture, wanted)) {
            contents->architecture = (int)entry.architecture;
            contents->best = (struct part){
                .data = at + entry.header_size,
                .size = entry.compressed_size ? entry.compressed_size : entry.size,
                .text_size = entry.text_size,
                .compression = entry.flags & FLAG_LZ4 ? PART_LZ4 : entry.flags & FLAG_ZSTD ? PART_ZSTD : PART_PLAIN,
            };
        }
        at += entry.header_size + entry.size;
    }
}

static void add_part(struct program *program, const struct contents *contents)
{
    struct part *parts = contents->architecture ? realloc(program->parts, (program->part_count + 1) * sizeof *parts) : NULL;
    if (!parts)
        return;
    program->parts = parts;
    program->parts[program->part_count++] = contents->best;
}

/* Adds the modules of a text: one, or those of cuLinkComplete. */
static void add_linked(struct program *program, const char *text)
{
    struct contents contents = {.architecture = program->architecture, .best.compression = PART_PLAIN};
    for (const char *end; *text; text = *end ? end + strlen(SIM_MODULE_SEPARATOR) : end) {
        end = strstr(text, SIM_MODULE_SEPARATOR);
        end = end ? end : text + strlen(text);
        contents.best.data = text;
        contents.best.size = (uint64_t)(end - text);
        add_part(program, &contents);
    }
}

static void explain(struct program *program, const char *code)
{
    char text[800] = "";
    int wanted = program->architecture;
    if (*code)
        snprintf(text, sizeof text,
                 "simulated GPUs run kernels from PTX, and its program has machine code alone (%s); compile it with -gencode"
                 " arch=compute_%d,code=compute_%d (TORCH_CUDA_ARCH_LIST=%d.%d+PTX), " REMEDY,
                 code, wanted, wanted, wanted / 10, wanted % 10);
    program->problem = strdup(text);
}

/* Two streams of 64 bits: of contents, not against attackers, who cannot write into the cache anyway. */
void add_to_key(uint64_t key[2], const void *data, size_t size)
{
    const char *at = data;
    key[0] ^= size, key[1] += size;
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, at + i, size - i < sizeof word ? size - i : sizeof word);
        key[0] = (key[0] ^ word) * 0x9e3779b97f4a7c15;
        key[0] ^= key[0] >> 32;
        key[1] = (key[1] + word) * 0xc2b2ae3d27d4eb4f;
        key[1] ^= key[1] >> 29;
    }
}

static void find_parts(struct program *program, const struct image *image)
{
    const char *data = image->data;
    struct contents contents = {0};
    look_into(data, program->architecture, &contents);
    char code[sizeof contents.code];
    snprintf(code, sizeof code, "%s", contents.code);
    if (image->prelinked) {
        for (const void *const *linked = image->prelinked; *linked; linked++) {
            contents = (struct contents){0};
            look_into(*linked, program->architecture, &contents);
            add_part(program, &contents);
        }
    } else if (((const struct fat_binary *)data)->magic == FAT_BINARY_MAGIC) {
        add_part(program, &contents);
    } else if (memcmp(data, "\177ELF", 4) == 0) {
        program->problem = strdup("simulated GPUs run kernels from PTX, and its module is machine code, as ptxas, nvJitLink and"
                                  " NVRTC make it; load its PTX (nvrtcGetPTX), " REMEDY);
    } else if (strstr(data, ".version")) {
        add_linked(program, data);
    }
    if (program->part_count == 0 && !program->problem)
        explain(program, code);
    for (size_t i = 0; i < program->part_count; i++)
        add_to_key(program->key, program->parts[i].data, program->parts[i].size);
}

struct program *find_program(struct image *image, int architecture)
{
    pthread_mutex_lock(&lock);
    struct program *program = image->programs;
    while (program && program->architecture != architecture)
        program = program->next;
    if (!program && (program = calloc(1, sizeof *program))) {
        program->architecture = architecture;
        pthread_mutex_init(&program->lock, NULL);
        find_parts(program, image);
        program->next = image->programs;
        image->programs = program;
    }
    pthread_mutex_unlock(&lock);
    return program;
}
