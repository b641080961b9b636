/* The CUDA runtime: copies and fills (cudaMemcpy, cudaMemset). Synchronous ones use the default stream. */
#include "runtime.h"

#include <string.h>

static bool is_on_devices(const struct copy *copy)
{
    return is_device_memory(copy->target) && is_device_memory(copy->source);
}

static cudaError_t copy(struct stream *stream, const struct work *work)
{
    if (__builtin_expect(stream->pending.count != 0, 0) && is_on_devices(&work->copy))
        return copy_later(stream, &work->copy);
    copy_rows(&work->copy);
    return SUCCESS;
}

static cudaError_t prepare_copy(struct stream *stream, const struct work *work)
{
    return is_on_devices(&work->copy) ? SUCCESS : wait_for_earlier_work(stream, work);
}

static cudaError_t fill(struct stream *stream, const struct work *work)
{
    (void)stream;
    if (work->fill.value == 0)
        driver->fill_with_zeros(work->fill.target, work->fill.size);
    else
        memset(work->fill.target, work->fill.value, work->fill.size);
    return SUCCESS;
}

static bool are_valid_rows(const char *address, size_t pitch, size_t width, size_t height)
{
    size_t size;
    return width <= pitch && !__builtin_mul_overflow(height - 1, pitch, &size) &&
           !__builtin_add_overflow(size, width, &size) && driver->is_valid_range(address, size);
}

static cudaError_t check_direction(int direction)
{
    enum { HOST_TO_HOST = 0, DEFAULT = 4 };
    return direction >= HOST_TO_HOST && direction <= DEFAULT ? SUCCESS : ERROR_INVALID_MEMCPY_DIRECTION;
}

static cudaError_t copy_in_stream(void *handle, const struct sim_device *device, const struct copy *copied, bool is_synchronous)
{
    static const struct work_type copying = {.node = "MEMCPY", .run = copy, .prepare = prepare_copy};
    struct stream *stream = find_stream(handle, device);
    if (!stream)
        return ERROR_INVALID_HANDLE;
    size_t width = copied->width, height = copied->height;
    if (width == 0 || height == 0)
        return SUCCESS;
    if (!are_valid_rows(copied->target, copied->target_pitch, width, height) ||
        !are_valid_rows(copied->source, copied->source_pitch, width, height))
        return ERROR_INVALID_VALUE;
    RETURN_IF_ERROR(unless_failed(device->ordinal));
    IF_RACES(race_hooks->at_copy(&stream->races, copied, is_synchronous));
    cudaError_t error = submit(stream, &(struct work){.type = &copying, .copy = *copied});
    IF_RACES(race_hooks->after_copy(&stream->races, copied, is_synchronous));
    return error;
}

static cudaError_t copy_bytes(void *handle, const struct sim_device *device, void *target, const void *source, size_t size,
                              bool is_synchronous)
{
    return copy_in_stream(handle, device, &(struct copy){target, source, size, size, size, 1}, is_synchronous);
}

static cudaError_t fill_bytes(void *handle, const struct sim_device *device, void *target, int value, size_t size)
{
    static const struct work_type filling = {.node = "MEMSET", .run = fill, .prepare = wait_for_earlier_work};
    struct stream *stream = find_stream(handle, device);
    if (!stream)
        return ERROR_INVALID_HANDLE;
    if (!driver->is_valid_range(target, size))
        return ERROR_INVALID_VALUE;
    IF_RACES(race_hooks->at_fill(&stream->races, target, size));
    return submit(stream, &(struct work){.type = &filling, .fill = {target, value, size}});
}

EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t size, int direction)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    RETURN_IF_ERROR(finish(check_direction(direction)));
    RETURN_IF_ERROR(unsafe_call());
    RETURN_IF_ERROR(finish(wait_for_stream(find_stream(NULL, device))));
    return finish(copy_bytes(NULL, device, target, source, size, true));
}

EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, int direction, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    RETURN_IF_ERROR(finish(check_direction(direction)));
    return finish(copy_bytes(stream, device, target, source, size, false));
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                     size_t width, size_t height, int direction, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    RETURN_IF_ERROR(finish(check_direction(direction)));
    struct copy copied = {target, source, target_pitch, source_pitch, width, height};
    return finish(copy_in_stream(stream, device, &copied, false));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                       size_t size, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    int count = visible_device_count();
    if (target_device < 0 || target_device >= count || source_device < 0 || source_device >= count)
        return fail(ERROR_INVALID_DEVICE);
    return finish(copy_bytes(stream, device, target, source, size, false));
}

EXPORT cudaError_t cudaMemset(void *target, int value, size_t size)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    RETURN_IF_ERROR(unsafe_call());
    return finish(fill_bytes(NULL, device, target, value, size));
}

EXPORT cudaError_t cudaMemsetAsync(void *target, int value, size_t size, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    return finish(fill_bytes(stream, device, target, value, size));
}
