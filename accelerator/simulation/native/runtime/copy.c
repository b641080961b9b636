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
    const struct copy *filled = &work->fill.rows;
    const bool is_whole = filled->height == 1 || filled->target_pitch == filled->width;
    const size_t width = is_whole ? filled->width * filled->height : filled->width;
    char *target = filled->target;
    for (size_t row = 0; row < (is_whole ? 1 : filled->height); row++, target += filled->target_pitch)
        if (work->fill.value == 0)
            driver->fill_with_zeros(target, width);
        else
            memset(target, work->fill.value, width);
    return SUCCESS;
}

/* Planes of rows, of a copy or, without sources, of a fill. */
struct planes {
    struct copy rows; /* of the first plane */
    size_t depth, target_size, source_size; /* the sizes of planes */
};

static bool is_valid_side(const char *address, const struct copy *rows, size_t pitch, size_t depth, size_t plane_size)
{
    size_t size, plane;
    return !__builtin_mul_overflow(depth - 1, plane_size, &size) && !__builtin_mul_overflow(rows->height - 1, pitch, &plane) &&
           !__builtin_add_overflow(size, plane, &size) && !__builtin_add_overflow(size, rows->width, &size) &&
           driver->is_valid_range(address, size);
}

/* Makes one plane of planes without gaps, which the work then has to do once. */
static void join_planes(struct planes *planes)
{
    struct copy *rows = &planes->rows;
    if (planes->depth == 1 || (planes->target_size == rows->target_pitch * rows->height &&
                               (!rows->source || planes->source_size == rows->source_pitch * rows->height))) {
        rows->height *= planes->depth;
        planes->depth = 1;
    }
}

enum { MAX_PITCH = INT32_MAX };

static cudaError_t check_direction(int direction)
{
    enum { HOST_TO_HOST = 0, DEFAULT = 4 };
    return direction >= HOST_TO_HOST && direction <= DEFAULT ? SUCCESS : ERROR_INVALID_MEMCPY_DIRECTION;
}

static cudaError_t check_pitches(const struct copy *rows)
{
    const bool is_wide = rows->width > rows->target_pitch || (rows->source && rows->width > rows->source_pitch);
    return is_wide || rows->target_pitch > MAX_PITCH || rows->source_pitch > MAX_PITCH ? ERROR_INVALID_PITCH_VALUE : SUCCESS;
}

static cudaError_t copy_planes(void *handle, const struct sim_device *device, struct planes planes, bool is_synchronous)
{
    static const struct work_type copying = {.node = "MEMCPY", .run = copy, .prepare = prepare_copy};
    struct stream *stream = find_stream(handle, device);
    struct copy *rows = &planes.rows;
    RETURN_UNLESS(stream, ERROR_INVALID_HANDLE);
    if (rows->width == 0 || rows->height == 0 || planes.depth == 0)
        return SUCCESS;
    if (!is_valid_side(rows->target, rows, rows->target_pitch, planes.depth, planes.target_size) ||
        !is_valid_side(rows->source, rows, rows->source_pitch, planes.depth, planes.source_size))
        return ERROR_INVALID_VALUE;
    RETURN_IF_ERROR(unless_failed(device->ordinal));
    join_planes(&planes);
    for (size_t i = 0; i < planes.depth; i++) {
        IF_RACES(race_hooks->at_copy(&stream->races, rows, is_synchronous));
        cudaError_t error = submit(stream, &(struct work){.type = &copying, .copy = *rows});
        IF_RACES(race_hooks->after_copy(&stream->races, rows, is_synchronous));
        RETURN_IF_ERROR(error);
        rows->target += planes.target_size;
        rows->source += planes.source_size;
    }
    return SUCCESS;
}

static cudaError_t copy_bytes(void *handle, const struct sim_device *device, void *target, const void *source, size_t size,
                              bool is_synchronous)
{
    return copy_planes(handle, device, (struct planes){{target, source, size, size, size, 1}, 1, 0, 0}, is_synchronous);
}

static cudaError_t fill_planes(void *handle, const struct sim_device *device, struct planes planes, int value)
{
    static const struct work_type filling = {.node = "MEMSET", .run = fill, .prepare = wait_for_earlier_work};
    struct stream *stream = find_stream(handle, device);
    struct copy *rows = &planes.rows;
    RETURN_UNLESS(stream, ERROR_INVALID_HANDLE);
    if (rows->width == 0 || rows->height == 0 || planes.depth == 0)
        return SUCCESS;
    if (!is_valid_side(rows->target, rows, rows->target_pitch, planes.depth, planes.target_size))
        return ERROR_INVALID_VALUE;
    join_planes(&planes);
    for (size_t i = 0; i < planes.depth; i++) {
        IF_RACES(race_hooks->at_fill(&stream->races, rows));
        RETURN_IF_ERROR(submit(stream, &(struct work){.type = &filling, .fill = {value, *rows}}));
        rows->target += planes.target_size;
    }
    return SUCCESS;
}

static cudaError_t fill_bytes(void *handle, const struct sim_device *device, void *target, int value, size_t size)
{
    return fill_planes(handle, device, (struct planes){{target, NULL, size, 0, size, 1}, 1, 0, 0}, value);
}

/* Synchronous calls use the default stream, and wait for its work. */
static cudaError_t enter_synchronous(const char *function, struct sim_device **device)
{
    RETURN_IF_ERROR(enter_context(function, device));
    RETURN_IF_ERROR(unsafe_call());
    return finish(wait_for_stream(find_stream(NULL, *device)));
}

EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t size, int direction)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(finish(check_direction(direction)));
    RETURN_IF_ERROR(enter_synchronous(__func__, &device));
    return finish(copy_bytes(NULL, device, target, source, size, true));
}

EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, int direction, void *stream)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(finish(check_direction(direction)));
    return finish(copy_bytes(stream, device, target, source, size, false));
}

static cudaError_t copy_plane(const char *function, struct copy rows, int direction, void *stream, bool is_synchronous)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    RETURN_IF_ERROR(finish(check_direction(direction)));
    if (is_synchronous)
        RETURN_IF_ERROR(enter_synchronous(function, &device));
    RETURN_IF_ERROR(finish(check_pitches(&rows)));
    return finish(copy_planes(stream, device, (struct planes){rows, 1, 0, 0}, is_synchronous));
}

EXPORT cudaError_t cudaMemcpy2D(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                                size_t height, int direction)
{
    return copy_plane(__func__, (struct copy){target, source, target_pitch, source_pitch, width, height}, direction, NULL, true);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                     size_t width, size_t height, int direction, void *stream)
{
    return copy_plane(__func__, (struct copy){target, source, target_pitch, source_pitch, width, height}, direction, stream, false);
}

struct position {
    size_t x, y, z;
};

/* cudaMemcpy3DParms and cudaMemcpy3DPeerParms */
struct side {
    void *array;
    struct position position;
    struct pitched_pointer pointer;
};

struct copy_parameters {
    struct side source, target;
    struct extent extent;
    int direction;
};

struct peer_parameters {
    struct side source;
    int source_device;
    struct side target;
    int target_device;
    struct extent extent;
};

static char *start_of(const struct side *side)
{
    const struct pitched_pointer *pointer = &side->pointer;
    const struct position *at = &side->position;
    return (char *)((uintptr_t)pointer->address + (at->z * pointer->height + at->y) * pointer->pitch + at->x);
}

static cudaError_t copy_sides(const char *function, const struct side *target, const struct side *source, struct extent extent,
                              const struct sim_device *device, void *stream, bool is_synchronous)
{
    const struct pitched_pointer *to = &target->pointer, *from = &source->pointer;
    if (target->array || source->array)
        return refuse_arrays(function);
    const struct planes planes = {
        {start_of(target), start_of(source), to->pitch, from->pitch, extent.width, extent.height},
        extent.depth, to->pitch * to->height, from->pitch * from->height,
    };
    RETURN_UNLESS(to->address && from->address, ERROR_INVALID_VALUE);
    RETURN_IF_ERROR(check_pitches(&planes.rows));
    if (extent.depth > 1 && (extent.height > to->height || extent.height > from->height))
        return ERROR_INVALID_VALUE;
    return copy_planes(stream, device, planes, is_synchronous);
}

static cudaError_t copy_box(const char *function, const struct copy_parameters *copied, void *stream, bool is_synchronous)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    REQUIRE(copied);
    RETURN_IF_ERROR(finish(check_direction(copied->direction)));
    if (is_synchronous)
        RETURN_IF_ERROR(enter_synchronous(function, &device));
    return finish(copy_sides(function, &copied->target, &copied->source, copied->extent, device, stream, is_synchronous));
}

EXPORT cudaError_t cudaMemcpy3D(const struct copy_parameters *copied)
{
    return copy_box(__func__, copied, NULL, true);
}

EXPORT cudaError_t cudaMemcpy3DAsync(const struct copy_parameters *copied, void *stream)
{
    return copy_box(__func__, copied, stream, false);
}

static cudaError_t enter_peers(const char *function, int target_device, int source_device, struct sim_device **device)
{
    RETURN_IF_ERROR(enter_context(function, device));
    int count = visible_device_count();
    bool are_devices = target_device >= 0 && target_device < count && source_device >= 0 && source_device < count;
    return finish(are_devices ? SUCCESS : ERROR_INVALID_DEVICE);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                       size_t size, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_peers(__func__, target_device, source_device, &device));
    return finish(copy_bytes(stream, device, target, source, size, false));
}

/* The host does not wait for copies between devices. */
EXPORT cudaError_t cudaMemcpyPeer(void *target, int target_device, const void *source, int source_device, size_t size)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_peers(__func__, target_device, source_device, &device));
    RETURN_IF_ERROR(unsafe_call());
    return finish(copy_bytes(NULL, device, target, source, size, false));
}

static cudaError_t copy_between_peers(const char *function, const struct peer_parameters *copied, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    REQUIRE(copied);
    RETURN_IF_ERROR(enter_peers(function, copied->target_device, copied->source_device, &device));
    return finish(copy_sides(function, &copied->target, &copied->source, copied->extent, device, stream, false));
}

EXPORT cudaError_t cudaMemcpy3DPeer(const struct peer_parameters *copied)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    return copy_between_peers(__func__, copied, NULL);
}

EXPORT cudaError_t cudaMemcpy3DPeerAsync(const struct peer_parameters *copied, void *stream)
{
    return copy_between_peers(__func__, copied, stream);
}

/* Fills: the synchronous ones do not wait for the default stream. */

static cudaError_t fill_box(const char *function, struct pitched_pointer filled, int value, struct extent extent, void *stream,
                            bool is_synchronous)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    if (is_synchronous)
        RETURN_IF_ERROR(unsafe_call());
    if (extent.width > filled.pitch || filled.pitch > MAX_PITCH || (extent.depth > 1 && extent.height > filled.height))
        return fail(ERROR_INVALID_VALUE);
    const struct copy rows = {filled.address, NULL, filled.pitch, 0, extent.width, extent.height};
    return finish(fill_planes(stream, device, (struct planes){rows, extent.depth, filled.pitch * filled.height, 0}, value));
}

EXPORT cudaError_t cudaMemset(void *target, int value, size_t size)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(unsafe_call());
    return finish(fill_bytes(NULL, device, target, value, size));
}

EXPORT cudaError_t cudaMemsetAsync(void *target, int value, size_t size, void *stream)
{
    ENTER_CONTEXT(device);
    return finish(fill_bytes(stream, device, target, value, size));
}

static cudaError_t fill_plane(const char *function, void *target, size_t pitch, int value, size_t width, size_t height,
                              void *stream, bool is_synchronous)
{
    return fill_box(function, (struct pitched_pointer){target, pitch, width, height}, value, (struct extent){width, height, 1},
                    stream, is_synchronous);
}

EXPORT cudaError_t cudaMemset2D(void *target, size_t pitch, int value, size_t width, size_t height)
{
    return fill_plane(__func__, target, pitch, value, width, height, NULL, true);
}

EXPORT cudaError_t cudaMemset2DAsync(void *target, size_t pitch, int value, size_t width, size_t height, void *stream)
{
    return fill_plane(__func__, target, pitch, value, width, height, stream, false);
}

EXPORT cudaError_t cudaMemset3D(struct pitched_pointer target, int value, struct extent extent)
{
    return fill_box(__func__, target, value, extent, NULL, true);
}

EXPORT cudaError_t cudaMemset3DAsync(struct pitched_pointer target, int value, struct extent extent, void *stream)
{
    return fill_box(__func__, target, value, extent, stream, false);
}
