// Memory of results. While an op runs, large allocations of the CPU's kernel that become results come from CUDA's allocator, so
// that nothing needs to be copied. All others come from the host: small results are copied to the device when the op ends, and
// scratch memory that the CPU's kernel frees inside the op is not charged to the device.
//
// Which allocations become results is learned. The first call with some sizes and types allocates on the host and copies; the
// next calls with the same sizes and types allocate in the same order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace engine {

// To copy fewer bytes costs less than to look up a pattern. Tests change it.
inline size_t large_bytes = 32768;
constexpr size_t MAXIMUM_PATTERNS = 1024;

inline c10::Allocator* host_allocator;

inline c10::Allocator* device_allocator()
{
    return at::detail::getCUDAHooks().getCUDADeviceAllocator();
}

// Which large allocations of an op became results the last time, by their order. An allocation that once did not is never
// expected to again.
struct Pattern {
    std::vector<bool> expected;
    std::vector<bool> failed;
};

class Patterns {
public:
    Pattern find(uint64_t signature)
    {
        std::lock_guard<std::mutex> guard(lock_);
        auto found = patterns_.find(signature);
        return found == patterns_.end() ? Pattern() : found->second;
    }

    void store(uint64_t signature, Pattern pattern)
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (patterns_.size() >= MAXIMUM_PATTERNS)
            patterns_.clear();
        patterns_[signature] = std::move(pattern);
    }

private:
    std::mutex lock_;
    std::unordered_map<uint64_t, Pattern> patterns_;
};

// The allocations of one call.
class Route {
public:
    Route(Patterns& patterns, uint64_t signature) : patterns_(patterns), signature_(signature), outer_(active)
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
        if (allocations_.empty())
            pattern_ = patterns_.find(signature_);
        const size_t order = allocations_.size();
        const bool is_expected = order < pattern_.expected.size() && pattern_.expected[order];
        c10::DataPtr data = (is_expected ? device_allocator() : host_allocator)->allocate(size);
        allocations_.push_back({data.get(), is_expected, false});
        if (!is_expected)
            return data;
        const auto deleter = data.get_deleter();
        void* const address = data.get();
        return {address, data.release_context(), deleter, c10::Device(c10::kCPU)};
    }

    // Notes that a result has this memory, and returns whether it is the device's.
    bool take(const void* address)
    {
        for (auto& allocation : allocations_)
            if (allocation.address == address && !allocation.is_result) {
                allocation.is_result = true;
                return allocation.is_on_device;
            }
        return false;
    }

    // Remembers which allocations became results.
    void learn()
    {
        if (allocations_.empty())
            return;
        bool has_changed = false;
        const size_t count = allocations_.size();
        pattern_.expected.resize(std::max(count, pattern_.expected.size()));
        pattern_.failed.resize(std::max(count, pattern_.failed.size()));
        for (size_t order = 0; order < count; order++) {
            const auto& allocation = allocations_[order];
            if (allocation.is_on_device && !allocation.is_result)
                pattern_.failed[order] = true;
            const bool is_expected = allocation.is_result && !pattern_.failed[order];
            has_changed |= is_expected != pattern_.expected[order];
            pattern_.expected[order] = is_expected;
        }
        if (has_changed)
            patterns_.store(signature_, std::move(pattern_));
    }

    static thread_local Route* active;

private:
    struct Allocation {
        const void* address;
        bool is_on_device;
        bool is_result;
    };

    Patterns& patterns_;
    uint64_t signature_;
    Route* outer_;
    Pattern pattern_;
    std::vector<Allocation> allocations_;
};

inline thread_local Route* Route::active = nullptr;

// The CPU's allocator of this process.
class Router final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t size) override
    {
        Route* const route = Route::active;
        return C10_LIKELY(route == nullptr || size < large_bytes) ? host_allocator->allocate(size) : route->allocate(size);
    }

    c10::DeleterFnPtr raw_deleter() const override;

    void copy_data(void* target, const void* source, std::size_t size) const override
    {
        default_copy_data(target, source, size);
    }
};

inline int (*pointer_attributes)(void* attributes, const void* address); // cudaPointerGetAttributes

inline bool is_device_memory(const void* address)
{
    enum { DEVICE_MEMORY = 2 };
    int attributes[64] = {0}; // the first is the type of the memory
    return pointer_attributes(attributes, address) == 0 && attributes[0] == DEVICE_MEMORY;
}

// Memory that was allocated raw inside an op may be the device's.
inline void delete_raw(void* address)
{
    (is_device_memory(address) ? device_allocator() : host_allocator)->raw_deleter()(address);
}

inline c10::DeleterFnPtr Router::raw_deleter() const
{
    return &delete_raw;
}

inline Router router;

} // namespace engine
