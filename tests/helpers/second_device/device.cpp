// A device of torch whose memory is the host's and whose operators are the CPU's, but which, like a GPU, takes no tensors
// of the CPU beside its own. It occupies the dispatch key that torch keeps for such devices (PrivateUse1).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

using at::Tensor;
using c10::Device;
using c10::SymInt;
using c10::SymIntArrayRef;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const Device HERE(KIND, 0);

// ---- memory

struct HostMemory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    if (bytes && posix_memalign(&start, 64, bytes)) throw std::bad_alloc();
    return {start, start, &std::free, HERE};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

HostMemory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// ---- the one device, without streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device) const override { return HERE; }
  Device getDevice() const override { return HERE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::Stream getNewStream(Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return HERE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto larger = memory.allocate(bytes);
    if (const auto common = std::min(bytes, storage.nbytes())) std::memcpy(larger.get(), storage.data(), common);
    auto* owner = storage.unsafeGetStorageImpl();
    owner->set_data_ptr_noswap(std::move(larger));
    owner->set_nbytes(bytes);
  }
};

Hooks hooks;

// ---- tensors that share or copy memory

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           keys, c10::dtype_or_default(type));
}

Tensor on_host(const Tensor& tensor) {  // an alias
  if (tensor.device().type() != KIND) return tensor;
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* owner = tensor.unsafeGetTensorImpl();
  owner->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (owner->storage_offset() + owner->numel()) * owner->itemsize();
  if (bytes > owner->storage().nbytes()) hooks.resizePrivateUse1Bytes(owner->storage(), bytes);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& tensor) { return on_host(tensor).item(); }

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

Tensor& set_part(Tensor& tensor, at::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* owner = tensor.unsafeGetTensorImpl();
  owner->set_storage_keep_dtype(std::move(storage));
  owner->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const std::vector<SymInt> size{static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize())}, stride{1};
  return set_part(tensor, std::move(storage), 0, size, stride);
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_part(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

// ---- operators

// Refuse what CUDA refuses: tensors of the CPU beside its own, other than numbers and indices, and generators of the CPU.
void require_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  const bool indexes = name.find("index") != std::string::npos;
  bool ours = false;
  std::string other;
  for (size_t place = 0; place < arguments.size(); ++place) {
    const auto& value = arguments[place];
    const auto& argument = schema.arguments()[place].name();
    const auto look = [&](const Tensor& tensor, bool listed) {
      if (!tensor.defined()) return;
      if (tensor.device().type() == KIND) ours = true;
      else if ((tensor.dim() || (listed && argument == "tensors")) && !(indexes && argument == "indices")) other = argument;
    };
    if (value.isTensor()) look(value.toTensor(), false);
    if (value.isList())
      for (const auto& item : value.toListRef())
        if (item.isTensor()) look(item.toTensor(), true);
    if (value.isGenerator() && value.toGenerator().defined())
      TORCH_CHECK(value.toGenerator().device().type() == KIND, "second device: `", name, "` got a generator of the CPU");
  }
  TORCH_CHECK(!ours || other.empty(), "second device: `", name, "` got `", other, "` on the CPU");
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require_one_device(op, *stack);
  at::native::cpu_fallback(op, stack);
}

void require_here(std::initializer_list<Tensor> tensors) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(!tensor.defined() || tensor.device().type() == KIND, "second device: a convolution got a tensor on the CPU");
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   SymInt groups) {
  const bool biased = bias && bias->defined();
  require_here({input, weight, biased ? *bias : Tensor()});
  const auto bias_on_cpu = biased ? std::optional<Tensor>(bias->cpu()) : std::nullopt;
  return at::convolution_symint(input.cpu(), weight.cpu(), bias_on_cpu, stride, padding, dilation, transposed,
                                output_padding, groups).to(HERE);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& slope, const Tensor& input, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups, std::array<bool, 3> asked) {
  require_here({slope, input, weight});
  const std::vector<SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const auto found = at::convolution_backward_symint(slope.cpu(), input.cpu(), weight.cpu(), SymIntArrayRef(bias), stride,
                                                     padding, dilation, transposed, output_padding, groups, asked);
  const auto here = [](const Tensor& tensor) { return tensor.defined() ? tensor.to(HERE) : tensor; };
  return {here(std::get<0>(found)), here(std::get<1>(found)), here(std::get<2>(found))};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("as_strided", &as_strided);
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace
