// An accelerator that is the host: its memory is host memory and its kernels are the CPU's, run at once. Copies are
// real work of a stream: a thread makes them, late, and what reads them too early reads stale bytes.
//
// A1  What is queued on a stream is done in order. A kernel waits for what was queued on its stream before.
// A2  An error of a queued copy surfaces at the next synchronisation, and stays.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// -- streams ------------------------------------------------------------------------------------

std::mutex lock;
std::condition_variable changed;
double copy_s = 0.0;
bool fail_next = false;
std::string sticky;

struct Queue {
  std::deque<std::function<void()>> tasks;
  uint64_t queued = 0, done = 0;
  bool running = false;
};
std::map<int64_t, Queue> queues;
int64_t streams = 1;
thread_local int64_t current = 0;

void serve(int64_t id) {
  std::unique_lock<std::mutex> held(lock);
  auto& queue = queues[id];
  while (true) {
    changed.wait(held, [&] { return !queue.tasks.empty(); });
    auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    held.unlock();
    task();
    task = nullptr;  // What it held may be freed now, which takes the lock.
    held.lock();
    queue.done++;
    changed.notify_all();
  }
}

void enqueue(int64_t id, std::function<void()> task) {
  std::lock_guard<std::mutex> held(lock);
  auto& queue = queues[id];
  if (!queue.running) {
    queue.running = true;
    std::thread(serve, id).detach();
  }
  queue.tasks.push_back(std::move(task));
  queue.queued++;
  changed.notify_all();
}

void drain(int64_t id) {
  std::unique_lock<std::mutex> held(lock);
  auto& queue = queues[id];
  changed.wait(held, [&] { return queue.done == queue.queued; });
}

void check() {
  std::lock_guard<std::mutex> held(lock);
  if (!sticky.empty()) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, "emul error: " + sticky);
}

struct Mark {  // an event
  int64_t stream;
  uint64_t number;
};

void reach(const Mark& mark) {
  std::unique_lock<std::mutex> held(lock);
  changed.wait(held, [&] { return queues[mark.stream].done >= mark.number; });
}

// -- memory -------------------------------------------------------------------------------------

int64_t in_use = 0, most = 0, limit = 0;
std::map<char*, size_t> pinned;

struct Memory final : c10::DeviceAllocator {
  static void release(void* at) {
    std::lock_guard<std::mutex> held(lock);
    in_use -= static_cast<int64_t>(*reinterpret_cast<size_t*>(static_cast<char*>(at) - 64));
    free(static_cast<char*>(at) - 64);
  }
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> held(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, !limit || in_use + static_cast<int64_t>(size) <= limit, "emul out of memory");
    auto* at = static_cast<char*>(aligned_alloc(64, (size + 127) / 64 * 64));
    *reinterpret_cast<size_t*>(at) = size;
    in_use += static_cast<int64_t>(size);
    most = std::max(most, in_use);
    return {at + 64, at + 64, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    for (auto& each : {&found.allocated_bytes[0], &found.reserved_bytes[0]}) {
      each->current = in_use;
      each->peak = most;
    }
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { most = in_use; }
};
Memory memory;

struct Pinned final : c10::Allocator {
  static void release(void* at) {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(static_cast<char*>(at));
    free(at);
  }
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> held(lock);
    auto* at = static_cast<char*>(aligned_alloc(64, (size + 127) / 64 * 64));
    pinned[at] = size + 64;
    return {at, at, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Pinned pinned_memory;

bool is_pinned(const void* at) {
  std::lock_guard<std::mutex> held(lock);
  auto* where = const_cast<char*>(static_cast<const char*>(at));
  auto next = pinned.upper_bound(where);
  if (next == pinned.begin()) return false;
  --next;
  return where < next->first + next->second;
}

// -- what torch asks of a device -----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream stream(int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> held(lock);
    return stream(streams++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> held(lock);
    if (!*event) *event = new Mark();
    *static_cast<Mark*>(*event) = Mark{on.id(), queues[on.id()].queued};
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    auto mark = *static_cast<Mark*>(event);
    if (mark.stream != on.id()) enqueue(on.id(), [mark] { reach(mark); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard<std::mutex> held(lock);
    auto* mark = static_cast<Mark*>(event);
    return queues[mark->stream].done >= mark->number;
  }
  void synchronizeEvent(void* event) const override {
    if (event) reach(*static_cast<Mark*>(event));
    check();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  bool queryStream(const c10::Stream& on) const override {
    std::lock_guard<std::mutex> held(lock);
    return queues[on.id()].done == queues[on.id()].queued;
  }
  void synchronizeStream(const c10::Stream& on) const override {
    drain(on.id());
    check();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int64_t id = 0; id < streams; id++) drain(id);
    check();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    auto made = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
    return made;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto next = memory.allocate(size);
    memcpy(next.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(next));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// -- operators ------------------------------------------------------------------------------------

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory, as a tensor of the CPU
  if (tensor.is_cpu()) return tensor.detach();
  auto keep = tensor.detach();
  return at::from_blob(keep.data_ptr(), keep.sizes(), keep.strides(), [keep](void*) {}, keep.options().device(at::kCPU));
}

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device>, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  auto made = at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                        dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
  return made;
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::NoGradGuard guard;
  auto source = on_host(from), target = on_host(to);
  auto host = from.is_cpu() ? from : to;
  if (from.is_cpu() == to.is_cpu() || !non_blocking || !is_pinned(host.data_ptr())) {
    drain(current);
    target.copy_(source);
    return to;
  }
  enqueue(current, [source, target]() mutable {
    double wait_s;
    bool fails;
    {
      std::lock_guard<std::mutex> held(lock);
      wait_s = copy_s;
      fails = fail_next;
      if (fails) sticky = "a copy failed";
      fail_next = false;
    }
    if (wait_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait_s));
    at::NoGradGuard guard;
    if (!fails) target.copy_(source);
  });
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  drain(current);
  check();
  return on_host(tensor).item();
}

at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                       tensor.key_set(), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(tensor.storage_offset()));
  return made;
}

at::Tensor view(const at::Tensor& tensor, at::IntArrayRef size) {
  auto shape = at::infer_size_dv(size, tensor.numel());
  auto stride = at::detail::computeStride(tensor.sizes(), tensor.strides(), shape);
  TORCH_CHECK(stride.has_value(), "view: not possible without a copy");
  return view_of(tensor, shape, *stride, tensor.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(tensor, size, stride, tensor.storage_offset());
}

const at::Tensor& resize_(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* inside = tensor.unsafeGetTensorImpl();
  inside->set_sizes_contiguous(size);
  auto needed = (inside->numel() + inside->storage_offset()) * inside->itemsize();
  if (needed > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* inside = tensor.unsafeGetTensorImpl();
  inside->set_storage_keep_dtype(std::move(source));
  inside->set_sizes_and_strides(size, stride.empty() ? c10::contiguous_strides(size) : c10::DimVector(stride), offset);
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain(current);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", view_of);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(KIND, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_copy_seconds", [](double seconds) { copy_s = seconds; });
  m.def("fail_next_copy", [] { fail_next = true; });
  m.def("set_memory_limit", [](int64_t bytes) { limit = bytes; });
}
