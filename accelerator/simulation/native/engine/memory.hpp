// Memory of results. While an op runs, allocations of the CPU's kernel that become results come from CUDA's allocator, so that
// nothing needs to be copied. All others come from the host: scratch memory that the CPU's kernel frees inside the op is not
// charged to the device.
//
// Which allocations become results is learned. A thread's first call with some sizes and types allocates on the host and copies;
// its next calls with the same sizes and types allocate in the same order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/SmallVector.h>

#include <array>

#include "interface/engine_runtime.h"

namespace engine {

inline c10::Allocator* host_allocator;

inline c10::Allocator* device_allocator()
{
    return at::detail::getCUDAHooks().getCUDADeviceAllocator();
}

// Allocates device memory of a tensor's size, and frees it.
inline void take_memory(const at::Tensor& tensor)
{
    const c10::DataPtr memory = device_allocator()->allocate(tensor.nbytes());
}

// Which of the first 64 allocations of an op became results the last time, by their order. An allocation that once did not is
// never expected to again.
struct Pattern {
    const void* kernel = nullptr;
    uint64_t signature = 0;
    uint64_t expected = 0;
    uint64_t failed = 0;
};

// Returns the place in this thread for a kernel's pattern. A newer pattern replaces an older one there.
inline Pattern& find_pattern(const void* kernel, uint64_t signature)
{
    static thread_local std::array<Pattern, 1024> patterns;
    return patterns[(signature ^ reinterpret_cast<uintptr_t>(kernel) >> 6) % patterns.size()];
}

inline uint64_t mix(uint64_t hash, uint64_t value)
{
    return (hash ^ value) * 0x9E3779B97F4A7C15ULL + (hash >> 29);
}

// Returns a hash of all that the sizes of results and scratch memory depend on; not 0.
inline uint64_t sign(const c10::IValue* arguments, size_t count)
{
    uint64_t hash = 1;
    const auto add = [&hash](const c10::IValue& value) {
        if (value.isTensor()) {
            const auto* tensor = value.unsafeToTensorImpl();
            if (tensor == c10::UndefinedTensorImpl::singleton())
                return;
            hash = mix(hash, uint64_t(c10::typeMetaToScalarType(tensor->dtype())) << 8 | uint64_t(tensor->dim()));
            for (const int64_t size : tensor->sizes())
                hash = mix(hash, uint64_t(size));
            for (const int64_t stride : tensor->strides())
                hash = mix(hash, uint64_t(stride));
        } else if (value.isInt()) {
            hash = mix(hash, uint64_t(value.toInt()));
        } else if (value.isBool()) {
            hash = mix(hash, value.toBool());
        } else {
            hash = mix(hash, value.isNone());
        }
    };
    for (size_t position = 0; position < count; position++) {
        const c10::IValue& value = arguments[position];
        if (value.isIntList()) {
            for (const int64_t item : value.toIntVector())
                hash = mix(hash, uint64_t(item));
        } else if (value.isList()) {
            for (const c10::IValue& item : value.toListRef())
                add(item);
        } else {
            add(value);
        }
    }
    return hash | 1;
}

// The allocations of one call.
class Route {
public:
    Route(const void* kernel, uint64_t signature) : kernel_(kernel), signature_(signature), outer_(active)
    {
        active = this;
    }

    ~Route()
    {
        active = outer_;
    }

    Route(const Route&) = delete;
    Route& operator=(const Route&) = delete;

    c10::DataPtr allocate(size_t size)
    {
        active = nullptr; // CUDA's allocator may call other code
        struct Restore {
            Route* route;
            ~Restore() { active = route; }
        } restore{this};
        if (signature_ == 0)
            return host_allocator->allocate(size);
        if (allocations_.empty()) {
            const Pattern& found = find_pattern(kernel_, signature_);
            if (found.kernel == kernel_ && found.signature == signature_)
                pattern_ = found;
        }
        const uint64_t bit = allocations_.size() < 64 ? uint64_t(1) << allocations_.size() : 0;
        const bool is_expected = pattern_.expected & bit;
        c10::DataPtr data = (is_expected ? device_allocator() : host_allocator)->allocate(size);
        allocations_.push_back({data.get(), is_expected, false});
        if (!is_expected)
            return data;
        const auto deleter = data.get_deleter();
        void* const address = data.get();
        return {address, data.release_context(), deleter, c10::Device(c10::kCPU)};
    }

    // Notes that a result has this memory, and returns whether it is the device's. The last allocation at an address is meant:
    // scratch memory that was freed may have had the same.
    bool take(const void* address)
    {
        for (auto allocation = allocations_.rbegin(); allocation != allocations_.rend(); ++allocation)
            if (allocation->address == address) {
                allocation->is_result = true;
                return allocation->is_on_device;
            }
        return false;
    }

    // Remembers which allocations became results.
    void learn()
    {
        Pattern learned{kernel_, signature_, 0, pattern_.failed};
        uint64_t bit = 1;
        for (const auto& allocation : allocations_) {
            if (allocation.is_on_device && !allocation.is_result)
                learned.failed |= bit;
            if (allocation.is_result)
                learned.expected |= bit;
            bit <<= 1;
        }
        learned.expected &= ~learned.failed;
        if (learned.expected != pattern_.expected || learned.failed != pattern_.failed)
            find_pattern(kernel_, signature_) = learned;
    }

    static thread_local Route* active;

private:
    struct Allocation {
        const void* address;
        bool is_on_device;
        bool is_result;
    };

    const void* kernel_;
    uint64_t signature_; // of the call, or 0 if all memory comes from the host
    Route* outer_;
    Pattern pattern_;
    c10::SmallVector<Allocation, 8> allocations_;
};

inline thread_local Route* Route::active = nullptr;

// The CPU's allocator of this process.
class Router final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t size) override
    {
        Route* const route = Route::active;
        return C10_LIKELY(route == nullptr || size == 0) ? host_allocator->allocate(size) : route->allocate(size);
    }

    c10::DeleterFnPtr raw_deleter() const override;

    void copy_data(void* target, const void* source, std::size_t size) const override
    {
        default_copy_data(target, source, size);
    }
};

inline const engine_runtime* runtime; // of the simulated CUDA runtime

// Memory that was allocated raw inside an op may be the device's.
inline void delete_raw(void* address)
{
    (runtime->is_device_memory(address) ? device_allocator() : host_allocator)->raw_deleter()(address);
}

inline c10::DeleterFnPtr Router::raw_deleter() const
{
    return &delete_raw;
}

inline Router& router = *new Router; // never freed: threads may use it while the process ends

} // namespace engine
