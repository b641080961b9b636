// CPU aliases of CUDA tensors, and CUDA tensors for results of the CPU.
#pragma once

#include "memory.hpp"

#include <array>
#include <atomic>
#include <cstring>
#include <memory>

namespace engine {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::intrusive_ptr;
using c10::StorageImpl;
using c10::TensorImpl;

// Keys that say nothing about how a tensor stores its elements.
constexpr DispatchKeySet NEUTRAL_KEYS =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
constexpr DispatchKeySet CUDA_KEYS(DispatchKey::CUDA);
constexpr DispatchKeySet CPU_KEYS(DispatchKey::CPU);

inline bool has_only(const TensorImpl* tensor, DispatchKeySet keys)
{
    return (tensor->key_set() - NEUTRAL_KEYS).raw_repr() == keys.raw_repr();
}

// One storage spans the address space except its first page: a tensor over any address is a view of it.
constexpr uintptr_t SPAN_START = 4096;
// Never freed: a thread of autograd may run ops while the process ends.
inline auto& span = *new intrusive_ptr<StorageImpl>;

inline void make_span()
{
    constexpr int64_t size = (int64_t(1) << 47) - int64_t(SPAN_START);
    auto* const start = reinterpret_cast<void*>(SPAN_START); // NOLINT
    span = c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), c10::SymInt(size), c10::DataPtr(start, c10::Device(c10::kCPU)), nullptr, false);
}

inline intrusive_ptr<TensorImpl> make_cpu_tensor(const intrusive_ptr<StorageImpl>& storage, const TensorImpl& model, int64_t offset)
{
    auto result = c10::make_intrusive<TensorImpl>(c10::Storage(storage), CPU_KEYS, model.dtype());
    if (offset != 0)
        result->set_storage_offset(offset);
    result->set_sizes_and_strides(model.sizes(), model.strides());
    return result;
}

// Storages of the CPU over those of CUDA, and tensors over them that the op may resize.
class ResizableAliases {
public:
    intrusive_ptr<TensorImpl> alias(TensorImpl* tensor)
    {
        for (auto& [other, alias] : tensors_)
            if (other == tensor)
                return alias;
        auto result = make_cpu_tensor(storage(tensor->unsafe_storage().unsafeGetStorageImpl()), *tensor, tensor->storage_offset());
        tensors_.emplace_back(tensor, result);
        return result;
    }

    // Gives new memory and sizes of the aliases to the CUDA tensors.
    void write_back(Route& route);

private:
    struct Pair {
        StorageImpl* device;
        intrusive_ptr<StorageImpl> host;
        const void* address;
    };

    const intrusive_ptr<StorageImpl>& storage(StorageImpl* device)
    {
        for (auto& pair : storages_)
            if (pair.device == device)
                return pair.host;
        void* const address = device->mutable_data();
        storages_.push_back(
            {device,
             c10::make_intrusive<StorageImpl>(
                 StorageImpl::use_byte_size_t(), c10::SymInt(int64_t(device->nbytes())),
                 c10::DataPtr(address, c10::Device(c10::kCPU)), &router, device->resizable()),
             address});
        return storages_.back().host;
    }

    std::vector<std::pair<TensorImpl*, intrusive_ptr<TensorImpl>>> tensors_;
    std::vector<Pair> storages_;
};

template <typename Slot>
bool has_python_object(const Slot& slot)
{
    if constexpr (requires { slot.load_pyobj(); })
        return slot.load_pyobj() != nullptr;
    else // until torch 2.9
        return slot._unchecked_untagged_pyobj() != nullptr;
}

// Views of the span that no op uses any more. To make a tensor costs more than a small op's arithmetic.
class SpareAliases {
public:
    intrusive_ptr<TensorImpl> take(const TensorImpl& model, int64_t offset)
    {
        auto* spare = &aliases_[next_];
        for (auto& alias : aliases_)
            if (is_spare(alias) && alias->dtype() == model.dtype() && alias->sizes() == model.sizes() &&
                alias->strides() == model.strides()) {
                spare = &alias;
                break;
            }
        if (!is_spare(*spare)) {
            next_ = (next_ + 1) % aliases_.size();
            return *spare = make_cpu_tensor(span, model, offset);
        }
        auto& alias = *spare;
        alias->set_storage_offset(offset);
        if (alias->dtype() != model.dtype())
            alias->set_storage_and_dtype(c10::Storage(span), model.dtype());
        if (alias->sizes() != model.sizes() || alias->strides() != model.strides()) {
            alias->set_sizes_and_strides(model.sizes(), model.strides());
            next_ = (next_ + 1) % aliases_.size();
        }
        return alias;
    }

private:
    static bool is_spare(const intrusive_ptr<TensorImpl>& alias)
    {
        return alias && alias.use_count() == 1 && !has_python_object(*alias->pyobj_slot()) && alias->autograd_meta() == nullptr;
    }

    std::array<intrusive_ptr<TensorImpl>, 8> aliases_;
    size_t next_ = 0;
};
inline thread_local SpareAliases spare_aliases;

// Returns a CPU alias that the op does not resize, or null if the tensor's address is not aligned.
inline intrusive_ptr<TensorImpl> make_alias(TensorImpl* tensor)
{
    const auto item_size = tensor->dtype().itemsize();
    const auto address = reinterpret_cast<uintptr_t>(tensor->unsafe_storage().unsafeGetStorageImpl()->mutable_data()) +
                         item_size * size_t(tensor->storage_offset());
    if (address < SPAN_START) { // it has no memory
        auto storage = c10::make_intrusive<StorageImpl>(
            StorageImpl::use_byte_size_t(), c10::SymInt(0), c10::DataPtr(nullptr, c10::Device(c10::kCPU)), nullptr, false);
        return make_cpu_tensor(storage, *tensor, 0);
    }
    const auto distance = address - SPAN_START;
    return distance % item_size ? nullptr : spare_aliases.take(*tensor, int64_t(distance / item_size));
}

// Values of tensors that stay as they are if there is no memory for results: CUDA's kernels allocate before they write.
class SavedState {
public:
    SavedState() = default;
    SavedState(const SavedState&) = delete;
    SavedState& operator=(const SavedState&) = delete;

    ~SavedState()
    {
        for (auto& [alias, values] : tensors_)
            alias.copy_(values);
    }

    void save(const at::Tensor& alias)
    {
        tensors_.emplace_back(alias, alias.clone());
    }

    // Notes that the op has succeeded.
    void discard()
    {
        tensors_.clear();
    }

private:
    c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> tensors_;
};

// How many results were copied to the device, for tests.
inline std::atomic<uint64_t> copies{0};

// Moves memory of a result to the device: takes it if it is the device's, else copies it.
inline c10::DataPtr to_device(StorageImpl& storage, size_t size, c10::Device device, Route& route)
{
    c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
    void* const address = data.get();
    if (route.take(address)) {
        const auto deleter = data.get_deleter();
        return {address, data.release_context(), deleter, device};
    }
    c10::DataPtr result = device_allocator()->allocate(size);
    if (size != 0) {
        copies++;
        std::memcpy(result.get(), address, size);
    }
    return result;
}

inline void ResizableAliases::write_back(Route& route)
{
    for (auto& pair : storages_) {
        if (pair.host->data() == pair.address && pair.host->nbytes() == pair.device->nbytes())
            continue;
        const size_t size = pair.host->nbytes();
        pair.device->set_data_ptr_noswap(to_device(*pair.host, size, pair.device->device(), route));
        pair.device->set_nbytes(size);
    }
    for (auto& [tensor, alias] : tensors_) {
        tensor->_set_conj(alias->is_conj());
        tensor->_set_neg(alias->is_neg());
        if (tensor->sizes() != alias->sizes() || tensor->strides() != alias->strides() ||
            tensor->storage_offset() != alias->storage_offset()) {
            tensor->set_storage_offset(alias->storage_offset());
            tensor->set_sizes_and_strides(alias->sizes(), alias->strides());
        }
    }
}

// Returns a CUDA tensor with the values and strides of a CPU tensor that the op returned. It has a storage of its own size, or the
// result's.
inline at::Tensor adopt(at::Tensor result, c10::Device device, Route& route, bool keeps_storage)
{
    if (!result.defined())
        return result;
    const bool is_conj = result.is_conj(), is_neg = result.is_neg(); // lazily: their memory has other values
    result._set_conj(false);
    result._set_neg(false);
    const size_t item_size = result.dtype().itemsize();
    const auto* tensor = result.unsafeGetTensorImpl();
    TORCH_CHECK(has_only(tensor, CPU_KEYS), "a result of ", result.key_set(), " is not simulated");
    const auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    const bool has_own_size = keeps_storage || storage->nbytes() == item_size * size_t(tensor->numel());
    if (!result.is_non_overlapping_and_dense() || tensor->storage_offset() != 0 || !has_own_size ||
        storage->allocator() != &router || result.storage().use_count() != 1) {
        // Copied by the CPU, so that it has its own memory, without gaps.
        static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
        torch::jit::Stack stack{result, c10::IValue()};
        clone.callBoxed(&stack);
        result = stack[0].toTensor();
        tensor = result.unsafeGetTensorImpl();
    }
    StorageImpl& own = *result.storage().unsafeGetStorageImpl();
    own.set_data_ptr_noswap(to_device(own, own.nbytes(), device, route));
    own.set_allocator(device_allocator());
    auto adopted = c10::make_intrusive<TensorImpl>(c10::Storage(result.storage()), CUDA_KEYS, tensor->dtype());
    adopted->set_sizes_and_strides(tensor->sizes(), tensor->strides());
    at::Tensor on_device(std::move(adopted));
    on_device._set_conj(is_conj);
    on_device._set_neg(is_neg);
    return on_device;
}

} // namespace engine
