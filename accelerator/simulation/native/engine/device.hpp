// The device of a call: its current stream, workspaces and random numbers.
#pragma once

#include "tensors.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace engine {

inline std::atomic<bool> is_forked{false};
inline std::atomic<uint64_t> workspace_generation{0};

inline const c10::impl::DeviceGuardImplInterface& cuda()
{
    static const auto* const guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
    return *guard;
}

// Whether the current stream of the device neither captures nor waits, and no error is pending.
inline bool is_current_stream_free(c10::DeviceIndex device)
{
    if (C10_LIKELY(runtime->needs_checks->load(std::memory_order_relaxed) == 0))
        return true;
    void* stream = nullptr;
    return aoti_torch_get_current_cuda_stream(device, &stream) == 0 && runtime->is_stream_free(stream, device);
}

// The devices and streams for which Python has allocated a workspace in this thread.
struct Workspaces {
    uint64_t generation = 0;
    std::vector<std::pair<c10::DeviceIndex, c10::StreamId>> streams;

    static std::pair<c10::DeviceIndex, c10::StreamId> current(c10::DeviceIndex device)
    {
        return {device, cuda().getStream(c10::Device(c10::kCUDA, device)).id()};
    }

    bool has(c10::DeviceIndex device)
    {
        if (C10_UNLIKELY(generation != workspace_generation)) {
            generation = workspace_generation;
            streams.clear();
        }
        return std::find(streams.begin(), streams.end(), current(device)) != streams.end();
    }

    void add(c10::DeviceIndex device)
    {
        streams.push_back(current(device));
    }
};
inline thread_local Workspaces workspaces;

// Sets the current device for a block.
class DeviceScope {
public:
    explicit DeviceScope(c10::Device device) : previous_(cuda().getDevice())
    {
        if (C10_UNLIKELY(previous_ != device)) {
            cuda().setDevice(device);
            is_changed_ = true;
        }
    }
    ~DeviceScope()
    {
        if (is_changed_)
            cuda().uncheckedSetDevice(previous_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

private:
    c10::Device previous_;
    bool is_changed_ = false;
};

constexpr DispatchKeySet HANDLED_KEYS = NEUTRAL_KEYS | c10::functorch_transforms_ks | c10::python_ks;

inline at::Generator cuda_generator(const c10::IValue& value, c10::Device device)
{
    if (!value.isNone()) {
        at::Generator generator = value.toGenerator();
        TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                    generator.device().type(), "'");
        return generator;
    }
    return at::globalContext().defaultGenerator(device);
}

// The numbers that one call draws from CUDA generators. They are given back unless the call succeeds: CUDA's kernels draw after all
// that may fail.
class Draws {
public:
    Draws() = default;
    Draws(const Draws&) = delete;
    Draws& operator=(const Draws&) = delete;

    ~Draws()
    {
        if (C10_LIKELY(!generator_.defined()))
            return;
        std::lock_guard<std::mutex> guard(generator_.mutex());
        generator_.set_offset(offset_);
    }

    // Returns the CPU's next random numbers for a CUDA generator, as random.py seeds them.
    at::Generator draw(at::Generator generator)
    {
        constexpr uint64_t OFFSET_STEP = 4;
        std::lock_guard<std::mutex> guard(generator.mutex());
        const uint64_t offset = generator.get_offset();
        generator.set_offset(offset + OFFSET_STEP);
        generator_ = generator;
        offset_ = offset;
        uint64_t bits = generator.current_seed() + 0x9E3779B97F4A7C15ULL * (offset / OFFSET_STEP + 1);
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ULL;
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBULL;
        return at::detail::createCPUGenerator((bits ^ (bits >> 31)) & 0xFFFFFFFFULL);
    }

    // Notes that the call has succeeded.
    void keep()
    {
        generator_ = {};
    }

private:
    at::Generator generator_;
    uint64_t offset_ = 0;
};

} // namespace engine
