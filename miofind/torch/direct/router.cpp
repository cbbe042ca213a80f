// The hot path without Python: calls of aten::convolution, aten::convolution_backward and miofind's own operators that
// look like an earlier one are launched from here, result by result, or go on to PyTorch's own kernels. Whatever is
// new, or takes a step that has no plain form, goes on to Python: to the kernels of miofind_router (override.py), or to
// those of miofind's operators that these stand before (fused/ops.py).
//
// It needs PyTorch's headers and no CUDA toolkit: functions of the driver, cuBLASLt, cuDNN and PyTorch's part for GPUs
// come as addresses.

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace {

// Driver API, cuda.h: CUlaunchConfig and CUlaunchAttribute.
struct LaunchAttribute {
  int32_t id;
  char pad[4];
  union {
    int32_t number;
    char bytes[64];
  } value;
};

struct LaunchConfig {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t count;
};

constexpr int32_t PROGRAMMATIC_STREAM_SERIALIZATION = 6;

using LaunchKernel = int (*)(const LaunchConfig*, void*, void**, void**);
using ReplaceAddress = int (*)(void*, void*);

LaunchKernel launch_kernel = nullptr;
ReplaceAddress replace_address = nullptr;

// What the addresses of a launch are of: its operands, its results, its workspace.
constexpr size_t MOST_SOURCES = 16;
using Addresses = std::array<uint64_t, MOST_SOURCES>;

// An address that a step takes; of nothing where the source is below 0.
struct Place {
  int64_t source;
  uint64_t offset;

  void* in(const Addresses& addresses) const {
    return source < 0 ? nullptr : reinterpret_cast<void*>(addresses[source] + offset);
  }
};

struct Fixup {
  size_t at;
  int source;
  uint64_t offset;
};

struct Parameter {
  std::vector<char> content;
  std::vector<Fixup> fixups;
  bool is_map = false;  // a tensor map: its one fixup is the address that it is of
  size_t place = 0;     // in the memory of its kernel's parameters
};

constexpr size_t ALIGNMENT = 64;

// CUresult of a launch in a thread that has used no GPU yet; Python's launch makes a context current there.
constexpr int INVALID_CONTEXT = 201;
constexpr int NO_WORKSPACE = -1;  // none of the driver's

// The status of a launch where there is no driver: Python's launch tells of it.
constexpr int NO_DRIVER = -2;

// Whether a step that ended with a status may start in a later call, so that its plan stays.
bool is_of_this_call(int status) {
  return status == INVALID_CONTEXT || status == NO_WORKSPACE;
}

constexpr uint32_t MOST_SKIPPED = 1023;

// In which calls a workspace is asked for, after there was no memory for it; as Backoff of memory.py.
struct Backoff {
  std::atomic<uint32_t> calls{0}, left{0};

  bool skips() {
    uint32_t before = left.load(std::memory_order_relaxed);
    while (before && !left.compare_exchange_weak(before, before - 1)) continue;
    return before != 0;
  }

  void failed() {
    const uint32_t before = calls.load();
    left.store(before);
    calls.store(std::min(2 * before + 1, MOST_SKIPPED));
  }

  void succeeded() {
    if (calls.load(std::memory_order_relaxed)) calls.store(0);
  }
};

// A step of a launch.
struct Step {
  virtual ~Step() = default;

  // Whether it may be run by this thread now.
  virtual bool is_ready(void* stream) const { return true; }

  // 0 where it has started, else the status of what it calls, or one of those above.
  virtual int run(const Addresses& addresses, void* stream) const = 0;
};

struct Kernel : Step {
  Kernel(void* function, bool is_dependent) : function(function), is_dependent(is_dependent) {}

  void* function;
  LaunchConfig config{};
  bool is_dependent;
  std::vector<Parameter> parameters;
  size_t bytes = 0;

  int run(const Addresses& addresses, void* stream) const override {
    if (!launch_kernel || !replace_address) return NO_DRIVER;
    thread_local std::vector<char> memory;
    memory.resize(bytes + ALIGNMENT);
    char* start = memory.data() + (ALIGNMENT - reinterpret_cast<uintptr_t>(memory.data()) % ALIGNMENT) % ALIGNMENT;
    void* pointers[64];
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& parameter = parameters[i];
      char* content = start + parameter.place;
      std::memcpy(content, parameter.content.data(), parameter.content.size());
      for (const Fixup& fixup : parameter.fixups) {
        const uint64_t address = addresses[fixup.source] + fixup.offset;
        if (parameter.is_map) {
          const int status = replace_address(content, reinterpret_cast<void*>(address));
          if (status) return status;
        } else {
          std::memcpy(content + fixup.at, &address, sizeof address);
        }
      }
      pointers[i] = content;
    }
    LaunchAttribute attribute{};
    attribute.id = PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.number = 1;
    LaunchConfig launched = config;
    launched.stream = stream;
    launched.attributes = &attribute;
    launched.count = is_dependent ? 1 : 0;
    return launch_kernel(&launched, function, pointers, nullptr);
  }
};

// What a product of cuBLASLt takes, as Python fills it in. Source: cublasLt.h, cublasLtMatmul.
struct ProductParts {
  int (*matmul)(void* handle, void* operation, const void* alpha, const void* a, void* layout_a, const void* b,
                void* layout_b, const void* beta, const void* c, void* layout_c, void* d, void* layout_d,
                const void* algorithm, void* workspace, size_t workspace_bytes, void* stream);
  int (*set_attribute)(void* operation, int attribute, const void* value, size_t bytes);
  void *handle, *operation, *layout_a, *layout_b, *layout_c;
  const void *alpha, *beta, *algorithm;
  size_t workspace_bytes;
  int64_t bias_attribute;
  Place a, b, c, d, bias, workspace;
};

struct Product : Step {
  explicit Product(const ProductParts& parts) : parts(parts) {}

  int run(const Addresses& addresses, void* stream) const override {
    const ProductParts& p = parts;
    const auto start = [&] {
      return p.matmul(p.handle, p.operation, p.alpha, p.a.in(addresses), p.layout_a, p.b.in(addresses), p.layout_b,
                      p.beta, p.c.in(addresses), p.layout_c, p.d.in(addresses), p.layout_c, p.algorithm,
                      p.workspace.in(addresses), p.workspace_bytes, stream);
    };
    const void* const vector = p.bias.in(addresses);
    if (!vector) return start();
    static std::mutex lock;  // of all operations, which several plans share: one holds a bias's address as it starts
    const std::lock_guard<std::mutex> guard(lock);
    const int status = p.set_attribute(p.operation, static_cast<int>(p.bias_attribute), &vector, sizeof vector);
    return status ? status : start();
  }

  const ProductParts parts;
};

// A number that no other thread of the process has or had.
uint64_t this_thread() {
  static std::atomic<uint64_t> count{0};
  thread_local const uint64_t number = ++count;
  return number;
}

// What a convolution of cuDNN takes, as Python fills it in. Source: cudnn_graph.h.
constexpr size_t MOST_OPERANDS = 12;

struct ConvolutionParts {
  int (*create_descriptor)(int kind, void** descriptor);
  int (*set_attribute)(void* descriptor, int attribute, int type, int64_t count, const void* values);
  int (*finalize)(void* descriptor);
  int (*execute)(void* handle, void* plan, void* pack);
  int (*destroy_descriptor)(void* descriptor);
  int (*get_stream)(void* handle, void** stream);
  void *handle, *plan;
  const int64_t* leases_ended;  // how often a thread that had the plan ended
  int64_t leases_ended_before;
  int64_t count;
  int64_t ids[MOST_OPERANDS];
  Place operands[MOST_OPERANDS];
  Place workspace;
};

// cuDNN's handles and plans are for one thread at a time: this is for the one that made it, while Python lends them to
// it. Threads that are not Python's may give them back between calls.
struct Convolution : Step {
  explicit Convolution(const ConvolutionParts& parts) : parts(parts), thread(this_thread()) {}

  // Its handle may have another stream: Python, which sets it, keeps in mind which.
  bool is_ready(void* stream) const override {
    void* used = nullptr;
    if (thread != this_thread() || *parts.leases_ended != parts.leases_ended_before) return false;
    return !parts.get_stream(parts.handle, &used) && used == stream;
  }

  int run(const Addresses& addresses, void* stream) const override {
    const ConvolutionParts& p = parts;
    constexpr int VARIANT_PACK = 16, INT64 = 3, VOID_PTR = 6;
    constexpr int UNIQUE_IDS = 1000, DATA_POINTERS = 1001, WORKSPACE = 1003;
    void* pointers[MOST_OPERANDS];
    for (int64_t i = 0; i < p.count; ++i) pointers[i] = p.operands[i].in(addresses);
    void* const scratch = p.workspace.in(addresses);
    void* pack = nullptr;
    int status = p.create_descriptor(VARIANT_PACK, &pack);
    if (status) return status;
    status = p.set_attribute(pack, UNIQUE_IDS, INT64, p.count, p.ids);
    if (!status) status = p.set_attribute(pack, DATA_POINTERS, VOID_PTR, p.count, pointers);
    if (!status) status = p.set_attribute(pack, WORKSPACE, VOID_PTR, 1, &scratch);
    if (!status) status = p.finalize(pack);
    if (!status) status = p.execute(p.handle, p.plan, pack);
    p.destroy_descriptor(pack);
    return status;
  }

  const ConvolutionParts parts;
  const uint64_t thread;
};

struct Form {
  std::vector<int64_t> shape, strides;
  at::ScalarType type;
};

// The tensors of calls that are read as packed copies, by the places of their arguments.
struct Packed {
  std::vector<int> places;
  std::vector<Form> forms;

  size_t find(int place) const { return std::find(places.begin(), places.end(), place) - places.begin(); }
  bool has(int place) const { return find(place) < places.size(); }
};

// A call's tensors by the places of their arguments, nullptr where there is none, and as launches read them.
struct Operands {
  Operands(const at::Tensor* const* given, const Packed& packed)
      : given(given), packed(packed), copies(packed.places.size()) {}

  // A packed copy is made once, for whoever reads it first.
  const at::Tensor& operator[](int place) {
    const size_t found = packed.find(place);
    if (found == packed.places.size()) return *given[place];
    at::Tensor& copy = copies[found];
    if (!copy.defined()) {
      const at::AutoDispatchBelowADInplaceOrView below;  // whoever records gradients has done so
      const Form& form = packed.forms[found];
      copy = at::empty_strided(form.shape, form.strides, given[place]->options().dtype(form.type));
      copy.copy_(*given[place]);
    }
    return copy;
  }

  const at::Tensor* const* given;
  const Packed& packed;
  std::vector<at::Tensor> copies;
};

constexpr size_t MOST_RESULTS = 3;

// The results of a launch, or the status that it failed with.
struct Made {
  int status = 0;
  std::array<at::Tensor, MOST_RESULTS> results;
};

struct Launch {
  std::vector<int> operands;  // which of a call's tensors
  std::vector<Form> results;
  int64_t workspace_bytes = 0;
  uint64_t misaligned = 0;
  std::vector<std::unique_ptr<Step>> steps;
  mutable Backoff backoff;

  // The addresses of copies are aligned.
  bool takes(const Operands& tensors, void* stream) const {
    uint64_t bits = 0;
    for (const int place : operands) {
      if (!tensors.packed.has(place)) bits |= reinterpret_cast<uint64_t>(tensors.given[place]->const_data_ptr());
    }
    if (bits & misaligned) return false;
    return std::all_of(steps.begin(), steps.end(), [&](const auto& step) { return step->is_ready(stream); });
  }

  Made run(Operands& tensors, void* stream) const {
    Made made;
    if (workspace_bytes && backoff.skips()) {
      made.status = NO_WORKSPACE;
      return made;
    }
    Addresses addresses{};
    size_t count = 0;
    for (const int place : operands) addresses[count++] = reinterpret_cast<uint64_t>(tensors[place].const_data_ptr());
    const at::TensorOptions options = tensors.given[operands[0]]->options();
    for (size_t i = 0; i < results.size(); ++i) {
      const Form& result = results[i];
      made.results[i] = at::empty_strided(result.shape, result.strides, options.dtype(result.type));
      addresses[count++] = reinterpret_cast<uint64_t>(made.results[i].mutable_data_ptr());
    }
    at::Tensor scratch;
    if (workspace_bytes) {
      try {
        scratch = at::empty({workspace_bytes}, options.dtype(at::kByte));
      } catch (const c10::Error&) {
        backoff.failed();
        return {NO_WORKSPACE, {}};  // without the results, whose memory PyTorch's own kernel may need
      }
      backoff.succeeded();
      addresses[count] = reinterpret_cast<uint64_t>(scratch.mutable_data_ptr());
    }
    for (const auto& step : steps) {
      if ((made.status = step->run(addresses, stream))) break;
    }
    return made;
  }
};

struct Plan {
  std::array<std::optional<Launch>, 2> launches;  // y, or dx and dw; PyTorch's own kernel computes what has none
  Packed packed;
  std::atomic<uint64_t> calls{0};
  std::array<std::atomic<uint64_t>, 2> without_memory{};  // those in which PyTorch computed what a launch does
};

using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {  // FNV-1a over words
    uint64_t hash = 14695981039346656037ull;
    for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211ull;
    return hash ^ (hash >> 32);
  }
};

constexpr size_t MOST_PLANS = 8192;

// What all threads share. It is never freed: threads may call while the process ends.
struct Known {
  std::shared_mutex lock;
  std::unordered_map<Key, std::shared_ptr<Plan>, Hash> plans;
  uint64_t generation = 0;  // how often all plans were forgotten
};

// A fork waits for the lock, so that the child has whole plans and a free lock.
Known& known() {
  static Known* const made = [] {
    auto* all = new Known;
    pthread_atfork([] { known().lock.lock(); }, [] { known().lock.unlock(); },
                   [] { new (&known().lock) std::shared_mutex; });
    return all;
  }();
  return *made;
}

// What the call that this thread is in looks like, while Python runs it, and the generation that it had no plan in.
thread_local Key missed;
thread_local uint64_t missed_in;

struct Miss {
  Miss(Key&& key, bool is_known, uint64_t generation) {
    missed = is_known ? std::move(key) : Key();
    missed_in = generation;
  }
  ~Miss() { missed.clear(); }
  Miss(const Miss&) = delete;
  Miss& operator=(const Miss&) = delete;
};

struct Found {
  std::shared_ptr<Plan> plan;
  uint64_t generation = 0;
};

Found plan_of(const Key& key) {
  Known& all = known();
  std::shared_lock<std::shared_mutex> guard(all.lock);
  const auto found = all.plans.find(key);
  return {found == all.plans.end() ? nullptr : found->second, all.generation};
}

// Have a call go on to Python, which makes the device's context current in a thread that has none, or tells what fails.
void failed(const Key& key, int status) {
  if (is_of_this_call(status)) return;
  std::unique_lock<std::shared_mutex> guard(known().lock);
  known().plans.erase(key);
}

void add(Key& key, const at::Tensor& tensor) {
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

bool add(Key& key, c10::SymIntArrayRef values) {
  for (const c10::SymInt& value : values) {
    const auto known = value.maybe_as_int();
    if (!known) return false;
    key.push_back(*known);
  }
  return true;
}

// PyTorch has this switch since 2.13.
template <class Context>
auto depthwise_kernel(const Context& context, int) -> decltype(static_cast<int64_t>(context.cudnnDepthwiseKernel())) {
  return static_cast<int64_t>(context.cudnnDepthwiseKernel());
}

template <class Context>
int64_t depthwise_kernel(const Context&, long) {
  return 0;
}

// Whether float32 may be rounded to TF32; PyTorch 2.9 names switches by strings, later ones by enumerators.
template <class Precision, class Backend, class Operator>
int64_t allows_tf32(Precision (at::Context::*read)(Backend, Operator) const) {
  const at::Context& context = at::globalContext();
  if constexpr (std::is_enum_v<Backend>) {
    return (context.*read)(Backend::CUDA, Operator::CONV) == Precision::TF32;
  } else {
    return (context.*read)("cuda", "conv") == "tf32";
  }
}

// PyTorch's switches.
int64_t switches() {
  const at::Context& context = at::globalContext();
  return depthwise_kernel(context, 0) << 5 | allows_tf32(&at::Context::float32Precision) << 4 |
         context.deterministicAlgorithms() | context.deterministicCuDNN() << 1 | context.userEnabledCuDNN() << 2 |
         context.benchmarkCuDNN() << 3;
}

bool is_plain(const at::Tensor& tensor, const at::Tensor& first) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device() == first.device() &&
         tensor.scalar_type() == first.scalar_type() && !tensor.is_neg() && !tensor.is_conj();
}

bool is_served(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// Functions that tell of streams; each returns 0 where it can.
struct Streams {
  int (*current)(int32_t device, void** stream);   // torch/csrc/inductor: aoti_torch_get_current_cuda_stream
  int (*is_capturing)(void* stream, int* status);  // Driver API, cuda.h: cuStreamIsCapturing
};

// Of the CPU, where none are needed, of GPUs.
std::array<Streams, 2> streams;

void* const DEFAULT_STREAM = nullptr;  // the legacy one, which cannot be captured
constexpr int NOT_CAPTURED = 0;

// The current stream of a tensor's device; none where it is not known, or a CUDA graph is captured on it, whose calls
// are Python's.
std::optional<void*> stream_of(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  const Streams& told = streams[device.is_cpu() ? 0 : 1];
  if (!told.current) return device.is_cpu() ? std::optional<void*>(DEFAULT_STREAM) : std::nullopt;
  void* stream = nullptr;
  if (told.current(device.index(), &stream)) return std::nullopt;
  if (stream == DEFAULT_STREAM) return stream;
  int status = NOT_CAPTURED;
  if (told.is_capturing(stream, &status) || status != NOT_CAPTURED) return std::nullopt;
  return stream;
}

struct Geometry {
  c10::SymIntArrayRef stride, padding, dilation;
  bool transposed;
  c10::SymIntArrayRef output_padding;
  const c10::SymInt& groups;

  bool add_to(Key& key) const {
    const auto count = groups.maybe_as_int();
    if (!count) return false;
    key.push_back(*count << 1 | transposed);
    // Each may have one number for all dimensions.
    key.push_back(stride.size() | padding.size() << 8 | dilation.size() << 16 | output_padding.size() << 24);
    return add(key, stride) && add(key, padding) && add(key, dilation) && add(key, output_padding);
  }
};

using Forward = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::SymIntArrayRef,
                           c10::SymIntArrayRef, c10::SymIntArrayRef, bool, c10::SymIntArrayRef, c10::SymInt);
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Backward = Results(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::OptionalSymIntArrayRef,
                         c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, bool, c10::SymIntArrayRef,
                         c10::SymInt, std::array<bool, 3>);

// The operators whose kernels are Python's. They are defined for the life of the process, since handles point at them.
template <class Signature>
const c10::TypedOperatorHandle<Signature>& python(const char* name) {
  static const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return found;
}

// The kernels that ours stand before, and the key that all of them stand at.
struct Natives {
  c10::DispatchKey at;
  c10::SafeKernelFunction forward, backward;
};

// Of the CPU, of GPUs. Those of an earlier time are never freed: other threads may be in them.
std::array<std::atomic<const Natives*>, 2> natives;

const Natives& natives_of(c10::DispatchKeySet keys) {
  const bool is_gpu = keys.has_backend(c10::BackendComponent::CUDABit);
  return *natives[is_gpu ? 1 : 0].load(std::memory_order_acquire);
}

c10::SafeKernelFunction kernel_of(const char* name, c10::DispatchKey key) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").getComputedKernelForDispatchKey(key);
}

template <class... Arguments>
torch::jit::Stack called(const c10::SafeKernelFunction& kernel, c10::DispatchKeySet keys, Arguments&&... arguments) {
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Arguments>(arguments)...);
  kernel.callBoxed(kernel.opHandle(), keys, &stack);
  return stack;
}

at::Tensor convolution(c10::DispatchKeySet keys, const at::Tensor& x, const at::Tensor& w,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                       c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
                       c10::SymInt groups) {
  const bool has_bias = bias && bias->defined();
  Key key;
  key.reserve(48);
  const bool are_plain = is_served(x.scalar_type()) && is_plain(x, x) && is_plain(w, x) &&
                         (!has_bias || (is_plain(*bias, x) && bias->is_contiguous() && bias->dim() == 1));
  const std::optional<void*> stream = are_plain ? stream_of(x) : std::nullopt;
  bool is_known = stream.has_value();
  if (is_known) {
    const int64_t channels = has_bias ? bias->numel() : -1;
    key = {0, x.dim(), static_cast<int64_t>(x.scalar_type()), x.device().index(), switches(), channels};
    add(key, x);
    add(key, w);
    is_known = Geometry{stride, padding, dilation, transposed, output_padding, groups}.add_to(key);
  }
  const Found found = is_known ? plan_of(key) : Found();
  const Natives& native = natives_of(keys);
  const auto run_native = [&] {
    auto results =
        called(native.forward, keys, x, w, bias, stride, padding, dilation, transposed, output_padding, groups);
    return std::move(results[0]).toTensor();
  };
  if (const auto& plan = found.plan) {
    if (!plan->launches[0]) {
      plan->calls.fetch_add(1, std::memory_order_relaxed);
      return run_native();
    }
    const c10::OptionalDeviceGuard guard(x.device());
    const Launch& launch = *plan->launches[0];
    const std::array<const at::Tensor*, 3> given{&x, &w, has_bias ? &*bias : nullptr};
    Operands tensors(given.data(), plan->packed);
    if (launch.takes(tensors, *stream)) {
      Made made = launch.run(tensors, *stream);
      tensors.copies.clear();  // PyTorch's own kernel may need the memory
      if (!made.status) {
        plan->calls.fetch_add(1, std::memory_order_relaxed);
        if (!has_bias || launch.operands.size() == 3) return std::move(made.results[0]);
        std::vector<int64_t> shape(x.dim(), 1);
        shape[1] = -1;
        return made.results[0].add_(bias->view(shape));
      }
      if (made.status == NO_WORKSPACE) {
        plan->calls.fetch_add(1, std::memory_order_relaxed);
        plan->without_memory[0].fetch_add(1, std::memory_order_relaxed);
        return run_native();
      }
      failed(key, made.status);
    }
  }
  const auto& going_on = python<Forward>("miofind_router::convolution");
  if (!going_on.hasKernelForDispatchKey(native.at)) return run_native();  // it is being disabled
  const Miss miss(std::move(key), is_known, found.generation);
  return going_on.call(x, w, bias, stride, padding, dilation, transposed, output_padding, groups);
}

Results convolution_backward(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w,
                             at::OptionalSymIntArrayRef bias_sizes, c10::SymIntArrayRef stride,
                             c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                             c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  Key key;
  key.reserve(64);
  const bool are_plain = is_served(x.scalar_type()) && is_plain(x, x) && is_plain(w, x) && is_plain(grad, x);
  const std::optional<void*> stream = are_plain ? stream_of(x) : std::nullopt;
  bool is_known = stream.has_value();
  if (is_known) {
    const int64_t wanted = mask[0] | mask[1] << 1 | mask[2] << 2 | bias_sizes.has_value() << 3;
    key = {1, x.dim(), static_cast<int64_t>(x.scalar_type()), x.device().index(), switches(), wanted};
    add(key, grad);
    add(key, x);
    add(key, w);
    is_known = Geometry{stride, padding, dilation, transposed, output_padding, groups}.add_to(key);
  }
  const Found found = is_known ? plan_of(key) : Found();
  const Natives& native = natives_of(keys);
  const auto run_native = [&](const std::array<bool, 3>& wanted) -> Results {
    auto results = called(native.backward, keys, grad, x, w, bias_sizes, stride, padding, dilation, transposed,
                          output_padding, groups, wanted);
    return {std::move(results[0]).toTensor(), std::move(results[1]).toTensor(), std::move(results[2]).toTensor()};
  };
  if (const auto& plan = found.plan) {
    if (!plan->launches[0] && !plan->launches[1]) {
      plan->calls.fetch_add(1, std::memory_order_relaxed);
      return run_native(mask);
    }
    const c10::OptionalDeviceGuard guard(x.device());
    const std::array<const at::Tensor*, 3> given{&grad, &x, &w};
    Operands tensors(given.data(), plan->packed);
    std::array<at::Tensor, 3> results;
    std::array<bool, 3> left{};  // to PyTorch's own kernel
    bool is_done = true;
    for (int i = 0; i < 2; ++i) {
      left[i] = mask[i] && !plan->launches[i];
      if (mask[i] && !left[i]) is_done = is_done && plan->launches[i]->takes(tensors, *stream);
    }
    for (int i = 0; i < 2 && is_done; ++i) {
      if (!mask[i] || left[i]) continue;
      const Launch& launch = *plan->launches[i];
      Made made = launch.run(tensors, *stream);
      if (made.status == NO_WORKSPACE) {
        plan->without_memory[i].fetch_add(1, std::memory_order_relaxed);
        left[i] = true;
        continue;
      }
      if (made.status) {
        failed(key, made.status);
        is_done = false;
        break;
      }
      results[i] = std::move(made.results[0]);
      if (launch.results.size() == 2) results[2] = std::move(made.results[1]);
    }
    tensors.copies.clear();  // as above
    if (is_done) {
      plan->calls.fetch_add(1, std::memory_order_relaxed);
      if (left[0] || left[1]) {
        left[2] = mask[2] && !results[2].defined();
        Results rest = run_native(left);
        if (left[0]) results[0] = std::move(std::get<0>(rest));
        if (left[1]) results[1] = std::move(std::get<1>(rest));
        if (left[2]) results[2] = std::move(std::get<2>(rest));
      } else if (mask[2] && !results[2].defined()) {
        std::vector<int64_t> summed{0};
        for (int64_t i = 2; i < grad.dim(); ++i) summed.push_back(i);
        results[2] = at::sum(grad, summed);
      }
      return {std::move(results[0]), std::move(results[1]), std::move(results[2])};
    }
  }
  const auto& going_on = python<Backward>("miofind_router::convolution_backward");
  if (!going_on.hasKernelForDispatchKey(native.at)) return run_native(mask);  // it is being disabled
  const Miss miss(std::move(key), is_known, found.generation);
  return going_on.call(grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
}

// An argument's kind in a key, before its value.
enum Kind : int64_t { NONE, TENSOR, INTEGER, REAL, BOOLEAN, TEXT, INTEGERS };

void add(Key& key, const std::string& text) {
  key.push_back(text.size());
  for (size_t at = 0; at < text.size(); at += sizeof(int64_t)) {
    int64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    key.push_back(word);
  }
}

// Add all that tells an argument from others to a key; false for one that calls from here do not have.
bool add(Key& key, const c10::IValue& argument, const at::Tensor& first) {
  if (argument.isNone()) {
    key.push_back(NONE);
  } else if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.device() != first.device() || tensor.is_neg() ||
        tensor.is_conj()) {
      return false;
    }
    key.push_back(TENSOR);
    key.push_back(static_cast<int64_t>(tensor.scalar_type()));
    add(key, tensor);
  } else if (argument.isInt()) {
    key.insert(key.end(), {INTEGER, argument.toInt()});
  } else if (argument.isDouble()) {
    const double number = argument.toDouble();
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    key.insert(key.end(), {REAL, bits});
  } else if (argument.isBool()) {
    key.insert(key.end(), {BOOLEAN, argument.toBool()});
  } else if (argument.isString()) {
    key.push_back(TEXT);
    add(key, argument.toStringRef());
  } else if (argument.isIntList()) {
    const c10::List<int64_t> numbers = argument.toIntList();
    key.insert(key.end(), {INTEGERS, static_cast<int64_t>(numbers.size())});
    for (const int64_t number : numbers) key.push_back(number);
  } else {
    return false;
  }
  return true;
}

constexpr size_t MOST_ARGUMENTS = 24;

// What keys begin with: 0 and 1 for PyTorch's convolutions, a number from here on for each of miofind's operators.
constexpr int64_t FIRST_OWN = 2;

// An operator of miofind.
struct OwnOperator : c10::OperatorKernel {
  OwnOperator(int64_t number, c10::SafeKernelFunction python) : number(number), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& called, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = called.schema().arguments().size();
    const c10::IValue* const arguments = stack->data() + (stack->size() - count);
    const at::Tensor& first = arguments[0].toTensor();
    std::array<const at::Tensor*, MOST_ARGUMENTS> given{};
    Key key;
    key.reserve(128);
    const std::optional<void*> stream = stream_of(first);
    bool is_known = stream.has_value() && count <= MOST_ARGUMENTS;
    key = {number, first.device().index(), switches()};
    for (size_t i = 0; is_known && i < count; ++i) {
      is_known = add(key, arguments[i], first);
      if (is_known && arguments[i].isTensor()) given[i] = &arguments[i].toTensor();
    }
    const Found found = is_known ? plan_of(key) : Found();
    if (const auto& plan = found.plan) {
      const c10::OptionalDeviceGuard guard(first.device());
      const Launch& launch = *plan->launches[0];
      Operands tensors(given.data(), plan->packed);
      if (launch.takes(tensors, *stream)) {
        Made made = launch.run(tensors, *stream);
        if (!made.status) {
          plan->calls.fetch_add(1, std::memory_order_relaxed);
          torch::jit::drop(*stack, count);
          for (size_t i = 0; i < launch.results.size(); ++i) stack->emplace_back(std::move(made.results[i]));
          return;
        }
        failed(key, made.status);
      }
    }
    const Miss miss(std::move(key), is_known, found.generation);
    python.callBoxed(python.opHandle(), keys, stack);
  }

  const int64_t number;
  const c10::SafeKernelFunction python;
};

// PyTorch warns of a kernel that is registered before another, which is what is done here.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernels at each key, by its name. They stay in use until the process ends, unless they are taken away.
std::unordered_map<std::string, std::unique_ptr<torch::Library>>& libraries() {
  static auto* const made = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>;
  return *made;
}

// The name that the kernels of miofind's operators at a key have there.
std::string own_at(const char* key) {
  return std::string("miofind ") + key;
}

constexpr const char* SCHEMAS[] = {
    "convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
    "convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
};

// What an action fails with, nullptr where it does not; the text stays until the thread's next one.
template <class Action>
const char* refusal(const Action& action) {
  thread_local std::string told;
  try {
    action();
  } catch (const std::exception& error) {
    told = error.what();
    return told.c_str();
  }
  return nullptr;
}

// Of a tensor of 2, 4 or 8 bytes an element; those of 2 are bfloat16 or not.
Form form_of(int rank, const int64_t* shape, const int64_t* strides, int bytes, int is_bfloat16) {
  const at::ScalarType half = is_bfloat16 ? at::kBFloat16 : at::kHalf;
  const at::ScalarType type = bytes == 8 ? at::kDouble : bytes == 4 ? at::kFloat : half;
  return {{shape, shape + rank}, {strides, strides + rank}, type};
}

std::vector<std::unique_ptr<Step>>& steps_of(void* plan, int which) {
  return (*static_cast<std::shared_ptr<Plan>*>(plan))->launches[which]->steps;
}

}  // namespace

// What Python calls, by ctypes. A plan is the caller's to free, adopted or not.
extern "C" {

void miofind_use_driver(void* launch, void* replace) {
  launch_kernel = reinterpret_cast<LaunchKernel>(launch);
  replace_address = reinterpret_cast<ReplaceAddress>(replace);
}

// Have these tell of the streams of the devices of a key of the dispatcher, "CUDA" or "CPU".
void miofind_use_streams(const char* key, void* current, void* is_capturing) {
  Streams& told = streams[c10::parseDispatchKey(key) == c10::DispatchKey::CUDA ? 1 : 0];
  told.current = reinterpret_cast<decltype(told.current)>(current);
  told.is_capturing = reinterpret_cast<decltype(told.is_capturing)>(is_capturing);
}

// Define the operators whose kernels are Python's. Returns why it cannot, nullptr where it can.
const char* miofind_define() {
  return refusal([] {
    auto* made = new torch::Library(torch::Library::DEF, "miofind_router", std::nullopt, __FILE__, __LINE__);
    for (const char* schema : SCHEMAS) made->def(schema);
  });
}

// Put these kernels before PyTorch's at a key of the dispatcher, "CUDA" or "CPU".
// Returns why it cannot, nullptr where it can.
const char* miofind_enable(const char* key) {
  return refusal([key] {
    const c10::DispatchKey at = c10::parseDispatchKey(key);
    libraries().erase(key);  // else these kernels would stand before themselves
    auto own = std::make_unique<Natives>(
        Natives{at, kernel_of("aten::convolution", at), kernel_of("aten::convolution_backward", at)});
    natives[at == c10::DispatchKey::CUDA ? 1 : 0].store(own.release(), std::memory_order_release);
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", at, __FILE__, __LINE__);
    library->impl("convolution", TORCH_FN(convolution));
    library->impl("convolution_backward", TORCH_FN(convolution_backward));
    libraries()[key] = std::move(library);
  });
}

// Put kernels before Python's ones of miofind's operators, one name after another up to nullptr, at a key.
// Returns why it cannot, nullptr where it can.
const char* miofind_enable_own(const char* const* names, const char* key) {
  return refusal([names, key] {
    const c10::DispatchKey at = c10::parseDispatchKey(key);
    libraries().erase(own_at(key));  // else these kernels would stand before themselves
    Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "miofind", at, __FILE__, __LINE__);
    for (int64_t i = 0; names[i]; ++i) {
      const std::string name = std::string("miofind::") + names[i];
      auto own = std::make_unique<OwnOperator>(FIRST_OWN + i, kernel_of(name.c_str(), at));
      library->impl(name.c_str(),
                    torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::move(own))));
    }
    libraries()[own_at(key)] = std::move(library);
  });
}

void miofind_disable(const char* key) {
  libraries().erase(key);
}

void miofind_disable_own(const char* key) {
  libraries().erase(own_at(key));
}

void miofind_clear() {
  std::unique_lock<std::shared_mutex> guard(known().lock);
  known().plans.clear();
  ++known().generation;
}

// Whether calls that look like the one that this thread is in could do without Python.
int miofind_is_missed() {
  return !missed.empty();
}

void* miofind_plan() {
  return new std::shared_ptr<Plan>(std::make_shared<Plan>());
}

void miofind_launch(void* plan, int which, int operands, const int32_t* places, int64_t workspace_bytes,
                    uint64_t alignment) {
  Launch& launch = (*static_cast<std::shared_ptr<Plan>*>(plan))->launches[which].emplace();
  launch.operands.assign(places, places + operands);
  launch.workspace_bytes = workspace_bytes;
  launch.misaligned = alignment - 1;
}

// A result, by `form_of`.
void miofind_result(void* plan, int which, int rank, const int64_t* shape, const int64_t* strides, int bytes,
                    int is_bfloat16) {
  (*static_cast<std::shared_ptr<Plan>*>(plan))
      ->launches[which]
      ->results.push_back(form_of(rank, shape, strides, bytes, is_bfloat16));
}

// How the tensor at a place is packed first, by `form_of`.
void miofind_packed(void* plan, int place, int rank, const int64_t* shape, const int64_t* strides, int bytes,
                    int is_bfloat16) {
  Packed& packed = (*static_cast<std::shared_ptr<Plan>*>(plan))->packed;
  packed.places.push_back(place);
  packed.forms.push_back(form_of(rank, shape, strides, bytes, is_bfloat16));
}

void miofind_kernel(void* plan, int which, void* function, const uint32_t* grid, const uint32_t* block,
                    uint32_t shared_bytes, int is_dependent) {
  auto kernel = std::make_unique<Kernel>(function, is_dependent != 0);
  std::memcpy(kernel->config.grid, grid, sizeof kernel->config.grid);
  std::memcpy(kernel->config.block, block, sizeof kernel->config.block);
  kernel->config.shared_bytes = shared_bytes;
  steps_of(plan, which).push_back(std::move(kernel));
}

// Of a kernel that was the last step to be added.
void miofind_parameter(void* plan, int which, const char* content, size_t bytes, int is_map) {
  Kernel& kernel = static_cast<Kernel&>(*steps_of(plan, which).back());
  Parameter parameter;
  parameter.content.assign(content, content + bytes);
  parameter.is_map = is_map != 0;
  parameter.place = kernel.bytes;
  kernel.bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  kernel.parameters.push_back(std::move(parameter));
}

void miofind_fixup(void* plan, int which, size_t at, int source, uint64_t offset) {
  Kernel& kernel = static_cast<Kernel&>(*steps_of(plan, which).back());
  kernel.parameters.back().fixups.push_back({at, source, offset});
}

size_t miofind_bytes_of_product() {
  return sizeof(ProductParts);
}

size_t miofind_bytes_of_convolution() {
  return sizeof(ConvolutionParts);
}

void miofind_product(void* plan, int which, const ProductParts* parts) {
  steps_of(plan, which).push_back(std::make_unique<Product>(*parts));
}

// For the thread that calls this.
void miofind_convolution(void* plan, int which, const ConvolutionParts* parts) {
  steps_of(plan, which).push_back(std::make_unique<Convolution>(*parts));
}

// Have later calls that look like this thread's last miss run a plan; 0 where all plans were forgotten since.
int miofind_adopt(void* plan) {
  Known& all = known();
  std::unique_lock<std::shared_mutex> guard(all.lock);
  if (missed.empty() || missed_in != all.generation) return 0;
  if (all.plans.size() >= MOST_PLANS) all.plans.erase(all.plans.begin());
  all.plans[missed] = *static_cast<std::shared_ptr<Plan>*>(plan);
  return 1;
}

uint64_t miofind_calls(void* plan) {
  return (*static_cast<std::shared_ptr<Plan>*>(plan))->calls.load();
}

uint64_t miofind_without_memory(void* plan, int which) {
  return (*static_cast<std::shared_ptr<Plan>*>(plan))->without_memory[which].load();
}

void miofind_free(void* plan) {
  delete static_cast<std::shared_ptr<Plan>*>(plan);
}
}
