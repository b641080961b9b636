/* The CUDA runtime: registration of kernels that are compiled into the program. Only three of them run, and the names of the
 * others are recorded.
 *
 * Loading a library calls the registration functions tens of thousands of times; they must initialize nothing. */
#include "images.h"

#include <stdlib.h>
#include <string.h>

#include "common/arrays.h"
#include "common/fork.h"
#include "interface/settings.h"

/* Libraries register their kernels in any thread, also in a forked child. Guards all tables of this file. */
RENEWED_LOCK(lock)

/* The kernels that run, by the addresses of their host functions. */
enum { MAX_TORCH_KERNELS = 64 };

static struct torch_kernel torch_kernels[MAX_TORCH_KERNELS];
static int torch_kernel_count;

const struct torch_kernel *find_torch_kernel(const void *function)
{
    const struct torch_kernel *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < torch_kernel_count && !found; i++)
        if (torch_kernels[i].function == function)
            found = &torch_kernels[i];
    pthread_mutex_unlock(&lock);
    return found;
}

bool computes(void)
{
    static int is_set = -1;
    if (is_set < 0) {
        const char *value = getenv(SETTING_COMPUTE);
        is_set = value && strcmp(value, "1") == 0;
    }
    return is_set;
}

/* Reads which kernel this is from its mangled name. Returns false for kernels that do not run. */
static bool recognize(const char *name, struct torch_kernel *kernel)
{
    kernel->checked = nan_check_type(name);
    kernel->type = kernel->checked           ? &nan_check
                   : is_barrier_kernel(name) ? &barrier_kernel
                   : is_spin_kernel(name)    ? &spin_kernel
                                             : NULL;
    return kernel->type != NULL;
}

/* The names of all kernels, for the message about one that does not run. The texts belong to the program. */
static struct {
    const void *function;
    const char *name, *symbol; /* for people, and in the image */
    struct image *image;
    bool is_reported; /* each kernel is reported on stderr once */
} *kernels;
static size_t kernel_count, kernel_capacity;

static void record_name(const void *function, const char *name, const char *symbol, struct image *image)
{
    if (!array_reserve((void **)&kernels, &kernel_capacity, kernel_count + 1, sizeof *kernels))
        return; /* the kernel fails without its name */
    kernels[kernel_count].function = function;
    kernels[kernel_count].symbol = symbol;
    kernels[kernel_count].image = image;
    kernels[kernel_count].is_reported = false;
    kernels[kernel_count++].name = name;
}

const char *name_to_report(const void *function, bool *is_reported)
{
    const char *name = NULL;
    *is_reported = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < kernel_count && !name; i++)
        if (kernels[i].function == function && !kernels[i].image->is_gone) {
            name = kernels[i].name;
            *is_reported = kernels[i].is_reported;
            kernels[i].is_reported = true;
        }
    pthread_mutex_unlock(&lock);
    return name;
}

/* The kernels that were launched, by a hash of their addresses: the table of all is long. */
enum { BUCKETS = 1024 };
static size_t recent[BUCKETS]; /* indices in the table, plus 1 */

struct image *retain_kernel_image(const void *function, const char **name)
{
    struct image *image = NULL;
    pthread_mutex_lock(&lock);
    size_t *bucket = &recent[(uintptr_t)function / 16 % BUCKETS], index = *bucket ? *bucket - 1 : kernel_count;
    if (index == kernel_count || kernels[index].function != function || kernels[index].image->is_gone)
        for (index = 0; index < kernel_count; index++)
            if (kernels[index].function == function && !kernels[index].image->is_gone)
                break;
    if (index < kernel_count) {
        *bucket = index + 1;
        *name = kernels[index].symbol;
        image = kernels[index].image;
        image_retain(image);
    }
    pthread_mutex_unlock(&lock);
    return image;
}

static struct image none = {.references = 1};

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    struct image *image = new_image(binary);
    return (void **)(image ? image : &none);
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

/* What was registered with it stays in the tables, where nothing finds it. */
EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    struct image *image = (struct image *)handle;
    if (!image || image == &none)
        return;
    pthread_mutex_lock(&lock);
    const bool was_gone = image->is_gone;
    image->is_gone = true;
    pthread_mutex_unlock(&lock);
    if (!was_gone)
        image_release(image);
}

EXPORT void __cudaRegisterFunction(void **handle, const void *function, char *device_function, const char *name,
                                   int thread_limit, void *thread, void *block, void *block_size, void *grid_size,
                                   int *warp_size)
{
    (void)thread_limit, (void)thread, (void)block, (void)block_size,
        (void)grid_size, (void)warp_size;
    struct torch_kernel kernel = {.function = function};
    bool runs = recognize(name, &kernel);
    pthread_mutex_lock(&lock);
    if (runs && torch_kernel_count < MAX_TORCH_KERNELS)
        torch_kernels[torch_kernel_count++] = kernel;
    else if (computes())
        record_name(function, name, device_function, handle ? (struct image *)handle : &none);
    pthread_mutex_unlock(&lock);
}
