/* libcuda.so.1: the entry point cuGetExportTable. NVIDIA's runtimes take undocumented tables of functions from it, which are not simulated. */
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A CUDA runtime asks for this table, without which it answers cudaErrorSymbolNotFound to all calls. The runtimes of simulated
 * machines ask for none, so this is one that nvcc has linked into a program or library. Programs that check no errors would go on
 * without memory, and end by a signal. Libraries have users that do without them, so the process goes on. */
static void explain_static_runtime(const void *caller)
{
    static _Atomic bool is_explained;
    Dl_info info = {0};
    const struct link_map *map = NULL;
    if (is_explained || !dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP))
        return;
    is_explained = true;
    const char *name = strrchr(info.dli_fname, '/');
    const bool is_nvidias = strncmp(name ? name + 1 : info.dli_fname, "libcu", 5) == 0; /* such as libcublas.so.13 */
    fprintf(stderr, "%s is linked with the static CUDA runtime, which is not simulated, so its calls fail: %s\n", info.dli_fname,
            is_nvidias ? "call torch's ops instead" : "link it with -cudart shared");
    const bool is_program = map && map->l_name[0] == '\0';
    if (is_program) {
        fflush(NULL);
        _exit(1);
    }
}

SIM_EXPORT CUresult cuGetExportTable(const void **table, const unsigned char id[16])
{
    static const unsigned char of_runtime[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                                 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
    REQUIRE(table);
    *table = NULL;
    if (id && memcmp(id, of_runtime, sizeof of_runtime) == 0)
        explain_static_runtime(__builtin_return_address(0));
    return ERROR_NOT_FOUND;
}
