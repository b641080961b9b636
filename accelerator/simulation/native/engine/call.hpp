// The way of an op like `x + 1`: its CUDA tensors are replaced by CPU aliases, the CPU's kernel runs, and its results become CUDA
// tensors. Calls that this file does not handle run in Python.
#pragma once

#include "attention.hpp"
#include "interface/op_rules.h"
#include "races.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>

namespace engine {

enum class Kind : uint8_t { TENSOR, TENSOR_LIST, OPTIONAL_TENSOR_LIST, GENERATOR, DEVICE, OTHER };

constexpr auto OVERRIDE_KEY = DispatchKey::PrivateUse2; // no device has it
constexpr DispatchKeySet OVERRIDE_KEYS(OVERRIDE_KEY);
constexpr int64_t MOST_DIMENSIONS = 24; // with more, some of CUDA's kernels refuse a tensor

// The call of this thread whose memory Python takes, and then tells. Its signature is BEGINS until the kernel is called, and 0 if
// the engine does not handle the call.
inline thread_local KernelMemory learned_memory;
constexpr uint64_t BEGINS = 2; // other signatures are odd

// What a look at the arguments tells about a call.
struct Look {
    TensorImpl* first = nullptr; // the first CUDA tensor
    c10::DeviceIndex device = -1;
    bool lacks_workspace = false;
    const KernelMemory* memory = nullptr; // that CUDA's kernel takes
};

// The kernel of one op.
class Kernel final : public c10::OperatorKernel {
public:
    explicit Kernel(const c10::FunctionSchema& schema);

    void operator()(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack)
    {
        if (C10_UNLIKELY(races != nullptr) && learned_memory.signature != BEGINS) // the outer call has told its accesses
            call_with_races(op, stack);
        else
            call(op, stack);
    }

    void call(const c10::OperatorHandle& op, Stack* stack)
    {
        Look look;
        if (C10_LIKELY(run(op, stack, look)))
            return;
        learned_memory.signature = 0;
        op.redispatchBoxed(OVERRIDE_KEYS, stack);
        if (look.lacks_workspace)
            workspaces.add(look.device);
    }

    void set_race_flags(uint32_t flags)
    {
        race_flags_ = flags;
    }

    // From then on this kernel handles the usual calls.
    void describe(const op_rules& rules)
    {
        rules_ = rules;
        is_described_.store(true, std::memory_order_release);
    }

private:
    bool run(const c10::OperatorHandle& op, Stack* stack, Look& look);
    bool look_at(TensorImpl* tensor, size_t index, Look& look) const;
    bool look_at_tensors(const Stack& stack, Look& look) const;
    bool is_usual(const Stack& stack, Look& look) const;
    bool has_integer_indices(const Stack& stack) const;
    bool is_large(const Stack& stack) const;
    bool knows_memory(const Stack& stack, Look& look) const;
    bool reduces_fastest(const Stack& stack) const;
    bool is_transfer(const Stack& stack) const;
    bool clear(const Stack& stack) const;
    void flip_bit(const Stack& stack, const Look& look, int bit) const;
    bool compute(const c10::OperatorHandle& op, Stack* stack, const Look& look);
    void call_with_races(const c10::OperatorHandle& op, Stack* stack);
    void add_arguments(const Stack& stack, RaceScope& scope) const;

    const c10::IValue& argument(const Stack& stack, size_t position) const
    {
        return stack[stack.size() - argument_count_ + position];
    }

    std::atomic<bool> is_described_{false};
    op_rules rules_{};
    std::vector<std::pair<uint32_t, Kind>> arguments_; // those that may hold tensors, generators or devices
    std::vector<uint32_t> others_;
    std::vector<bool> writes_;                         // whether the op writes each of them
    std::vector<bool> are_statistics_;                 // whether each is the running statistics of a norm; the rules have these
                                                       // as state_arguments, but only from the first call on
    int64_t training_ = -1;                            // the argument that says whether those are updated, if there is one
    std::vector<int32_t> returns_;                     // for each result the argument that it is, or -1
    bool makes_results_ = false;                       // whether one of them is new
    std::string name_;
    uint32_t race_flags_ = 0;
    size_t argument_count_;
    std::optional<Composition> composition_; // in place of the CPU's kernel
};

inline Kernel::Kernel(const c10::FunctionSchema& schema)
    : name_(schema.name()), argument_count_(schema.arguments().size()), composition_(find_composition(schema.name()))
{
    const auto kind_of = [](const c10::TypePtr& type) {
        using c10::TypeKind;
        auto inner = type;
        if (auto optional = inner->cast<c10::OptionalType>())
            inner = optional->getElementType();
        if (inner->kind() == TypeKind::TensorType)
            return Kind::TENSOR;
        if (auto list = inner->cast<c10::ListType>()) {
            if (list->getElementType()->kind() == TypeKind::TensorType)
                return Kind::TENSOR_LIST;
            if (auto optional = list->getElementType()->cast<c10::OptionalType>())
                return optional->getElementType()->kind() == TypeKind::TensorType ? Kind::OPTIONAL_TENSOR_LIST : Kind::OTHER;
        }
        return inner->kind() == TypeKind::GeneratorType ? Kind::GENERATOR
               : inner->kind() == TypeKind::DeviceObjType ? Kind::DEVICE
                                                          : Kind::OTHER;
    };
    const auto& arguments = schema.arguments();
    for (size_t position = 0; position < arguments.size(); position++) {
        const Kind kind = kind_of(arguments[position].real_type());
        if (arguments[position].name() == "training" || arguments[position].name() == "train")
            training_ = int64_t(position);
        if (kind == Kind::OTHER) {
            others_.push_back(uint32_t(position));
            continue;
        }
        arguments_.emplace_back(position, kind);
        const auto* alias = arguments[position].alias_info();
        writes_.push_back(alias && alias->isWrite());
        are_statistics_.push_back(arguments[position].name().rfind("running_", 0) == 0);
    }
    for (const auto& result : schema.returns()) {
        int32_t source = -1;
        const auto* alias = result.alias_info();
        for (size_t position = 0; alias && source < 0 && position < arguments.size(); position++) {
            const auto* other = arguments[position].alias_info();
            if (other && other->isWrite() && other->beforeSets() == alias->beforeSets())
                source = int32_t(position);
        }
        returns_.push_back(source);
        makes_results_ |= source < 0;
    }
}

// Returns whether a tensor, one of the arguments by index, is usual, and takes the device from a CUDA tensor.
inline bool Kernel::look_at(TensorImpl* tensor, size_t index, Look& look) const
{
    if (C10_LIKELY(has_only(tensor, CUDA_KEYS))) {
        const auto* const storage = tensor->unsafe_storage().unsafeGetStorageImpl(); // none if an access is an error
        if (C10_UNLIKELY(storage == nullptr || (storage->data() == nullptr && tensor->numel() != 0)))
            return false; // its storage was freed
        if (C10_UNLIKELY(tensor->numel() > INT32_MAX || tensor->dim() > MOST_DIMENSIONS))
            return false;
        const auto device = tensor->device().index();
        if (look.first == nullptr) {
            look.first = tensor;
            look.device = device;
            if ((rules_.python_dtypes >> uint8_t(c10::typeMetaToScalarType(tensor->dtype()))) & 1)
                return false;
        } else if (C10_UNLIKELY(look.device != device)) {
            return (rules_.flags & COPIES) != 0;
        }
        return true;
    }
    if (!has_only(tensor, CPU_KEYS))
        return tensor == c10::UndefinedTensorImpl::singleton();
    return tensor->is_wrapped_number() || ((rules_.host_arguments >> arguments_[index].first) & 1) ||
           (tensor->dim() == 0 && ((rules_.host_scalars >> arguments_[index].first) & 1) && !writes_[index]);
}

inline bool Kernel::look_at_tensors(const Stack& stack, Look& look) const
{
    for (size_t i = 0; i < arguments_.size(); i++) {
        const auto [position, kind] = arguments_[i];
        const c10::IValue& value = argument(stack, position);
        if (kind == Kind::TENSOR) {
            if (value.isTensor() && !look_at(value.unsafeToTensorImpl(), i, look))
                return false;
        } else if ((kind == Kind::TENSOR_LIST || kind == Kind::OPTIONAL_TENSOR_LIST) && value.isList()) {
            for (const c10::IValue& item : value.toListRef())
                if (item.isTensor() && !look_at(item.unsafeToTensorImpl(), i, look))
                    return false;
        }
    }
    return look.first != nullptr;
}

// Returns whether no index is a mask, which becomes indices whose number the host reads, or is on the host.
inline bool Kernel::has_integer_indices(const Stack& stack) const
{
    for (const auto& [position, kind] : arguments_) {
        if (kind != Kind::OPTIONAL_TENSOR_LIST)
            continue;
        for (const c10::IValue& item : argument(stack, position).toListRef())
            if (item.isTensor()) {
                const auto* index = item.unsafeToTensorImpl();
                if (index == c10::UndefinedTensorImpl::singleton())
                    continue;
                const auto dtype = c10::typeMetaToScalarType(index->dtype());
                if (index->device().is_cpu() || dtype == c10::ScalarType::Bool || dtype == c10::ScalarType::Byte)
                    return false;
            }
    }
    return true;
}

// Returns whether an op reduces the fastest dimension of floating-point numbers in their own type. CUDA's kernel takes little
// memory for that.
inline bool Kernel::reduces_fastest(const Stack& stack) const
{
    const at::Tensor& tensor = argument(stack, size_t(rules_.counted_argument)).toTensor();
    if (!tensor.is_floating_point() || !tensor.is_non_overlapping_and_dense())
        return false;
    if (rules_.dtype_argument >= 0 && !argument(stack, size_t(rules_.dtype_argument)).isNone())
        return false;
    const auto is_fastest = [&tensor](int64_t dim) {
        dim = dim < 0 ? dim + tensor.dim() : dim;
        return dim >= 0 && dim < tensor.dim() && tensor.stride(dim) == 1 && tensor.size(dim) > 1;
    };
    const c10::IValue& dims = argument(stack, size_t(rules_.dims_argument));
    if (dims.isNone())
        return true;
    if (dims.isInt())
        return is_fastest(dims.toInt());
    if (!dims.isIntList())
        return false;
    const auto list = dims.toIntVector();
    return list.empty() || std::any_of(list.begin(), list.end(), is_fastest);
}

// Returns whether the counted argument has so many elements that CUDA's kernel takes memory.
inline bool Kernel::is_large(const Stack& stack) const
{
    if (argument(stack, size_t(rules_.counted_argument)).toTensor().numel() <= rules_.maximum_count)
        return false;
    if (rules_.dims_argument >= 0)
        return !reduces_fastest(stack);
    if (rules_.counting_flag < 0)
        return true;
    const c10::IValue& flag = argument(stack, size_t(rules_.counting_flag));
    if (flag.isBool())
        return flag.toBool();
    const auto flags = flag.toBoolList();
    return flags.get(flags.size() - 1);
}

// Returns whether Python takes the memory of a large call, or has told its sizes.
inline bool Kernel::knows_memory(const Stack& stack, Look& look) const
{
    const uint64_t signature = sign_memory(&argument(stack, 0), argument_count_, look.device);
    if (learned_memory.signature == BEGINS) {
        learned_memory.kernel = this;
        learned_memory.signature = signature;
        return true;
    }
    look.memory = kernel_memory.find(this, signature);
    return look.memory != nullptr;
}

// Returns whether this file handles a call of the op on the current stream.
inline bool Kernel::is_usual(const Stack& stack, Look& look) const
{
    if (!is_current_stream_free(look.device))
        return false;
    const uint32_t flags = rules_.flags;
    if (rules_.selecting_argument >= 0) {
        const c10::IValue& value = argument(stack, size_t(rules_.selecting_argument));
        if (flags & NEEDS_INPUT_DTYPE) {
            if (!value.isInt() || value.toInt() != int64_t(c10::typeMetaToScalarType(look.first->dtype())))
                return false;
        } else if (!value.isBool() || value.toBool() == (rules_.python_value != 0)) {
            return false;
        }
    }
    if (composition_ && !composition_->handles(&argument(stack, 0)))
        return false;
    if ((flags & HAS_ALERT) && at::globalContext().deterministicAlgorithms())
        return false;
    if ((flags & READS_INDICES) && !has_integer_indices(stack))
        return false;
    if ((flags & HAS_WORKSPACE) && !workspaces.has(look.device)) {
        look.lacks_workspace = true;
        return false;
    }
    return rules_.counted_argument < 0 || !is_large(stack) || knows_memory(stack, look);
}

inline bool Kernel::run(const c10::OperatorHandle& op, Stack* stack, Look& look)
{
    if (!is_described_.load(std::memory_order_acquire) || is_forked.load(std::memory_order_relaxed))
        return false;
    if (!look_at_tensors(*stack, look) || !is_usual(*stack, look))
        return false;
    int flipped_bit = -1;
    if (has_faults() && !begin_op(look.device, flipped_bit))
        return false; // Python raises the error
    if (rules_.flags & WAITS) // torch's own wait, for set_sync_debug_mode and the trace of synchronizations
        cuda().synchronizeStream(cuda().getStream(c10::Device(c10::kCUDA, look.device)));
    if ((rules_.flags & COPIES) && is_transfer(*stack))
        op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack); // torch's own kernel
    else if ((!(rules_.flags & CLEARS) || !clear(*stack)) && !compute(op, stack, look))
        return false;
    flip_bit(*stack, look, flipped_bit);
    return true;
}

// Flips a bit of one element of the first result of floating-point numbers, if a fault of the device has one for it.
inline void Kernel::flip_bit(const Stack& stack, const Look& look, int bit) const
{
    for (size_t i = stack.size() - returns_.size(); C10_UNLIKELY(bit >= 0) && i < stack.size(); i++) {
        if (!stack[i].isTensor() || !stack[i].toTensor().defined())
            continue;
        const at::Tensor& tensor = stack[i].toTensor();
        if (!tensor.is_cuda() || !tensor.is_floating_point() || tensor.numel() == 0)
            continue;
        auto* const bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
        bytes[size_t(bit) / 8 % tensor.element_size()] ^= uint8_t(1 << bit % 8);
        runtime->flipped(look.device);
        return;
    }
}

// Returns whether a copy is torch's own: to or from the host, or of bytes in their order to another device.
inline bool Kernel::is_transfer(const Stack& stack) const
{
    const at::Tensor& target = argument(stack, 0).toTensor();
    const at::Tensor& source = argument(stack, 1).toTensor();
    if (target.device() == source.device())
        return false;
    return !target.is_cuda() || !source.is_cuda() ||
           (target.dtype() == source.dtype() && target.sizes() == source.sizes() && target.is_contiguous() &&
            source.is_contiguous());
}

// Clears much memory through the driver, which releases whole pages: a simulated GPU may have more memory than the host.
inline bool Kernel::clear(const Stack& stack) const
{
    constexpr size_t MANY_BYTES = 1 << 20; // for fewer bytes the driver releases no pages
    const at::Tensor& tensor = argument(stack, 0).toTensor();
    if (tensor.nbytes() < MANY_BYTES || !tensor.is_contiguous())
        return false;
    runtime->clear_memory(tensor.mutable_data_ptr(), tensor.nbytes());
    return true;
}

// Computes. If the CPU's kernel raises, puts the arguments back and returns false: Python repeats the call, and knows what CUDA's
// kernel does with these arguments, which may be to compute, to fail an assertion or to raise another error.
inline bool Kernel::compute(const c10::OperatorHandle& op, Stack* stack, const Look& look)
{
    const c10::Device device(c10::kCUDA, look.device);
    const size_t base = stack->size() - argument_count_;
    const bool allocates = makes_results_ || rules_.out_arguments != 0;
    std::optional<DeviceScope> scope;
    if (allocates || look.memory)
        scope.emplace(device);
    // The dispatcher has already handled autograd, autocast and the like for the CUDA tensors.
    const c10::impl::ForceDispatchKeyGuard below(c10::default_included_set, c10::impl::tls_local_dispatch_key_set().excluded_ | HANDLED_KEYS);

    SavedState state;
    Draws draws;
    c10::SmallVector<c10::IValue, 8> originals(arguments_.size());
    const uint64_t signature = allocates ? sign(&argument(*stack, 0), argument_count_) : 0;
    ResizableAliases resizable;
    const auto to_cpu = [&](const c10::IValue& value) -> at::Tensor {
        auto* const tensor = value.unsafeToTensorImpl();
        if (!tensor->key_set().has(DispatchKey::CUDA)) // a CPU tensor or an undefined one
            return value.toTensor();
        if (rules_.out_arguments == 0)
            if (auto alias = make_alias(tensor))
                return at::Tensor(std::move(alias));
        return at::Tensor(resizable.alias(tensor));
    };
    for (size_t i = 0; i < arguments_.size(); i++) {
        const auto [position, kind] = arguments_[i];
        c10::IValue& value = (*stack)[base + position];
        if (value.isNone() && kind != Kind::GENERATOR)
            continue;
        originals[i] = std::move(value);
        const c10::IValue& original = originals[i];
        switch (kind) {
        case Kind::TENSOR:
            value = original.isTensor() ? c10::IValue(to_cpu(original)) : original;
            if (((rules_.state_arguments >> position) & 1) && original.isTensor() && original.toTensor().defined())
                state.save(value.toTensor());
            break;
        case Kind::TENSOR_LIST: {
            c10::List<at::Tensor> list;
            list.reserve(original.toListRef().size());
            for (const c10::IValue& item : original.toListRef())
                list.push_back(to_cpu(item));
            value = std::move(list);
            break;
        }
        case Kind::OPTIONAL_TENSOR_LIST: {
            c10::List<std::optional<at::Tensor>> list;
            list.reserve(original.toListRef().size());
            for (const c10::IValue& item : original.toListRef())
                list.push_back(item.isTensor() ? std::optional(to_cpu(item)) : std::nullopt);
            value = std::move(list);
            break;
        }
        case Kind::GENERATOR:
            value = rules_.flags & DRAWS ? c10::IValue(draws.draw(cuda_generator(original, device))) : original;
            break;
        case Kind::DEVICE:
            value = c10::Device(c10::kCPU);
            break;
        case Kind::OTHER:
            break;
        }
    }

    c10::SmallVector<c10::IValue, 8> others; // the CPU's kernel may take them from the stack
    for (const uint32_t position : others_)
        others.push_back((*stack)[base + position]);
    Route route(this, signature);
    try {
        if (composition_) {
            auto results = composition_->compute(&(*stack)[base]);
            torch::jit::drop(*stack, argument_count_);
            std::move(results.begin(), results.end(), std::back_inserter(*stack));
        } else {
            op.redispatchBoxed(CPU_KEYS, stack);
        }
    } catch (const c10::OutOfMemoryError&) {
        throw;
    } catch (const std::exception&) { // torch's errors, and a std::runtime_error for a number that a type cannot hold
        if (stack->size() != base + argument_count_)
            throw;
        for (size_t i = 0; i < arguments_.size(); i++)
            if (!originals[i].isNone())
                (*stack)[base + arguments_[i].first] = std::move(originals[i]);
        for (size_t i = 0; i < others_.size(); i++)
            (*stack)[base + others_[i]] = std::move(others[i]);
        return false;
    }
    if (rules_.out_arguments != 0)
        resizable.write_back(route);
    const bool keeps_storage = rules_.flags & KEEPS_STORAGE;
    const size_t first = stack->size() - returns_.size();
    for (size_t i = 0; i < returns_.size(); i++) {
        c10::IValue& value = (*stack)[first + i];
        if (returns_[i] >= 0) {
            for (size_t k = 0; k < arguments_.size(); k++)
                if (int32_t(arguments_[k].first) == returns_[i])
                    value = std::move(originals[k]);
        } else if (value.isTensor()) {
            value = adopt(std::move(value).toTensor(), device, route, keeps_storage);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (at::Tensor result : value.toTensorVector())
                list.push_back(adopt(std::move(result), device, route, keeps_storage));
            value = std::move(list);
        }
    }
    route.learn();
    if (rules_.flags & COPIES_RESULT)
        take_memory((*stack)[first].toTensor());
    if (look.memory)
        take_memory(look.memory->sizes);
    state.discard();
    draws.keep();
    if (rules_.flags & COUNTS_VERSIONS)
        for (const c10::IValue& item : originals.front().toListRef())
            item.unsafeToTensorImpl()->bump_version();
    return true;
}

} // namespace engine
