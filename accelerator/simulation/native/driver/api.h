/* The entry points in the table for the runtime. */
#ifndef ACCELERATOR_SIM_DRIVER_API_H
#define ACCELERATOR_SIM_DRIVER_API_H

#include "driver.h"

CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int *version);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSetLimit(unsigned limit, size_t value);
CUresult cuCtxGetLimit(size_t *value, unsigned limit);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags);
CUresult cuMemFreeHost(void *address);
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuMemGetInfo_v2(size_t *free, size_t *total);
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

#endif
