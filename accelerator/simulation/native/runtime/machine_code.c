/* The CUDA runtime: machine code, of which nothing runs: what ptxas says there of a kernel. */
#include <elf.h>
#include <string.h>

#include "images.h"

/* The entries of the section .nv.info: a format, what it says, and the size of what follows, or a value. */
struct info {
    uint8_t format, kind;
    uint16_t size;
    uint32_t symbol, value;
};
enum { FORMAT_SIZED = 4, KIND_FRAME_SIZE = 0x11, KIND_REGISTERS = 0x2f, INFO_HEADER = 4 };

/* Reads bytes of the code, which may be damaged. */
static bool read_code(const struct part *code, uint64_t at, void *result, size_t size)
{
    if (at > code->size || size > code->size - at)
        return false;
    memcpy(result, code->data + at, size);
    return true;
}

static bool is_text(const struct part *code, uint64_t at, const char *text)
{
    const size_t size = strlen(text) + 1;
    return at <= code->size && size <= code->size - at && memcmp(code->data + at, text, size) == 0;
}

static bool find_section(const struct part *code, const char *name, Elf64_Shdr *section)
{
    Elf64_Ehdr header;
    Elf64_Shdr names;
    if (!read_code(code, 0, &header, sizeof header) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        !read_code(code, header.e_shoff + header.e_shstrndx * sizeof names, &names, sizeof names))
        return false;
    for (unsigned i = 0; i < header.e_shnum; i++)
        if (read_code(code, header.e_shoff + i * sizeof *section, section, sizeof *section) &&
            is_text(code, names.sh_offset + section->sh_name, name))
            return true;
    return false;
}

static bool is_symbol(const struct part *code, uint32_t number, const char *name)
{
    Elf64_Shdr symbols, names;
    Elf64_Sym symbol;
    return find_section(code, ".symtab", &symbols) && find_section(code, ".strtab", &names) &&
           read_code(code, symbols.sh_offset + number * sizeof symbol, &symbol, sizeof symbol) &&
           is_text(code, names.sh_offset + symbol.st_name, name);
}

void read_resources(const struct part *code, const char *kernel, struct resources *resources)
{
    Elf64_Shdr section;
    if (!code->data || !find_section(code, ".nv.info", &section))
        return;
    struct resources found = {0};
    struct info info;
    for (uint64_t at = 0; at < section.sh_size && read_code(code, section.sh_offset + at, &info, INFO_HEADER);) {
        if (info.format == FORMAT_SIZED && read_code(code, section.sh_offset + at, &info, sizeof info)) {
            if (info.kind == KIND_FRAME_SIZE && is_symbol(code, info.symbol, kernel))
                found.local_size = (int)info.value;
            if (info.kind == KIND_REGISTERS && is_symbol(code, info.symbol, kernel))
                found.registers = (int)info.value;
        }
        at += info.format == FORMAT_SIZED ? (uint64_t)INFO_HEADER + info.size : INFO_HEADER;
    }
    if (found.registers)
        *resources = found;
}
