// Which memory a call of an op reads and writes, for sure or possibly, while races are to be found: for call.hpp.
#pragma once

#include "call.hpp"

namespace engine {

// Tells race detection which memory the call accesses. Written arguments count as written, others as read.
inline void Kernel::add_arguments(const Stack& stack, RaceScope& scope) const
{
    bool is_first = true;
    // Some schemas do not say that a norm updates its statistics.
    const bool updates = (race_flags_ & RACE_UPDATES_STATISTICS) && (training_ < 0 || argument(stack, size_t(training_)).toBool());
    const auto add = [&](const TensorImpl* tensor, bool is_written) {
        if (tensor == c10::UndefinedTensorImpl::singleton())
            return;
        const bool is_part = is_first && (race_flags_ & RACE_USES_PART);
        is_first = false;
        scope.add(tensor, (is_written ? RACE_WRITES : 0) | (is_part ? RACE_PART : 0));
    };
    for (size_t i = 0; i < arguments_.size(); i++) {
        const auto [position, kind] = arguments_[i];
        const c10::IValue& value = argument(stack, position);
        if (kind == Kind::TENSOR && value.isTensor())
            add(value.unsafeToTensorImpl(), writes_[i] || (updates && are_statistics_[i]));
        else if ((kind == Kind::TENSOR_LIST || kind == Kind::OPTIONAL_TENSOR_LIST) && value.isList())
            for (const c10::IValue& item : value.toListRef())
                if (item.isTensor())
                    add(item.unsafeToTensorImpl(), writes_[i]);
    }
}

inline void Kernel::call_with_races(const c10::OperatorHandle& op, Stack* stack)
{
    RaceScope scope(name_.c_str());
    add_arguments(*stack, scope);
    const bool is_copy = race_flags_ & RACE_COPIES;
    const auto source = is_copy ? argument(*stack, 1).toTensor().device() : c10::Device(c10::kCPU);
    const auto target = is_copy ? argument(*stack, 0).toTensor().device() : c10::Device(c10::kCPU);
    const bool is_between_devices = is_copy && source.is_cuda() && target.is_cuda() && source != target;
    if (is_copy && is_transfer(*stack)) {
        scope.begin_transfer();
        call(op, stack);
        RaceScope::raise();
        return;
    }
    if (is_between_devices)
        RaceScope::order(source.index(), target.index());
    scope.record();
    if (is_between_devices)
        RaceScope::order(source.index(), target.index());
    RaceScope::raise();
    call(op, stack);
    const size_t first = stack->size() - returns_.size();
    for (size_t i = 0; i < returns_.size(); i++) {
        const c10::IValue& value = (*stack)[first + i];
        if (returns_[i] >= 0)
            continue;
        if (value.isTensor()) {
            if (value.toTensor().defined())
                scope.add(value.unsafeToTensorImpl(), RACE_WRITES);
        } else if (value.isTensorList()) {
            for (const at::Tensor& result : value.toTensorVector())
                if (result.defined())
                    scope.add(result.unsafeGetTensorImpl(), RACE_WRITES);
        }
    }
    scope.record();
    RaceScope::raise();
}

} // namespace engine
