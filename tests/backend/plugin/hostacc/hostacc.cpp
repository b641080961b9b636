// A PrivateUse1 accelerator with two devices, which use host memory. Ops run synchronously on the CPU.
//
// Callers have to check indices: an index out of range aborts the process, as it may on a real accelerator.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#if TORCH_MINOR < 7
#include <ATen/core/GeneratorForPrivateuseone.h>
#endif
#if TORCH_MINOR >= 9
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr c10::DeviceIndex kCount = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kTotal[kCount] = {size_t{1} << 30, size_t{2} << 30};

enum Switch { kNoGenerators = 1, kNoMemory = 2, kNoStreams = 4, kBadFork = 8, kHiddenGenerators = 16 };
unsigned switches = 0;

std::atomic<bool> is_initialized{false};
std::atomic<bool> is_in_bad_fork{false};
std::atomic<int> synchronized[kCount];
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kCount] = {0, 0};
std::atomic<c10::StreamId> last_stream{0};

c10::DeviceIndex checked(c10::DeviceIndex index, const char* where) {
  if (index < 0 || index >= kCount) {
    std::fprintf(stderr, "hostacc: %s was called with the index %d\n", where, index);
    std::abort();
  }
  return index;
}

void check_fork() {
  TORCH_CHECK(!is_in_bad_fork, "Cannot re-initialize hostacc in forked subprocess");
}

// --- Memory: freed blocks are cached by their size.

struct Counter {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t amount) {
    current += amount;
    peak = std::max(peak, current);
    (amount > 0 ? allocated : freed) += std::abs(amount);
  }
};

struct Memory {
  Counter blocks, used, reserved;
  std::multimap<size_t, void*> cached;
};

struct Block {
  c10::DeviceIndex device;
  size_t size;
};

// Never destroyed, because tensors may be freed later than static objects.
auto& mutex = *new std::mutex;
auto& memory = *new std::array<Memory, kCount>;
auto& blocks = *new std::unordered_map<void*, Block>;

void release(Memory& of) {
  for (auto& [size, pointer] : of.cached) {
    std::free(pointer);
    of.reserved.add(-static_cast<int64_t>(size));
  }
  of.cached.clear();
}

void* take(c10::DeviceIndex device, size_t size) {
  std::lock_guard lock(mutex);
  auto& of = memory[device];
  void* pointer = nullptr;
  if (auto entry = of.cached.find(size); entry != of.cached.end()) {
    pointer = entry->second;
    of.cached.erase(entry);
  } else {
    if (of.reserved.current + size > kTotal[device])
      release(of);
    TORCH_CHECK_WITH(OutOfMemoryError, of.reserved.current + size <= kTotal[device],
                     "hostacc out of memory. Tried to allocate ", size, " bytes.");
    pointer = std::malloc(size);
    of.reserved.add(static_cast<int64_t>(size));
  }
  of.blocks.add(1);
  of.used.add(static_cast<int64_t>(size));
  blocks[pointer] = {device, size};
  return pointer;
}

void give(void* pointer) {
  if (!pointer)
    return;
  std::lock_guard lock(mutex);
  const auto [device, size] = blocks.at(pointer);
  blocks.erase(pointer);
  auto& of = memory[device];
  of.blocks.add(-1);
  of.used.add(-static_cast<int64_t>(size));
  of.cached.emplace(size, pointer);
}

void empty_cache() {
  std::lock_guard lock(mutex);
  for (auto& of : memory)
    release(of);
}

void reset(c10::DeviceIndex device, bool peaks) {
  std::lock_guard lock(mutex);
  auto& of = memory[checked(device, "a reset of statistics")];
  for (auto* counter : {&of.blocks, &of.used, &of.reserved}) {
    if (peaks)
      counter->peak = counter->current;
    else
      counter->allocated = counter->freed = 0;
  }
}

template <class Base>
struct Allocating : Base {
  c10::DataPtr allocate(size_t size) override {
    check_fork();
    const auto device = checked(current_device, "allocate");
    void* pointer = size ? take(device, size) : nullptr;
    return {pointer, pointer, &give, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give;
  }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};

#if TORCH_MINOR >= 9
struct Allocator : Allocating<c10::DeviceAllocator> {
  bool initialized() override {
    return is_initialized;
  }
  void emptyCache(c10::MempoolId_t) override {
    empty_cache();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    const auto& of = memory[checked(device, "getDeviceStats")];
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto copy = [](const Counter& from, auto& to) {
      to[0].current = from.current;
      to[0].peak = from.peak;
      to[0].allocated = from.allocated;
      to[0].freed = from.freed;
    };
    copy(of.blocks, stats.allocation);
    copy(of.used, stats.allocated_bytes);
    copy(of.reserved, stats.reserved_bytes);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset(device, false);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset(device, true);
  }
#if TORCH_MINOR >= 10
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    const auto index = checked(device, "getMemoryInfo");
    return {kTotal[index] - memory[index].reserved.current, kTotal[index]};
  }
#endif
};
Allocator with_figures;
#endif
Allocating<c10::Allocator> without_figures;

c10::Allocator* allocator() {
#if TORCH_MINOR >= 9
  if (!(switches & kNoMemory))
    return &with_figures;
#endif
  return &without_figures;
}

// Pinned memory is ordinary host memory whose addresses are recorded.
auto& pinned = *new std::map<const char*, size_t>;

void unpin(void* pointer) {
  std::lock_guard lock(mutex);
  pinned.erase(static_cast<char*>(pointer));
  std::free(pointer);
}

struct PinnedAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard lock(mutex);
    void* pointer = std::malloc(size ? size : 1);
    pinned[static_cast<char*>(pointer)] = size;
    return {pointer, pointer, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};
PinnedAllocator pinned_allocator;

void resize_storage(c10::StorageImpl& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  auto data = allocator()->allocate(size);
  if (const auto kept = std::min(size, storage.nbytes()))
    std::memcpy(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(size);
}

// --- Generators

struct DeviceGenerator : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  static c10::DeviceType device_type() {
    return kType;
  }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    auto* clone = new DeviceGenerator(device_.index());
    clone->set_state(*get_state());
    return clone;
  }
};

// If set, getNewGenerator() returns the default generator. Before torch 2.9, Python cannot get it otherwise.
std::atomic<bool> hands_out_defaults{false};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const at::Generator generators[kCount] = {
      at::make_generator<DeviceGenerator>(0), at::make_generator<DeviceGenerator>(1)};
  return generators[index < 0 ? current_device : checked(index, "getDefaultGenerator")];
}

// --- Device guard

using Guard = c10::impl::DeviceGuardImplInterface;

struct Recorded {
  std::chrono::steady_clock::time_point time;
};

struct DeviceGuardImpl : Guard {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kType, current_device};
  }
  void setDevice(c10::Device device) const override {
    check_fork();
    current_device = checked(device.index(), "setDevice");
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kCount;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    check_fork();
    ++synchronized[checked(index, "synchronizeDevice")];
  }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device.index()), id);
  }
  c10::Device of(c10::Device device, const char* where) const {
    return {kType, checked(device.index() < 0 && !device.has_index() ? current_device : device.index(), where)};
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    device = of(device, "getStream");
    return stream(device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(of(device, "getDefaultStream"), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    if (switches & kNoStreams)
      return Guard::getNewStream(device, priority);
    return stream(of(device, "getNewStream"), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    auto& current = current_stream[checked(to.device_index(), "exchangeStream")];
    return stream(to.device(), std::exchange(current, to.id()));
  }
  bool queryStream(const c10::Stream& of) const override {
    return (switches & kNoStreams) ? Guard::queryStream(of) : true;
  }
  void synchronizeStream(const c10::Stream& of) const override {
    if (switches & kNoStreams)
      Guard::synchronizeStream(of);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex index, const c10::EventFlag flag) const override {
    if (switches & kNoStreams)
      Guard::record(event, on, index, flag);
    if (!*event)
      *event = new Recorded;
    static_cast<Recorded*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& on) const override {
    if (switches & kNoStreams)
      Guard::block(event, on);
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> time =
        static_cast<Recorded*>(second)->time - static_cast<Recorded*>(first)->time;
    return time.count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuardImpl);

// --- Hooks. Older releases of torch lack some of these functions, so none is declared "override".

#pragma GCC diagnostic ignored "-Wsuggest-override"
using HooksBase = at::PrivateUse1HooksInterface;

struct Hooks : HooksBase {
  bool isBuilt() const {
    return true;
  }
  bool isAvailable() const {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const {
    return is_initialized;
  }
  void init() const {
    check_fork();
    is_initialized = true;
  }
  c10::DeviceIndex deviceCount() const {
    return kCount;
  }
  void setCurrentDevice(c10::DeviceIndex index) const {
    current_device = checked(index, "setCurrentDevice");
  }
  c10::DeviceIndex getCurrentDevice() const {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const {
    return std::exchange(current_device, checked(index, "exchangeDevice"));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const {
    return (switches & (kNoGenerators | kHiddenGenerators)) ? HooksBase::getDefaultGenerator(index) : default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const {
    if (switches & kNoGenerators)
      return at::AcceleratorHooksInterface::getNewGenerator(index);
    if (hands_out_defaults)
      return default_generator(index);
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : checked(index, "getNewGenerator"));
  }
  bool isPinnedPtr(const void* data) const {
    std::lock_guard lock(mutex);
    const auto* pointer = static_cast<const char*>(data);
    auto next = pinned.upper_bound(pointer);
    return next != pinned.begin() && pointer < std::prev(next)->first + std::max<size_t>(std::prev(next)->second, 1);
  }
  c10::Allocator* getPinnedMemoryAllocator() const {
    return &pinned_allocator;
  }
  c10::Device getDeviceFromPtr(void* data) const {
    std::lock_guard lock(mutex);
    return {kType, blocks.at(data).device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
    resize_storage(*storage.unsafeGetStorageImpl(), size);
  }
};
Hooks hooks;

#if TORCH_MINOR < 7
// These releases of torch do not call getNewGenerator() of the hooks.
at::Generator new_generator(c10::DeviceIndex index) {
  return hooks.getNewGenerator(index);
}
REGISTER_GENERATOR_PRIVATEUSE1(new_generator)
#endif

// --- Ops

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu())
    return tensor;
  const auto host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.dtype()));
  return tensor.is_conj() ? host.conj() : host;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  const auto needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && impl->storage().nbytes() < needed)
    resize_storage(*impl->storage().unsafeGetStorageImpl(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes())
    target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

void record_stream(at::Tensor&, c10::Stream) {}

// Copies the state of a device's generator into one of the CPU, and back when destroyed. Random ops of the CPU use the latter.
struct Drawing {
  Drawing(at::Generator device, at::Generator host) : device(std::move(device)), host(std::move(host)) {
    saved = this->host.get_state();
    this->host.set_state(this->device.get_state());
  }
  ~Drawing() {
    device.set_state(host.get_state());
    host.set_state(saved);
  }
  at::Generator device, host;
  at::Tensor saved;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  c10::DeviceIndex device = current_device;
  for (auto i = arguments.size(); i-- > 0;) {
    const auto& value = (*stack)[begin + i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kType)
      device = value.toTensor().device().index();
  }
  std::optional<Drawing> drawing;
  if (!(switches & kNoGenerators)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() != "generator")
        continue;
      auto& value = (*stack)[begin + i];
      drawing.emplace(value.isNone() ? default_generator(device) : value.toGenerator(), at::detail::createCPUGenerator());
      value = drawing->host;
    }
    if (op.schema().name() == "aten::native_dropout")
      drawing.emplace(default_generator(device), at::detail::getDefaultCPUGenerator());
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace

// --- Functions for the Python module

extern "C" {
void hostacc_register(unsigned chosen) {
  switches = chosen;
  c10::SetAllocator(kType, allocator(), 1);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  if (switches & kBadFork)
    pthread_atfork(nullptr, nullptr, [] { is_in_bad_fork = is_initialized || is_in_bad_fork; });
}
int hostacc_device_count() {
  return kCount;
}
int hostacc_current_device() {
  return current_device;
}
int hostacc_is_initialized() {
  return is_initialized && !is_in_bad_fork;
}
int hostacc_is_in_bad_fork() {
  return is_in_bad_fork;
}
void hostacc_init() {
  is_initialized = true;
}
int hostacc_synchronized(int device) {
  return synchronized[device];
}
void hostacc_hand_out_defaults(int chosen) {
  hands_out_defaults = chosen;
}
void hostacc_empty_cache() {
  empty_cache();
}
void hostacc_reset(int device, int peaks) {
  reset(static_cast<c10::DeviceIndex>(device), peaks);
}
// The figures, in bytes: 0 used, 1 peak of used, 2 reserved, 3 peak of reserved, 4 total.
long long hostacc_bytes(int device, int figure) {
  std::lock_guard lock(mutex);
  const auto index = checked(static_cast<c10::DeviceIndex>(device), "a figure of memory");
  const auto& of = memory[index];
  const long long figures[] = {
      of.used.current, of.used.peak, of.reserved.current, of.reserved.peak, static_cast<long long>(kTotal[index])};
  return figures[figure];
}
}
