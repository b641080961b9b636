/* libcuda.so.1: entry points by name (cuGetProcAddress). */
#include "driver.h"
#include "api.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

/* Whether the entry point is more than a stub. */
static bool is_simulated(void *function)
{
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    return function && dladdr1(function, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol &&
           ELF64_ST_BIND(symbol->st_info) != STB_WEAK;
}

/* A base name means the newest version that is simulated: cuMemGetAddressRange is cuMemGetAddressRange_v2. */
static void *find_entry_point(const char *name)
{
    Dl_info self;
    if (strncmp(name, "cu", 2) != 0 || !dladdr((void *)&cuInit, &self))
        return NULL;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return NULL;
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *newest = dlsym(library, versioned), *function = dlsym(library, name);
    dlclose(library);
    return newest && (is_simulated(newest) || !is_simulated(function)) ? newest : function;
}

SIM_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    enum { FOUND = 0, NO_SUCH_SYMBOL = 1 };
    (void)version, (void)flags;
    REQUIRE(name && function);
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    *function = find_entry_point(name);
    if (status)
        *status = *function ? FOUND : NO_SUCH_SYMBOL;
    return *function ? SUCCESS : ERROR_NOT_FOUND;
}

SIM_EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
