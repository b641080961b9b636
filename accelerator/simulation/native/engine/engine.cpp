// The engine: one kernel for the usual calls of all ops, compiled against the headers of the installed torch. Without it, the
// same ops run in Python, slower (_inside/ops/dispatch.py).
//
// memory.hpp has the memory of results, tensors.hpp the conversion of tensors, device.hpp the device of a call, races.hpp race
// detection, attention.hpp attention, call.hpp a call, race_call.hpp a call whose accesses race detection records,
// shims.hpp the calls of AOTInductor's code.
#include "common/same_build.h"
#include "race_call.hpp"

#include <c10/core/CPUAllocator.h>

#include <pthread.h>

#include <cstddef>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

#include "shims.hpp"

namespace {

struct IgnoreWarnings final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

} // namespace

// Routes the CPU's allocations of this process through the engine. Returns a problem, or null.
EXPORT const char* accelerator_engine_start(const engine_runtime* runtime)
{
    if (const char* const problem = find_other_build(runtime->boundary, runtime))
        return problem;
    if (c10::GetAllocator(c10::kCPU) == &engine::router) // a second copy of the Python modules has started it already
        return nullptr;
    engine::runtime = runtime;
    engine::make_span();
    engine::host_allocator = c10::GetAllocator(c10::kCPU);
    c10::SetAllocator(c10::kCPU, &engine::router, UINT8_MAX);
    pthread_atfork(nullptr, nullptr, [] { engine::is_forked = true; });
    engine::races = runtime->races;
    if (engine::races)
        engine::races->use_storages(&engine::storages);
    return nullptr;
}

// Describes what Python fills in and uses, as _build/boundary.py reads it.
EXPORT const char* accelerator_engine_boundary()
{
    static const std::string text = [] {
        std::string lines;
        const auto add = [&lines](const char* name, uint64_t first, uint64_t second) {
            lines += std::string(name) + " " + std::to_string(first) + " " + std::to_string(second) + "\n";
        };
#define FIELD(type, field) add("op_rules." #field, offsetof(op_rules, field), sizeof(type));
        OP_RULES(FIELD)
        add("op_rules", 0, sizeof(op_rules));
#define OP_FLAG(name, value) add("op_flags." #name, name, 0);
        OP_FLAGS(OP_FLAG)
#define RACE_FLAG(name, value) add("race_flags." #name, name, 0);
        OP_RACE_FLAGS(RACE_FLAG)
#define ACCESS_FLAG(name, value) add("race_access_flags." #name, name, 0);
        RACE_ACCESS_FLAGS(ACCESS_FLAG)
#define CODE_OWNER(name, value) add("race_code_owners." #name, name, 0);
        RACE_CODE_OWNERS(CODE_OWNER)
        add("limits.RACE_TEXT_SIZE", RACE_TEXT_SIZE, 0);
        return lines;
    }();
    return text.c_str();
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

// Returns the number of a tensor's type, which is a bit of op_rules.python_dtypes.
EXPORT int accelerator_engine_dtype_of(const c10::TensorImpl* tensor)
{
    return int(c10::typeMetaToScalarType(tensor->dtype()));
}

EXPORT void accelerator_engine_describe(void* kernel, const op_rules* rules)
{
    static_cast<engine::Kernel*>(kernel)->describe(*rules);
}

EXPORT void accelerator_engine_describe_races(void* kernel, uint32_t flags)
{
    static_cast<engine::Kernel*>(kernel)->set_race_flags(flags);
}

// The accesses of a call that Python makes, such as of a copy that a rehearsal does not perform.
EXPORT void* accelerator_engine_begin_accesses(const char* name)
{
    return new engine::RaceScope(name);
}

EXPORT void accelerator_engine_add_access(void* scope, const c10::TensorImpl* tensor, int32_t flags)
{
    static_cast<engine::RaceScope*>(scope)->add(tensor, flags);
}

EXPORT void accelerator_engine_record_accesses(void* scope)
{
    static_cast<engine::RaceScope*>(scope)->record();
}

// Lets the streams of two devices wait for each other.
EXPORT void accelerator_engine_order_devices(int first, int second)
{
    engine::RaceScope::order(c10::DeviceIndex(first), c10::DeviceIndex(second));
}

EXPORT void accelerator_engine_end_accesses(void* scope)
{
    delete static_cast<engine::RaceScope*>(scope);
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

// Python calls an op's kernel next, and takes the memory that CUDA's kernel takes itself.
EXPORT void accelerator_engine_begin_learning()
{
    engine::learned_memory.signature = engine::BEGINS;
}

// Tells the sizes of that memory, or a negative count if the call has failed.
EXPORT void accelerator_engine_end_learning(const size_t* sizes, int count)
{
    auto& learned = engine::learned_memory;
    if (count >= 0 && (learned.signature & 1))
        engine::kernel_memory.keep({learned.kernel, learned.signature, {sizes, sizes + count}});
    learned.signature = 0;
}

EXPORT void accelerator_engine_release_workspaces()
{
    engine::workspace_generation++;
}

EXPORT uint64_t accelerator_engine_copies()
{
    return engine::copies;
}
