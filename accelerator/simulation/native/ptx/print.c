/* printf and assert of device code. */
#include <stdio.h>
#include <string.h>

#include "library.h"

enum { LINE_SIZE = 4096, MAX_STRING = 1024 };

/* A text in device memory, cut where the memory ends. */
static void copy_text(struct worker *worker, u64 address, char *text, size_t size)
{
    struct sim_kernel_memory memory;
    size_t length = 0;
    const struct sim_kernel_run *request = running(worker)->run->request;
    bool is_known = request->find_memory(request->device, address, &memory);
    u64 available = is_known ? memory.low + memory.size - address : 0;
    size = available + 1 < size ? (size_t)available + 1 : size;
    while (length + 1 < size && (text[length] = ((const char *)address)[length]))
        length++;
    text[length] = '\0';
    if (!is_known)
        snprintf(text, 16, address ? "(not a text)" : "(null)");
}

/* A printf in progress: what is written, and the arguments, each aligned to its size. */
struct printing {
    struct worker *worker;
    char line[LINE_SIZE];
    size_t length;
    const char *arguments;
    size_t offset;
    u32 count; /* of the arguments so far */
};

static u64 next_argument(struct printing *printing, size_t size)
{
    u64 value = 0;
    printing->offset = (printing->offset + size - 1) / size * size;
    memcpy(&value, printing->arguments + printing->offset, size);
    printing->offset += size;
    printing->count++;
    return value;
}

static void append(struct printing *printing, const char *text)
{
    size_t space = sizeof printing->line - printing->length;
    int written = snprintf(printing->line + printing->length, space, "%s", text);
    printing->length += (size_t)written < space ? (size_t)written : space - 1;
}

/* Replaces * by arguments, and converts one argument. `specification` has space for two numbers more. */
static void convert(struct printing *printing, char *specification, size_t size, bool is_long)
{
    char text[MAX_STRING + 64], kind = specification[strlen(specification) - 1];
    for (char *star; (star = strchr(specification, '*'));) {
        char rest[64];
        snprintf(rest, sizeof rest, "%s", star + 1);
        snprintf(star, size - (size_t)(star - specification), "%d%s", (int)next_argument(printing, 4), rest);
    }
    if (strchr("fFeEgGaA", kind)) {
        u64 bits = next_argument(printing, 8);
        double value;
        memcpy(&value, &bits, sizeof value);
        snprintf(text, sizeof text, specification, value);
    } else if (kind == 's') {
        char string[MAX_STRING];
        copy_text(printing->worker, next_argument(printing, 8), string, sizeof string);
        snprintf(text, sizeof text, specification, string);
    } else if (kind == 'p') {
        snprintf(text, sizeof text, specification, (void *)next_argument(printing, 8));
    } else if (is_long) {
        snprintf(text, sizeof text, specification, next_argument(printing, 8));
    } else {
        snprintf(text, sizeof text, specification, (u32)next_argument(printing, 4));
    }
    append(printing, text);
}

static void format_all(struct printing *printing, const char *format)
{
    enum { SPECIFICATION_SIZE = 64 };
    while (*format) {
        char specification[SPECIFICATION_SIZE] = "%";
        size_t length = 1;
        bool is_long = false;
        if (*format != '%' || format[1] == '%') {
            append(printing, (char[]){*format, '\0'});
            format += *format == '%' ? 2 : 1;
            continue;
        }
        for (format++; *format && !strchr("diouxXcsfFeEgGaApn", *format) && length < 32; format++) {
            is_long |= *format == 'l' || *format == 'z' || *format == 'j' || *format == 't';
            specification[length++] = *format;
        }
        if (!*format || *format == 'n')
            return; /* CUDA does not know %n */
        specification[length++] = *format++;
        convert(printing, specification, sizeof specification, is_long);
    }
}

/* Returns the number of arguments, unlike C's printf. */
u32 print(struct worker *worker, const char *format, const char *arguments)
{
    struct printing printing = {.worker = worker, .arguments = arguments};
    char copied[LINE_SIZE];
    if (!format)
        return ~0u;
    begin_uninterrupted(worker);
    copy_text(worker, (u64)format, copied, sizeof copied);
    format_all(&printing, copied);
    fwrite(printing.line, 1, printing.length, stdout);
    end_uninterrupted(worker);
    return printing.count;
}

void fail_assertion(struct worker *worker, const char *message, const char *file, u32 line, const char *function)
{
    char texts[3][MAX_STRING];
    const struct block *block = worker->block;
    const u32 *shape = worker->launch->block, number = worker->thread;
    begin_uninterrupted(worker);
    copy_text(worker, (u64)message, texts[0], sizeof texts[0]);
    copy_text(worker, (u64)file, texts[1], sizeof texts[1]);
    copy_text(worker, (u64)function, texts[2], sizeof texts[2]);
    fprintf(stderr, "%s:%u: %s: block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `%s` failed.\n", texts[1], line, texts[2],
            block->index[0], block->index[1], block->index[2], number % shape[0], number / shape[0] % shape[1],
            number / shape[0] / shape[1], texts[0]);
    end_uninterrupted(worker);
    fail_kernel(worker, KERNEL_ASSERT, "its assertion `%s` fails", texts[0]);
}
