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

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

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

inline uint64_t mix(uint64_t hash, uint64_t value)
{
    return (hash ^ value) * 0x9E3779B97F4A7C15ULL + (hash >> 29);
}

// What a thread has learned of calls, by their kernels and the signatures of their arguments. A call has four places, of which
// the newest call takes the oldest: with one place, two calls of a loop that share it would never be known.
template <typename Known>
class Memo {
public:
    // Returns what is known of a call, or null.
    Known* find(const void* kernel, uint64_t signature)
    {
        for (Known& known : set(kernel, signature))
            if (known.kernel == kernel && known.signature == signature)
                return &known;
        return nullptr;
    }

    void keep(Known known)
    {
        if (Known* const found = find(known.kernel, known.signature)) {
            *found = std::move(known);
            return;
        }
        auto& places = set(known.kernel, known.signature);
        std::move_backward(places.begin(), places.end() - 1, places.end());
        places.front() = std::move(known);
    }

private:
    static constexpr int SET_BITS = 10;
    using Set = std::array<Known, 4>;

    Set& set(const void* kernel, uint64_t signature)
    {
        return sets_[mix(signature, reinterpret_cast<uintptr_t>(kernel)) >> (64 - SET_BITS)];
    }

    std::vector<Set> sets_ = std::vector<Set>(size_t(1) << SET_BITS);
};

// Which of the first 64 allocations of an op became results the last time, by their order. An allocation that once did not is
// never expected to again.
struct Pattern {
    const void* kernel = nullptr;
    uint64_t signature = 0;
    uint64_t expected = 0;
    uint64_t failed = 0;
};
inline thread_local Memo<Pattern> patterns;

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

// Returns a hash of all that the memory of CUDA's kernel depends on: what sign() has, the device, factors, and alignment; not 0.
inline uint64_t sign_memory(const c10::IValue* arguments, size_t count, c10::DeviceIndex device)
{
    constexpr uintptr_t LARGEST_VECTOR = 64; // bytes; kernels look at the alignment of what they load
    uint64_t hash = mix(sign(arguments, count), uint64_t(device));
    for (size_t position = 0; position < count; position++) {
        const c10::IValue& value = arguments[position];
        if (value.isDouble()) {
            hash = mix(hash, std::hash<double>{}(value.toDouble()));
        } else if (value.isTensor() && value.toTensor().defined()) {
            const auto* tensor = value.unsafeToTensorImpl();
            const auto address = reinterpret_cast<uintptr_t>(tensor->unsafe_storage().data()) +
                                 tensor->dtype().itemsize() * uintptr_t(tensor->storage_offset());
            hash = mix(hash, address % LARGEST_VECTOR);
        }
    }
    return hash | 1;
}

// The memory that CUDA's kernel takes in a call, beside its results. Python says the sizes when it has seen such a call.
struct KernelMemory {
    const void* kernel = nullptr;
    uint64_t signature = 0;
    std::vector<size_t> sizes;
};

inline thread_local Memo<KernelMemory> kernel_memory;

// Allocates memory of these sizes, and frees it.
inline void take_memory(const std::vector<size_t>& sizes)
{
    c10::SmallVector<c10::DataPtr, 8> held;
    for (const size_t size : sizes)
        held.push_back(device_allocator()->allocate(size));
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
            if (const Pattern* const found = patterns.find(kernel_, signature_))
                pattern_ = *found;
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
            patterns.keep(learned);
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
