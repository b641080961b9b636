/* The CUDA runtime: images, which are fat binaries of programs and what the driver loads as a module, and the PTX in them.
 *
 * An image in memory says itself how long it is, and may be damaged: nothing is read that is not known to be there. */
#include "images.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

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

/* How many of the bytes at an address can be read. A sandbox that forbids the question gets the answer: all. */
static size_t readable_size(const void *address, size_t size)
{
    enum { PAGE = 4096, PROBES = 256 };
    const uintptr_t start = (uintptr_t)address;
    size = size > UINTPTR_MAX - PAGE - start ? UINTPTR_MAX - PAGE - start : size;
    for (uintptr_t at = start; start && at - start < size;) {
        char bytes[PROBES];
        struct iovec probes[PROBES], target = {bytes, sizeof bytes};
        ssize_t count = 0;
        for (uintptr_t page = at; count < PROBES && page - start < size; page = (page / PAGE + 1) * PAGE)
            probes[count++] = (struct iovec){(void *)page, 1};
        const ssize_t done = process_vm_readv(getpid(), &target, 1, probes, (unsigned long)count, 0);
        if (done < 0 && errno != EFAULT)
            return size;
        if (done > 0)
            at = (at / PAGE + (uintptr_t)done) * PAGE;
        if (done < count)
            return at - start;
    }
    return start ? size : 0;
}

static bool is_readable(const void *address, size_t size)
{
    return readable_size(address, size) == size;
}

/* Reads no further than the first byte that differs, which may be the end of a short text. */
static bool begins_with(const void *data, const void *magic, size_t size)
{
    const char *bytes = data, *wanted = magic;
    size_t i = 0;
    while (i < size && is_readable(bytes + i, 1) && bytes[i] == wanted[i])
        i++;
    return i == size;
}

static bool read_fat_binary(const void *data, size_t limit, struct fat_binary *binary)
{
    uint64_t size;
    if (limit < sizeof *binary || !is_readable(data, sizeof *binary))
        return false;
    memcpy(binary, data, sizeof *binary);
    return binary->magic == FAT_BINARY_MAGIC && binary->header_size >= sizeof *binary &&
           !__builtin_add_overflow(binary->size, binary->header_size, &size) && size <= limit;
}

/* The bytes of an image, of which there are at most `limit`; 0 if it is damaged. Of machine code, what says so is enough. */
static size_t size_of_image(const char *data, size_t limit)
{
    enum { ELF_HEADER = 64, STEP = 1 << 16 };
    static const uint32_t fat_binary = FAT_BINARY_MAGIC;
    struct fat_binary binary;
    if (limit >= 4 && begins_with(data, &fat_binary, 4)) {
        const bool is_whole = read_fat_binary(data, limit, &binary) && is_readable(data, binary.header_size + binary.size);
        return is_whole ? binary.header_size + binary.size : 0;
    }
    if (limit >= 4 && begins_with(data, "\177ELF", 4))
        return limit >= ELF_HEADER && is_readable(data, ELF_HEADER) ? ELF_HEADER : 0;
    for (size_t size = 0, step;; size += step) {
        step = readable_size(data + size, limit - size < STEP ? limit - size : STEP);
        const char *end = step ? memchr(data + size, '\0', step) : NULL;
        if (end || step < STEP)
            return end ? (size_t)(end - data) + 1 : 0;
    }
}

struct image *new_image(const void *data)
{
    struct image *image = calloc(1, sizeof *image);
    static const uint32_t wrapper_magic = WRAPPER_MAGIC;
    struct wrapper wrapper;
    if (!image)
        return NULL;
    image->data = data;
    image->references = 1;
    if (begins_with(data, &wrapper_magic, sizeof wrapper_magic) && is_readable(data, sizeof wrapper)) {
        memcpy(&wrapper, data, sizeof wrapper);
        image->data = wrapper.data;
        image->prelinked = wrapper.version == PRELINKED ? wrapper.prelinked : NULL;
    }
    return image;
}

/* How many fat binaries an image was linked of. Their list ends at the first that is none. */
static size_t count_prelinked(const struct image *image)
{
    struct fat_binary binary;
    size_t count = 0;
    while (image->prelinked && is_readable(&image->prelinked[count], sizeof(void *)) && image->prelinked[count] &&
           read_fat_binary(image->prelinked[count], SIZE_MAX, &binary))
        count++;
    return count;
}

cudaError_t own_image(struct image *image, size_t limit)
{
    const size_t count = count_prelinked(image);
    size_t total = (count + 1) * sizeof(void *);
    for (size_t i = 0; i <= count; i++) {
        const size_t size = size_of_image(i < count ? image->prelinked[i] : image->data, i < count ? SIZE_MAX : limit);
        RETURN_UNLESS(size != 0 && !__builtin_add_overflow(total, size, &total), ERROR_INVALID_IMAGE);
    }
    const void **list = malloc(total);
    RETURN_UNLESS(list, ERROR_OUT_OF_MEMORY);
    char *at = (char *)(list + count + 1);
    for (size_t i = 0; i <= count; i++) {
        const void *data = i < count ? image->prelinked[i] : image->data;
        const size_t size = size_of_image(data, i < count ? SIZE_MAX : limit);
        memcpy(at, data, size);
        list[i] = at;
        at += size;
    }
    image->data = list[count];
    list[count] = NULL;
    image->prelinked = count ? (const void *const *)list : NULL;
    image->copy = list;
    return SUCCESS;
}

/* What the entries of a fat binary are: the best PTX, and the architectures of its machine code. */
struct contents {
    struct part best;
    int architecture; /* of the best, or 0 */
    struct part machine_code; /* the last one that is not compressed */
    char code[200];
    bool is_damaged;
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
    enum { MAX_ARCHITECTURE = 9999 };
    struct fat_binary binary;
    contents->is_damaged = !read_fat_binary(data, SIZE_MAX, &binary);
    if (contents->is_damaged)
        return;
    const char *at = data + binary.header_size;
    for (uint64_t left = binary.size; left >= sizeof(struct entry);) {
        struct entry entry;
        uint64_t size;
        contents->is_damaged = !is_readable(at, sizeof entry);
        if (contents->is_damaged)
            return;
        memcpy(&entry, at, sizeof entry);
        contents->is_damaged = entry.header_size < sizeof entry || entry.compressed_size > entry.size ||
                               __builtin_add_overflow(entry.size, entry.header_size, &size) || size > left ||
                               entry.architecture > MAX_ARCHITECTURE;
        if (contents->is_damaged)
            return;
        if (entry.kind == KIND_CODE) {
            add_code(contents, entry.architecture);
            if (!entry.compressed_size && is_readable(at, size))
                contents->machine_code = (struct part){.data = at + entry.header_size, .size = entry.size};
        }
        if (entry.kind == KIND_PTX && is_better((int)entry.architecture, contents->architecture, wanted)) {
            contents->architecture = (int)entry.architecture;
            contents->best = (struct part){
                .data = at + entry.header_size,
                .size = entry.compressed_size ? entry.compressed_size : entry.size,
                .text_size = entry.text_size,
                .compression = entry.flags & FLAG_LZ4 ? PART_LZ4 : entry.flags & FLAG_ZSTD ? PART_ZSTD : PART_PLAIN,
            };
        }
        at += size;
        left -= size;
    }
    contents->is_damaged = contents->architecture && !is_readable(contents->best.data, contents->best.size);
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
    static const uint32_t fat_binary = FAT_BINARY_MAGIC;
    const bool is_binary = begins_with(data, &fat_binary, sizeof fat_binary), is_code = begins_with(data, "\177ELF", 4);
    const size_t linked = count_prelinked(image);
    if (is_binary)
        look_into(data, program->architecture, &contents);
    char code[sizeof contents.code];
    snprintf(code, sizeof code, "%s", contents.code);
    bool is_damaged = contents.is_damaged;
    for (size_t i = 0; i < linked; i++) {
        contents = (struct contents){0};
        look_into(image->prelinked[i], program->architecture, &contents);
        is_damaged |= contents.is_damaged;
        add_part(program, &contents);
    }
    if (linked == 0 && is_binary)
        add_part(program, &contents);
    else if (linked == 0 && is_code)
        program->problem = strdup("simulated GPUs run kernels from PTX, and its module is machine code, as ptxas, nvJitLink and"
                                  " NVRTC make it; load its PTX (nvrtcGetPTX), " REMEDY);
    else if (linked == 0 && size_of_image(data, SIZE_MAX) && strstr(data, ".version"))
        add_linked(program, data);
    program->machine_code = program->part_count == 1 ? contents.machine_code : (struct part){0};
    if (is_damaged && !program->problem)
        program->problem = strdup("the fat binary that contains it is damaged; compile its program again");
    else if (program->part_count == 0 && !program->problem)
        explain(program, code);
    for (size_t i = 0; i < program->part_count && !program->problem; i++)
        add_to_key(program->key, program->parts[i].data, program->parts[i].size);
    program->is_damaged = is_damaged;
    program->is_code = is_code || *code;
}

struct program *find_program(struct image *image, const struct sim_device *device)
{
    const int architecture = device->major * 10 + device->minor;
    pthread_mutex_lock(&lock);
    struct program *program = image->programs;
    while (program && program->architecture != architecture)
        program = program->next;
    if (!program && (program = calloc(1, sizeof *program))) {
        program->architecture = architecture;
        program->image = image;
        pthread_mutex_init(&program->lock, NULL);
        find_parts(program, image);
        program->next = image->programs;
        image->programs = program;
    }
    pthread_mutex_unlock(&lock);
    return program;
}

/* Of the text of a part, and of a kernel in it. */
bool has_kernel(const struct part *part, const char *name)
{
    static const char keyword[] = ".entry";
    const char *at = part->data, *end = at + part->size;
    const size_t length = strlen(name);
    while ((at = memmem(at, (size_t)(end - at), keyword, sizeof keyword - 1))) {
        at += sizeof keyword - 1;
        while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n'))
            at++;
        const size_t left = (size_t)(end - at);
        if (left > length && memcmp(at, name, length) == 0 && !(isalnum((unsigned char)at[length]) || strchr("_$%", at[length])))
            return true;
    }
    return false;
}

void image_retain(struct image *image)
{
    image->references++;
}

void image_release(struct image *image)
{
    if (--image->references > 0)
        return;
    for (struct program *program = image->programs, *next; program; program = next) {
        next = program->next;
        if (program->free_kernels)
            program->free_kernels(program);
        pthread_mutex_destroy(&program->lock);
        free(program->parts);
        free(program->problem);
        free(program);
    }
    image->programs = NULL;
    if (image->copy) { /* of a program's image, tables keep that it is gone */
        free(image->copy);
        free(image);
    }
}
