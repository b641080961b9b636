/* The CUDA runtime: the kernel by which torch examines what a rank sends (TORCH_NCCL_NAN_CHECK, TORCH_DIST_NAN_CHECK).
 *
 * void checkForNaN<T>(T *data, size_t size) stops the device if an element is NaN. */
#include "runtime.h"

#include <stdio.h>
#include <string.h>

/* Floating-point types by their names in the name of the kernel. */
struct float_type {
    const char *mangled;
    int size;
    uint64_t largest; /* the largest bits, without the sign, that are not a NaN */
};

static const struct float_type float_types[] = {
    {"f", 4, 0x7f800000},
    {"d", 8, 0x7ff0000000000000},
    {"N3c104HalfE", 2, 0x7c00},
    {"N3c108BFloat16E", 2, 0x7f80},
    {"N3c1011Float8_e5m2E", 1, 0x7c},
    {"N3c1013Float8_e4m3fnE", 1, 0x7e},
};

const struct float_type *nan_check_type(const char *kernel)
{
    static const char name_space[] = "_ZN4c10d", start[] = "11checkForNaNI", end[] = "EEvPT_m";
    const char *found = strstr(kernel, start);
    if (!found || strncmp(kernel, name_space, sizeof name_space - 1) != 0)
        return NULL;
    found += sizeof start - 1;
    for (size_t i = 0; i < sizeof float_types / sizeof *float_types; i++) {
        size_t length = strlen(float_types[i].mangled);
        if (strncmp(found, float_types[i].mangled, length) == 0 && strcmp(found + length, end) == 0)
            return &float_types[i];
    }
    return NULL;
}

static cudaError_t run(struct stream *stream, const struct work *work)
{
    (void)stream;
    const struct float_type *type = work->nan_check.type;
    const char *data = work->nan_check.data;
    const size_t count = work->nan_check.count;
    uint64_t without_sign = ((uint64_t)1 << (8 * type->size - 1)) - 1;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = 0;
        memcpy(&bits, data + i * (size_t)type->size, (size_t)type->size);
        if ((bits & without_sign) > type->largest) {
            fprintf(stderr, "checkForNaN: element %zu of %zu is NaN\n", i, count);
            return ERROR_ASSERT;
        }
    }
    return SUCCESS;
}

const struct work_type nan_check = {.node = "KERNEL", .run = run, .prepare = wait_for_earlier_work};
