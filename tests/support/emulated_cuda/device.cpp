// The device type "cuda" for a CPU build of torch: see device.py for what it is and is not.
//
// Tensors live in host memory under the dispatch key CUDA; a boxed fallback runs each operator on the
// CPU over the same memory. What makes CUDA's copies asynchronous is emulated: a copy into pinned
// memory stands there only when an event recorded behind it on its device has been waited for or has
// passed, and a copy from pinned memory reads its source when the device next computes.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/rnn_relu.h>
#include <ATen/ops/rnn_tanh.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>

using namespace c10;
using torch::jit::Stack;

namespace {

constexpr auto kType = DeviceType::CUDA;
constexpr int kDevices = 2;

thread_local DeviceIndex current = 0;
std::atomic<bool> events_pass{true};
std::atomic<int> sync_mode{0};

DeviceIndex index_of(DeviceIndex index) { return index < 0 ? current : index; }

// -- what makes the host wait ---------------------------------------------------------------------

std::atomic<bool> capturing{false};

std::mutex waits_lock;
std::string waits;

void host_waits(const std::string& what) {
  {
    std::lock_guard<std::mutex> guard(waits_lock);
    waits += what + "\n";
  }
  TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  TORCH_CHECK(!capturing, "operation not permitted when stream is capturing (", what, ")");
}

// -- copies that nobody has waited for ------------------------------------------------------------

struct Copy {
  DeviceIndex device;
  long number;
  bool to_host;
  at::Tensor target, source;
};
std::recursive_mutex copies_lock;
std::list<Copy> copies;
long last_copy = 0;

void finish(DeviceIndex device, long up_to, bool also_to_host) {
  std::lock_guard<std::recursive_mutex> guard(copies_lock);
  for (auto it = copies.begin(); it != copies.end();) {
    if (it->device == device && it->number <= up_to && (also_to_host || !it->to_host)) {
      at::_ops::copy_::redispatch(DispatchKeySet(DispatchKey::CPU), it->target, it->source, false);
      it = copies.erase(it);
    } else {
      ++it;
    }
  }
}

void enqueue(DeviceIndex device, bool to_host, const at::Tensor& target, const at::Tensor& source) {
  std::lock_guard<std::recursive_mutex> guard(copies_lock);
  copies.push_back({device, ++last_copy, to_host, target, source});
}

// -- guard, events, allocators, hooks -------------------------------------------------------------

struct Recorded {
  DeviceIndex device;
  long copy;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    Device old(kType, current);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(kType, current); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kType, index_of(device.index())), 0);
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Recorded();
    std::lock_guard<std::recursive_mutex> guard(copies_lock);
    *static_cast<Recorded*>(*event) = {stream.device_index(), last_copy};
  }
  void block(void*, const Stream&) const override {}
  void pass(void* event) const {
    auto* recorded = static_cast<Recorded*>(event);
    finish(recorded->device, recorded->copy, true);
  }
  bool queryEvent(void* event) const override {
    if (events_pass && event) pass(event);
    return events_pass;
  }
  void synchronizeEvent(void* event) const override {
    if (event) pass(event);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    finish(stream.device_index(), last_copy, true);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    finish(index_of(device), last_copy, true);
  }
};

std::mutex pinned_lock;
std::set<const void*> pinned;

// Bytes of device tensors that live, and the most there were: all devices together, without what
// kernels need inside.
std::atomic<int64_t> live_bytes{0}, peak_bytes{0};

void count(int64_t bytes) {
  auto now = live_bytes += bytes;
  auto peak = peak_bytes.load();
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned.count(pointer) > 0;
}

struct Memory final : c10::Allocator {
  explicit Memory(bool pins) : pins(pins) {}
  static void free(void* pointer) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    if (pointer && !pinned.erase(pointer)) count(-static_cast<int64_t>(malloc_usable_size(pointer)));
    std::free(pointer);
  }
  DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (pins && pointer) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned.insert(pointer);
    } else if (pointer) {
      count(malloc_usable_size(pointer));
    }
    return {pointer, pointer, &free, pins ? Device(DeviceType::CPU) : Device(kType, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool pins;
};
Memory device_memory(false), pinned_memory(true);

// torch looks its hooks up by the name of this class.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto old = current;
    current = device;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex device) const override { finish(index_of(device), last_copy, true); }
};

// -- one memory, seen from the CPU and from the device --------------------------------------------

bool on_device(const at::Tensor& t) { return t.defined() && t.device().is_cuda(); }

DataPtr shared(const Storage& storage, Device device) {
  auto release = [](void* pointer) { delete static_cast<Storage*>(pointer); };
  return DataPtr(storage.mutable_data(), new Storage(storage), release, device);
}

at::Tensor shaped_as(const at::Tensor& like, Storage storage, DispatchKey key) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return out;
}

at::Tensor host_view(const at::Tensor& t) {
  auto storage = t.storage();
  Storage same(Storage::use_byte_size_t(), storage.nbytes(), shared(storage, Device(at::kCPU)),
               c10::GetAllocator(DeviceType::CPU), true);
  auto out = shaped_as(t, std::move(same), DispatchKey::CPU);
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  if (t.dim() == 0) {
    auto wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
    out.unsafeGetTensorImpl()->set_wrapped_number(wrapped);
  }
  return out;
}

// A result of the CPU's, as memory of the device from now on.
at::Tensor device_view(const at::Tensor& t, Device device) {
  auto release = [](void* pointer) {
    auto* storage = static_cast<Storage*>(pointer);
    count(-static_cast<int64_t>(storage->nbytes()));
    delete storage;
  };
  auto storage = t.storage();
  count(storage.nbytes());
  DataPtr memory(storage.mutable_data(), new Storage(storage), release, device);
  Storage same(Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), &device_memory, true);
  return shaped_as(t, std::move(same), DispatchKey::CUDA);
}

// -- the fallback: every operator, on the CPU -----------------------------------------------------

const std::set<std::string> kMixesDevices = {
    "aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_",
    "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index.Tensor",
    "aten::set_.source_Tensor", "aten::_ctc_loss", "aten::_ctc_loss.Tensor",
    "aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor"};
const std::set<std::string> kHostWaits = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::is_nonzero", "aten::item"};

// One call: its arguments turned into CPU tensors, and its results back.
class Call {
 public:
  Call(const OperatorHandle& op, Stack* stack)
      : name(toString(op.operator_name())), schema(op.schema()), stack(stack),
        begin(stack->size() - op.schema().arguments().size()) {
    for (size_t i = 0; i < schema.arguments().size(); ++i) take(argument(i));
    TORCH_CHECK(!(target && host_tensor) || kMixesDevices.count(name), "Expected all tensors to be on ",
                "the same device, but found at least two devices, ", *target, " and cpu! (", name, ")");
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite() && argument(i).isTensor()) written.push_back(argument(i).toTensor());
    }
    if ((kHostWaits.count(name) || has_mask()) && target) host_waits(name);
    if (!schema.arguments().empty() && argument(0).isTensorList()) foreach_targets = argument(0).toTensorVector();
  }

  IValue& argument(size_t i) { return (*stack)[begin + i]; }

  // Indexing by a mask looks for its non-zero places.
  bool has_mask() {
    if (name != "aten::index.Tensor") return false;
    for (std::optional<at::Tensor> t : argument(1).toOptionalTensorList())
      if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    return false;
  }

  // Runs the operator for the shapes of its results, and takes back what it has written.
  void capture(const OperatorHandle& op);

  // Returns whether the call was a copy that is finished later.
  bool deferred() {
    if (name != "aten::copy_" || !target) return false;
    auto to = argument(0).toTensor(), from = argument(1).toTensor();
    bool background = argument(2).toBool();
    bool to_host = !is_device_view(to), from_host = !is_device_view(from);
    if (!background && to_host) host_waits("aten::copy_ to host");
    if (!background && from_host) host_waits("aten::copy_ from host");
    if (!background || !(to_host || from_host) || capturing) return false;
    auto& host = to_host ? to : from;
    if (!is_pinned(host.storage().data())) return false;
    if (to_host) {
      std::memset(host.mutable_data_ptr(), 0x7f, host.nbytes());
      from = at::_ops::clone::redispatch(DispatchKeySet(DispatchKey::CPU), from, std::nullopt);
    }
    enqueue(target->index(), to_host, to, from);
    torch::jit::drop(*stack, 3);
    stack->push_back(IValue(to));
    return true;
  }

  void give_back() {
    for (auto& seen : arguments) resize(seen);
    // CUDA's kernels over lists count what they write, but for zero_.
    if (name.rfind("aten::_foreach_", 0) == 0 && schema.arguments()[0].alias_info() &&
        schema.arguments()[0].alias_info()->isWrite() && name != "aten::_foreach_zero_")
      for (const at::Tensor& t : foreach_targets)
        for (auto& seen : arguments)
          if (seen.cpu.is_same(t)) seen.own.unsafeGetTensorImpl()->bump_version();
    auto count = schema.returns().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
      IValue& value = (*stack)[i];
      if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) list.push_back(result(t));
        value = IValue(c10::List<at::Tensor>(list));
      }
    }
  }

 private:
  struct Seen {
    at::Tensor own, cpu;
  };

  void take(IValue& value) {
    if (value.isTensor()) {
      value = converted(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(converted(t));
      value = IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : value.toOptionalTensorList())
        list.push_back(t && t->defined() ? std::optional<at::Tensor>(converted(*t)) : t);
      value = list;
    } else if (value.isDevice()) {
      asked = value.toDevice();
      if (asked->is_cuda()) value = Device(at::kCPU);
    }
  }

  at::Tensor converted(const at::Tensor& t) {
    if (!on_device(t)) {
      host_tensor |= t.defined() && t.dim() > 0;
      return t;
    }
    if (!target) target = t.device();
    TORCH_CHECK(target->index() == t.device().index() || kMixesDevices.count(name),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *target, " and ", t.device(), "! (", name, ")");
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, name, ": emulated CUDA is strided only");
    finish(t.device().index(), last_copy, false);
    for (auto& seen : arguments)
      if (seen.own.is_same(t)) return seen.cpu;
    arguments.push_back({t, host_view(t)});
    return arguments.back().cpu;
  }

  bool is_device_view(const at::Tensor& t) const {
    for (auto& seen : arguments)
      if (seen.cpu.is_same(t)) return true;
    return false;
  }

  at::Tensor result(const at::Tensor& t) const {
    if (!t.defined()) return t;
    for (auto& seen : arguments)
      if (seen.cpu.is_same(t)) return seen.own;
    for (auto& own : written)
      if (own.is_same(t)) return t;
    if ((asked && !asked->is_cuda()) || t.layout() != at::kStrided) return t;
    for (auto& seen : arguments)
      if (seen.cpu.storage().is_alias_of(t.storage()))
        return shaped_as(t, seen.own.storage(), DispatchKey::CUDA);
    auto device = asked ? Device(kType, index_of(asked->index())) : target ? *target : Device(kType, current);
    return device_view(t, device);
  }

  // An `out=` that has grown.
  static void resize(Seen& seen) {
    bool same = seen.cpu.sizes().equals(seen.own.sizes());
    if (same && seen.cpu.storage().data() == seen.own.storage().data()) return;
    auto grown = device_view(seen.cpu, seen.own.device());
    auto* own = seen.own.unsafeGetTensorImpl();
    own->set_storage_keep_dtype(grown.storage());
    own->set_storage_offset(grown.storage_offset());
    own->set_sizes_and_strides(grown.sizes(), grown.strides());
  }

  const std::string name;
  const FunctionSchema& schema;
  Stack* stack;
  const size_t begin;
  std::vector<Seen> arguments;
  std::vector<at::Tensor> written, foreach_targets;
  std::optional<Device> asked;
  bool host_tensor = false;

 public:
  std::optional<Device> target;
};

// -- CUDA graphs: the operators of a capture, run again -------------------------------------------

struct Node {
  OperatorHandle op;
  Stack arguments, results;

  // What is no device memory is a constant of the graph.
  static IValue kept(const IValue& value, const std::function<bool(const at::Tensor&)>& on_device) {
    return value.isTensor() && value.toTensor().defined() && !on_device(value.toTensor())
               ? IValue(value.toTensor().clone())
               : value;
  }

  void replay() const {
    Stack stack = arguments;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].isTensor()) refill(results[i].toTensor(), stack[i].toTensor());
      if (!results[i].isTensorList()) continue;
      auto to = results[i].toTensorVector(), from = stack[i].toTensorVector();
      for (size_t j = 0; j < to.size(); ++j) refill(to[j], from[j]);
    }
  }
  static void refill(const at::Tensor& to, const at::Tensor& from) {
    if (to.defined() && to.data_ptr() != from.data_ptr()) to.copy_(from);
  }
};
std::recursive_mutex graphs_lock;
std::map<int, std::vector<Node>> graphs;
int last_graph = 0;

void Call::capture(const OperatorHandle& op) {
  auto device = [this](const at::Tensor& t) { return is_device_view(t); };
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  Stack arguments;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    arguments.push_back(Node::kept(argument(i), device));
    auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    if (argument(i).isTensor()) before.emplace_back(argument(i).toTensor(), argument(i).toTensor().clone());
    if (argument(i).isTensorList())
      for (const at::Tensor& t : argument(i).toTensorVector()) before.emplace_back(t, t.clone());
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& [tensor, value] : before) tensor.copy_(value);
  std::lock_guard<std::recursive_mutex> guard(graphs_lock);
  graphs[last_graph].push_back({op, std::move(arguments), Stack(stack->begin() + begin, stack->end())});
}

void fallback(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  Call call(op, stack);
  at::AutoDispatchBelowAutograd guard;
  bool deferred = call.deferred();  // refuses in a capture what waits
  if (capturing && call.target)
    call.capture(op);
  else if (!deferred)
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.give_back();
}

// -- making tensors -------------------------------------------------------------------------------

struct OnDevice {
  explicit OnDevice(std::optional<Device> device) : old(current) {
    if (device) current = index_of(device->index());
  }
  ~OnDevice() { current = old; }
  DeviceIndex old;
};

const DispatchKeySet kKeys(DispatchKey::CUDA);

at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice here(device);
  return at::detail::empty_generic(size, &device_memory, kKeys, dtype_or_default(dtype), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                         std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice here(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  OnDevice here(self.device());
  auto grown = at::detail::empty_generic(size, &device_memory, kKeys, self.scalar_type(), format);
  if (grown.nbytes() > self.storage().nbytes())
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(grown.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(grown.sizes(), grown.strides());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                        IntArrayRef stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  own->set_storage_offset(offset);
  auto like = at::empty(stride.empty() ? size : IntArrayRef{}, at::kMeta);
  own->set_sizes_and_strides(size, stride.empty() ? like.strides() : stride);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t elements = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// -- kernels of CUDA that refuse what the CPU's take, or take what the CPU's refuse ----------------

void check_and_unscale(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  for (const at::Tensor& t : (*stack)[stack->size() - 3].toTensorVector())
    TORCH_CHECK_NOT_IMPLEMENTED(
        t.scalar_type() != at::kBFloat16,
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
  for (int i : {2, 1})
    TORCH_CHECK((*stack)[stack->size() - i].toTensor().is_cuda(), "scale and found_inf must be on CUDA");
  fallback(op, keys, stack);
}

void update_scale(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  for (int i : {6, 5, 4})
    TORCH_CHECK((*stack)[stack->size() - i].toTensor().is_cuda(), "scale and counts must be on CUDA");
  fallback(op, keys, stack);
}

void fused(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& name = schema.arguments()[i].name();
    IValue& value = (*stack)[begin + i];
    bool signal = name == "found_inf" || name == "grad_scale";
    if (value.isTensorList() && name != "state_steps" && value.toTensorVector().size())
      lists.push_back(value.toTensorVector());
    else if (signal && value.isTensor() && value.toTensor().defined())
      TORCH_CHECK(value.toTensor().is_cuda(), schema.name(), " got ", name, " on the host");
  }
  for (auto& list : lists)
    for (size_t i = 0; i < list.size(); ++i) {
      auto &one = lists[0][i], &other = list[i];
      bool alike = one.scalar_type() == other.scalar_type() && one.device() == other.device() &&
                   one.strides().equals(other.strides()) && other.is_non_overlapping_and_dense();
      TORCH_CHECK(alike, schema.name(), ": tensors of one position must have the same dtype, device and layout");
    }
  fallback(op, keys, stack);
}

// Kernels over lists arrive whole, as CUDA has them. Targets of several dtypes are an error: up to torch
// 2.10, CUDA's _foreach_copy_ writes past the smaller ones (pytorch#173531).
void over_lists(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const auto* alias = schema.arguments()[0].alias_info();
  if (alias && alias->isWrite()) {
    auto targets = (*stack)[begin].toTensorVector();
    for (auto& target : targets)
      TORCH_CHECK(target.scalar_type() == targets[0].scalar_type(), schema.name(),
                  " got targets of several dtypes");
  }
  std::set<DeviceIndex> devices;
  for (size_t i = begin; i < stack->size(); ++i)
    if ((*stack)[i].isTensorList())
      for (const at::Tensor& t : (*stack)[i].toTensorVector()) devices.insert(t.device().index());
  if (devices.size() < 2) return fallback(op, keys, stack);
  at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);  // torch's slow path: one by one
}

// The softmaxes of CUDA read half precision and write fp32 in one kernel.
void softmax(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto& self = (*stack)[stack->size() - 3];
  if (stack->back().toBool()) self = self.toTensor().to(at::kFloat);
  stack->back() = false;
  fallback(op, keys, stack);
}

void softmax_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto dtype = stack->back().toScalarType();
  stack->back() = (*stack)[stack->size() - 4].toTensor().scalar_type();
  fallback(op, keys, stack);
  stack->back() = stack->back().toTensor().to(dtype);
}

// -- recurrent layers -----------------------------------------------------------------------------

// CUDA's fused cells, as operators that autograd sees.
using Maybe = const std::optional<at::Tensor>&;

at::Tensor plus(const at::Tensor& gates, Maybe bias) { return bias && bias->defined() ? gates + *bias : gates; }

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cx, Maybe b_input, Maybe b_hidden) {
  auto gates = (plus(input, b_input) + plus(hidden, b_hidden)).chunk(4, 1);
  auto cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, at::empty({0}, cx.options())};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden,
                                            const at::Tensor& hx, Maybe b_input, Maybe b_hidden) {
  auto i = plus(input, b_input).chunk(3, 1), h = plus(hidden, b_hidden).chunk(3, 1);
  auto update = (i[1] + h[1]).sigmoid();
  auto fresh = (i[2] + (i[0] + h[0]).sigmoid() * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::empty({0}, hx.options())};
}

// cuDNN's whole networks: acceptable for the dtypes of cuDNN before 9.13, and under autocast always
// in fp16, whatever autocast's own dtype (aten/src/ATen/cudnn/AutocastRNN.cpp). Weights that do not
// lie in one piece are compacted at each call, with a warning. What is computed is what torch does
// without cuDNN.
thread_local bool inside_cudnn = false;

bool cudnn_is_acceptable(const at::Tensor& t) {
  auto dtype = t.scalar_type();
  bool known = dtype == at::kHalf || dtype == at::kFloat || dtype == at::kDouble;
  return known && !inside_cudnn && at::globalContext().userEnabledCuDNN();
}

class InsideCuDNN {
 public:
  explicit InsideCuDNN(at::TensorList weights) {
    inside_cudnn = true;
    for (const at::Tensor& t : weights)
      if (!(casts && t.scalar_type() != at::kHalf) && !t.is_alias_of(weights[0]))
        TORCH_WARN("RNN module weights are not part of single contiguous chunk of memory.");
  }
  ~InsideCuDNN() { inside_cudnn = false; }
  at::Tensor operator()(const at::Tensor& t) const {
    return casts && t.scalar_type() != at::kDouble ? t.to(at::kHalf) : t;
  }
  std::vector<at::Tensor> operator()(at::TensorList list) const {
    std::vector<at::Tensor> cast;
    for (const at::Tensor& t : list) cast.push_back((*this)(t));
    return cast;
  }

 private:
  bool casts = !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutocastCUDA);
  c10::impl::ExcludeDispatchKeyGuard below{DispatchKeySet(DispatchKey::AutocastCUDA)};
};

void cudnn_lstm(at::Tensor& output, at::Tensor& hy, at::Tensor& cy, const at::Tensor& input, at::TensorList hx,
                at::TensorList params, bool biases, int64_t layers, double dropout, bool train, bool both,
                bool batch_first) {
  InsideCuDNN cast(params);
  std::tie(output, hy, cy) =
      at::lstm(cast(input), cast(hx), cast(params), biases, layers, dropout, train, both, batch_first);
}

void cudnn_lstm_packed(at::Tensor& output, at::Tensor& hy, at::Tensor& cy, const at::Tensor& data,
                       const at::Tensor& sizes, at::TensorList hx, at::TensorList params, bool biases,
                       int64_t layers, double dropout, bool train, bool both) {
  InsideCuDNN cast(params);
  std::tie(output, hy, cy) =
      at::lstm(cast(data), sizes, cast(hx), cast(params), biases, layers, dropout, train, both);
}

#define CUDNN_NETWORK(name)                                                                                      \
  void cudnn_##name(at::Tensor& output, at::Tensor& hy, const at::Tensor& input, const at::Tensor& hx,           \
                    at::TensorList params, bool biases, int64_t layers, double dropout, bool train, bool both,   \
                    bool batch_first) {                                                                          \
    InsideCuDNN cast(params);                                                                                            \
    std::tie(output, hy) =                                                                                       \
        at::name(cast(input), cast(hx), cast(params), biases, layers, dropout, train, both, batch_first);        \
  }                                                                                                              \
  void cudnn_##name##_packed(at::Tensor& output, at::Tensor& hy, const at::Tensor& data,                         \
                             const at::Tensor& sizes, const at::Tensor& hx, at::TensorList params, bool biases,  \
                             int64_t layers, double dropout, bool train, bool both) {                            \
    InsideCuDNN cast(params);                                                                                            \
    std::tie(output, hy) =                                                                                       \
        at::name(cast(data), sizes, cast(hx), cast(params), biases, layers, dropout, train, both);               \
  }

CUDNN_NETWORK(gru)
CUDNN_NETWORK(rnn_tanh)
CUDNN_NETWORK(rnn_relu)

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

bool no_library(const at::Tensor&, const at::Tensor&, IntArrayRef, IntArrayRef, int64_t) { return false; }
bool no_library_for_tensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) {
  return false;
}

// What is queued holds its tensors itself.
void record_stream(at::Tensor&, c10::Stream) {}

template <void kernel(const OperatorHandle&, DispatchKeySet, Stack*)>
auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(boxed<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", boxed<&fallback>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_fused_sdp_choice", &plain_attention);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("cudnn_is_acceptable", &cudnn_is_acceptable);
  m.impl("record_stream", &record_stream);
  for (std::string name : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    m.impl(name.c_str(), &no_library);
    m.impl((name + ".Tensor").c_str(), &no_library_for_tensors);
  }
  // Their functional forms: the composite ones, over `out=`, warn of the size of their output.
  m.impl("mse_loss", boxed<&fallback>());
  m.impl("smooth_l1_loss", boxed<&fallback>());
  for (std::string name : {"_softmax", "_log_softmax"}) {
    m.impl(name.c_str(), boxed<&softmax>());
    m.impl((name + "_backward_data").c_str(), boxed<&softmax_backward>());
  }
  for (auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0) m.impl(toString(op).c_str(), boxed<&over_lists>());
  m.impl("_amp_foreach_non_finite_check_and_unscale_", boxed<&check_and_unscale>());
  m.impl("_amp_update_scale_", boxed<&update_scale>());
  for (std::string name : {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
    for (std::string overload : {"", ".tensor_lr"}) m.impl((name + overload).c_str(), boxed<&fused>());
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

c10::impl::DeviceGuardImplRegistrar guard_registrar(kType, new Guard());

}  // namespace

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
namespace native {
REGISTER_CUDA_DISPATCH(lstm_cudnn_stub, &cudnn_lstm)
REGISTER_CUDA_DISPATCH(lstm_packed_cudnn_stub, &cudnn_lstm_packed)
REGISTER_CUDA_DISPATCH(gru_cudnn_stub, &cudnn_gru)
REGISTER_CUDA_DISPATCH(gru_packed_cudnn_stub, &cudnn_gru_packed)
REGISTER_CUDA_DISPATCH(rnn_tanh_cudnn_stub, &cudnn_rnn_tanh)
REGISTER_CUDA_DISPATCH(rnn_tanh_packed_cudnn_stub, &cudnn_rnn_tanh_packed)
REGISTER_CUDA_DISPATCH(rnn_relu_cudnn_stub, &cudnn_rnn_relu)
REGISTER_CUDA_DISPATCH(rnn_relu_packed_cudnn_stub, &cudnn_rnn_relu_packed)
}  // namespace native
}  // namespace at

// -- what device.py asks --------------------------------------------------------------------------

extern "C" {
int get_device() { return current; }
void set_device(int device) { current = device; }
void set_events_pass(int value) { events_pass = value; }
void set_sync_mode(int value) { sync_mode = value; }
int get_sync_mode() { return sync_mode; }
int begin_capture() {
  capturing = true;
  return ++last_graph;
}
void end_capture() { capturing = false; }
int is_capturing() { return capturing; }
void replay(int graph) {
  at::AutoDispatchBelowAutograd guard;
  for (auto& node : graphs.at(graph)) node.replay();
}
void drop_graph(int graph) { graphs.erase(graph); }
void synchronize(int device) { finish(index_of(device), last_copy, true); }
int64_t get_live_bytes() { return live_bytes; }
int64_t get_peak_bytes() { return peak_bytes; }
void reset_peak_bytes() { peak_bytes = live_bytes.load(); }
const char* get_waits() { return waits.c_str(); }
void clear_waits() {
  std::lock_guard<std::mutex> guard(waits_lock);
  waits.clear();
}
}
