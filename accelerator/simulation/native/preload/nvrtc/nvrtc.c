/* NVRTC as torch calls it, for its jiterator: where torch asks for machine code, it gets the PTX from which NVRTC has made that.
 * The driver loads PTX as well, and simulated GPUs run it. NVRTC itself compiles on the CPU and needs no GPU.
 *
 * torch.cuda._compile_kernel calls NVRTC from Python, where _inside/compiled/nvrtc.py does the same. */
#include <dlfcn.h>
#include <string.h>

static const char *replaced(const char *name)
{
    if (strcmp(name, "nvrtcGetCUBIN") == 0)
        return "nvrtcGetPTX";
    if (strcmp(name, "nvrtcGetCUBINSize") == 0)
        return "nvrtcGetPTXSize";
    return name;
}

/* at::DynamicLibrary::sym(const char *), by which torch finds the functions of NVRTC and of the driver. */
__attribute__((visibility("default"))) void *_ZN2at14DynamicLibrary3symEPKc(void *library, const char *name)
{
    void *(*find)(void *, const char *) = NULL;
    Dl_info caller;
    /* The library that defines the function is not in the global scope, but the caller is linked with it. */
    void *handle = dladdr(__builtin_return_address(0), &caller) ? dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (handle) {
        *(void **)&find = dlsym(handle, __func__);
        dlclose(handle);
    }
    return find ? find(library, replaced(name)) : NULL;
}
