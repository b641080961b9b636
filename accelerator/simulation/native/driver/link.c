/* libcuda.so.1: the linker. What it makes is the PTX of all inputs, which the runtime links when it translates a kernel. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TYPE_PTX = 1 };
static const char *const type_names[] = {"machine code", "PTX", "a fat binary", "an object file", "a library", "NVVM IR"};

struct linked {
    char *text; /* of all inputs, or NULL */
    size_t size;
    unsigned option_count;
    int *options; /* with the values, which the program keeps as long as the linker */
    void **values;
};

SIM_EXPORT CUresult cuLinkCreate_v2(unsigned count, int *options, void **values, struct linked **linked)
{
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(linked);
    RETURN_IF_ERROR(check_jit_options(count, options, values));
    struct linked *made = calloc(1, sizeof *made + count * sizeof *options);
    RETURN_UNLESS(made, ERROR_OUT_OF_MEMORY);
    *made = (struct linked){.option_count = count, .options = (int *)(made + 1), .values = values};
    memcpy(made->options, options, count * sizeof *options);
    *linked = made;
    return SUCCESS;
}

static CUresult add(struct linked *linked, unsigned type, const char *data, size_t size, const char *name)
{
    static const char separator[] = SIM_MODULE_SEPARATOR;
    if (type != TYPE_PTX) {
        fprintf(stderr, "cuLinkAddData: %s is %s, and simulated GPUs link PTX alone\n", name && *name ? name : "an input",
                type < sizeof type_names / sizeof *type_names ? type_names[type] : "of an unknown type");
        return ERROR_NOT_SUPPORTED;
    }
    const struct sim_runtime *functions = find_runtime();
    char log[SIM_MAX_REFUSAL_LENGTH] = "";
    size = strnlen(data, size);
    const CUresult wrong = functions ? functions->check_ptx(data, size, log, sizeof log) : ERROR_NOT_SUPPORTED;
    write_jit_logs(linked->option_count, linked->options, linked->values, log);
    RETURN_IF_ERROR(wrong);
    char *text = realloc(linked->text, linked->size + sizeof separator + size);
    RETURN_UNLESS(text, ERROR_OUT_OF_MEMORY);
    memcpy(text + linked->size, data, size);
    memcpy(text + linked->size + size, separator, sizeof separator);
    linked->text = text;
    linked->size += size + sizeof separator - 1;
    return SUCCESS;
}

SIM_EXPORT CUresult cuLinkAddData_v2(struct linked *linked, unsigned type, const void *data, size_t size, const char *name,
                                     unsigned count, int *options, void **values)
{
    (void)count, (void)options, (void)values;
    RETURN_IF_ERROR(enter_context(__func__));
    return linked && data && size ? add(linked, type, data, size, name) : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuLinkAddFile_v2(struct linked *linked, unsigned type, const char *path, unsigned count, int *options,
                                     void **values)
{
    (void)count, (void)options, (void)values;
    char *data;
    size_t size;
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(linked && path);
    RETURN_IF_ERROR(read_file(path, &data, &size));
    const CUresult result = add(linked, type, data, size, path);
    free(data);
    return result;
}

SIM_EXPORT CUresult cuLinkComplete(struct linked *linked, void **image, size_t *size)
{
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(linked && image);
    RETURN_UNLESS(linked->text, ERROR_INVALID_IMAGE);
    *image = linked->text;
    if (size)
        *size = linked->size + 1;
    return SUCCESS;
}

SIM_EXPORT CUresult cuLinkDestroy(struct linked *linked)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_UNLESS(linked, ERROR_INVALID_HANDLE);
    free(linked->text);
    free(linked);
    return SUCCESS;
}
