// The engine: one kernel for the usual calls of all ops, compiled against the headers of the installed torch. Without it, the
// same ops run in Python, slower (_kernels/dispatch.py).
//
// memory.hpp has the memory of results, tensors.hpp the conversion of tensors, device.hpp
// the device of a call, races.hpp race detection, attention.hpp attention, call.hpp a call.
#include "race_call.hpp"

#include <c10/core/CPUAllocator.h>

#include <pthread.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct IgnoreWarnings final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

} // namespace

// Addresses of the simulated runtime and driver.
struct engine_runtime {
    void* attention;
    void* is_stream_free;
    void* pointer_attributes;
    void* clear_memory;
};

// Routes the CPU's allocations of this process through the engine.
EXPORT void accelerator_engine_start(const engine_runtime* runtime)
{
    using namespace engine;
    if (c10::GetAllocator(c10::kCPU) == &router) // a second copy of the Python modules has started it already
        return;
    attention = static_cast<std::atomic<int>*>(runtime->attention);
    is_stream_free = reinterpret_cast<decltype(is_stream_free)>(runtime->is_stream_free);
    pointer_attributes = reinterpret_cast<decltype(pointer_attributes)>(runtime->pointer_attributes);
    clear_memory = reinterpret_cast<decltype(clear_memory)>(runtime->clear_memory);
    make_span();
    host_allocator = c10::GetAllocator(c10::kCPU);
    c10::SetAllocator(c10::kCPU, &router, UINT8_MAX);
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

// Registers the kernel of an op, and returns it for accelerator_engine_describe(). Until then Python handles all calls.
EXPORT void* accelerator_engine_override(const char* name, const char* overload)
{
    using namespace engine;
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto op = dispatcher.findSchema({name, overload});
    if (!op)
        return nullptr;
    auto kernel = std::make_unique<Kernel>(op->schema());
    auto* const result = kernel.get();
    IgnoreWarnings ignore; // torch 2.6 warns that a kernel is replaced
    c10::WarningUtils::WarningHandlerGuard guard(&ignore);
    // Never unregistered: libraries are unloaded in no particular order when the process ends.
    static auto* const handles = new std::vector<c10::RegistrationHandleRAII>();
    handles->push_back(dispatcher.registerImpl({name, overload}, DispatchKey::CUDA,
                                               c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)), std::nullopt,
                                               nullptr, "accelerator"));
    return result;
}

// Returns the number of a tensor's type, which is a bit of Rules.python_dtypes.
EXPORT int accelerator_engine_dtype_of(const c10::TensorImpl* tensor)
{
    return int(c10::typeMetaToScalarType(tensor->dtype()));
}

EXPORT void accelerator_engine_describe(void* kernel, const engine::Rules* rules)
{
    static_cast<engine::Kernel*>(kernel)->describe(*rules);
}

// Lets ops report what they access. The functions live as long as the process.
EXPORT void accelerator_engine_find_races(const engine::Races* functions)
{
    static engine::Races copy;
    copy = *functions;
    copy.owners(&engine::release_owner);
    engine::races = &copy;
}

EXPORT void accelerator_engine_describe_races(void* kernel, uint32_t flags)
{
    static_cast<engine::Kernel*>(kernel)->set_race_flags(flags);
}

EXPORT int accelerator_engine_is_forked()
{
    return engine::is_forked;
}

// Python calls this in a forked child, when it has found that the device can be used there.
EXPORT void accelerator_engine_resume()
{
    engine::is_forked = false;
}

EXPORT void accelerator_engine_release_workspaces()
{
    engine::workspace_generation++;
}

EXPORT uint64_t accelerator_engine_copies()
{
    return engine::copies;
}
