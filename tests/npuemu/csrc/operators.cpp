// Operators: the CPU's kernels on zero-copy aliases of the npu tensors.
//
// Every operator without a kernel of its own goes through alias_fallback(), which hands the CPU kernel CPU tensors over
// the same bytes and labels the results as npu tensors again.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <set>

#include "npuemu.h"

namespace npuemu {

using at::IntArrayRef;
using at::Scalar;  // the lists of autocast use the bare names
using at::ScalarType;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;

// ------------------------------------------------------------------------------------------------ aliases

static c10::Storage cpu_storage_of(const c10::Storage& npu) {
  auto* keep = new c10::Storage(npu);
  c10::DataPtr data(npu.mutable_data(), keep, [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(at::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), npu.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

static c10::Storage npu_storage_of(const c10::Storage& cpu, DeviceIndex device) {
  auto* keep = new c10::Storage(cpu);
  c10::DataPtr host(cpu.mutable_data(), keep, [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(at::kCPU));
  auto data = charge_to_device(std::move(host), cpu.nbytes(), device);
  return c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(), std::move(data), device_allocator(), true);
}

// A tensor like `like` over `storage`.
static Tensor view_over(const c10::Storage& storage, const Tensor& like, DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

Tensor cpu_alias(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNPU) return tensor;
  return view_over(cpu_storage_of(tensor.storage()), tensor, DispatchKey::CPU);
}

static Tensor to_npu(const Tensor& cpu, DeviceIndex device) {
  if (!cpu.defined()) return cpu;
  return view_over(npu_storage_of(cpu.storage(), device), cpu, DispatchKey::PrivateUse1);
}

// Translates the arguments of one call to the CPU and its results back, so that what shared a storage shares it still.
class Aliases {
 public:
  explicit Aliases(const std::string& op) : op_(op) {}

  // The device of the npu arguments seen so far, else the current one.
  DeviceIndex device() const { return device_ < 0 ? current_device() : static_cast<DeviceIndex>(device_); }
  bool saw_npu_and_cpu_tensors() const { return !tensors_.empty() && !cpu_arguments_.empty(); }

  void saw_device(DeviceIndex device) {
    TORCH_CHECK(device_ < 0 || device_ == device, "Expected all tensors to be on the same device, but found at least ",
                "two devices, npu:", device_, " and npu:", int(device), "! (operator ", op_, ")");
    device_ = device;
  }

  c10::Storage to_cpu(const c10::Storage& storage) {
    if (storage.device_type() != kNPU) return storage;
    saw_device(storage.device().index());
    for (const auto& [npu, cpu] : storages_)
      if (npu.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return cpu;
    storages_.emplace_back(storage, cpu_storage_of(storage));
    return storages_.back().second;
  }

  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kNPU) {
      if (tensor.device().is_cpu() && tensor.dim() > 0) cpu_arguments_.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == at::kStrided, "npuemu: only strided npu tensors are emulated (", op_, ")");
    for (const auto& [npu, cpu] : tensors_)
      if (npu.is_same(tensor)) return cpu;
    tensors_.emplace_back(tensor, view_over(to_cpu(tensor.storage()), tensor, DispatchKey::CPU));
    return tensors_.back().second;
  }

  Tensor from_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (const auto& [npu, cpu] : tensors_)
      if (cpu.is_same(tensor)) return npu;
    for (const auto& argument : cpu_arguments_)
      if (argument.is_same(tensor)) return tensor;
    return view_over(from_cpu(tensor.storage()), tensor, DispatchKey::PrivateUse1);
  }

  // A kernel may have resized an argument or given it another storage: carry that over.
  void write_back() {
    for (const auto& [npu, cpu] : storages_) {
      auto* to = npu.unsafeGetStorageImpl();
      auto* from = cpu.unsafeGetStorageImpl();
      if (from->data() == to->data() && from->nbytes() == to->nbytes()) continue;
      void* data = from->mutable_data();
      auto host = from->set_data_ptr(c10::DataPtr(data, Device(at::kCPU)));
      to->set_data_ptr_noswap(charge_to_device(std::move(host), from->nbytes(), to->device().index()));
      to->set_nbytes(from->nbytes());
    }
    for (const auto& [npu, cpu] : tensors_) {
      auto* to = npu.unsafeGetTensorImpl();
      const auto storage = from_cpu(cpu.storage());
      if (storage.unsafeGetStorageImpl() != to->storage().unsafeGetStorageImpl()) to->set_storage_keep_dtype(storage);
      if (to->sizes() != cpu.sizes() || to->strides() != cpu.strides() || to->storage_offset() != cpu.storage_offset())
        to->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

 private:
  const std::string& op_;
  int device_ = -1;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // npu, cpu
  std::vector<std::pair<Tensor, Tensor>> tensors_;               // npu, cpu
  std::vector<Tensor> cpu_arguments_;                            // with at least one dimension

  c10::Storage from_cpu(const c10::Storage& storage) {
    for (const auto& [npu, cpu] : storages_)
      if (cpu.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return npu;
    storages_.emplace_back(npu_storage_of(storage, device()), storage);
    return storages_.back().first;
  }
};

// ------------------------------------------------------------------------------------------------ the fallback

// Operators whose real kernels accept host tensors next to device tensors.
static bool accepts_cpu_tensors(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index.Tensor",         "aten::index.Tensor_out",   "aten::index_put_",
      "aten::_index_put_impl_",     "aten::index_put",          "aten::_unsafe_index.Tensor",
      "aten::set_.source_Tensor",   "aten::_foreach_copy_",     "aten::_amp_update_scale_"};
  return names.count(name) > 0;
}

// Operators whose result's shape, or whose result, the host has to learn from the device before it goes on.
static const char* wait_of(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  static const std::set<std::string> shapes = {
      "aten::nonzero",           "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount",     "aten::repeat_interleave.Tensor"};
  static const std::set<std::string> indexing = {"aten::index.Tensor", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_"};
  if (name == "aten::_local_scalar_dense" || name == "aten::equal") return "item";
  if (name == "aten::repeat_interleave.Tensor" && arguments.size() > 1 && !arguments[1].isNone()) return nullptr;
  if (shapes.count(name)) return "nonzero";
  if (indexing.count(name))  // an index of booleans is looked up as nonzero() does
    for (const std::optional<Tensor> index : arguments[1].toOptionalTensorList())
      if (index && index->defined() && index->is_privateuseone() &&
          (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
        return "nonzero";
  return nullptr;
}

static void argument_to_cpu(c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    value = aliases.to_cpu(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = aliases.to_cpu(tensor);
    value = c10::IValue(c10::List<Tensor>(tensors));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      tensors.push_back(tensor ? std::optional<Tensor>(aliases.to_cpu(*tensor)) : std::nullopt);
    value = c10::IValue(tensors);
  } else if (value.isStorage()) {
    value = aliases.to_cpu(value.toStorage());
  } else if (value.isDevice() && value.toDevice().type() == kNPU) {
    aliases.saw_device(index_of(value.toDevice()));
    value = Device(at::kCPU);
  } else if (value.isGenerator()) {
    value = cpu_generator_of(value.toGenerator());
  }
}

static void result_from_cpu(c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    value = aliases.from_cpu(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = aliases.from_cpu(tensor);
    value = c10::IValue(c10::List<Tensor>(tensors));
  }
}

static bool is_optional_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  return type->kind() == c10::TypeKind::OptionalType &&
         type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
}

static void alias_fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  const size_t first = stack->size() - schema.arguments().size();
  Aliases aliases(name);
  if (const char* wait = wait_of(name, c10::ArrayRef<c10::IValue>(*stack).slice(first))) count_wait(wait);
  for (size_t i = first; i < stack->size(); ++i) argument_to_cpu((*stack)[i], aliases);
  TORCH_CHECK(!aliases.saw_npu_and_cpu_tensors() || accepts_cpu_tensors(name), "Expected all tensors to be on the same ",
              "device, but found at least two devices, npu:", int(aliases.device()), " and cpu! (operator ", name, ")");
  for (size_t i = first; i < stack->size(); ++i)  // the default generator is that device's, not the host's
    if ((*stack)[i].isNone() && is_optional_generator(schema.arguments()[i - first]))
      (*stack)[i] = cpu_generator_of(default_generator(aliases.device()));
  enter_operator(name, aliases.device());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  aliases.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) result_from_cpu((*stack)[i], aliases);
}

// ------------------------------------------------------------------------------------------------ own kernels

static Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const CurrentDeviceGuard on(index_of(device));
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const CurrentDeviceGuard on(index_of(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A copy from or to the host is awaited, unless it was asked not to and the host's memory is pinned.
static Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  for (const Tensor& tensor : {self, dst})
    if (tensor.device().type() == kNPU) enter_operator("aten::_copy_from", tensor.device().index());
  const bool down = dst.is_cpu(), up = self.is_cpu();
  if ((down || up) && self.numel() > 0 && !(non_blocking && is_pinned((down ? dst : self).storage().data())))
    count_wait(down ? "copy" : "upload");
  cpu_alias(dst).copy_(cpu_alias(self));
  return dst;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) const_cast<Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}

// There is no float64 to cast to: torch_npu says so once and casts to float32.
static Tensor to_copy(const Tensor& self, std::optional<ScalarType> dtype, std::optional<at::Layout> layout,
                      std::optional<Device> device, std::optional<bool> pin, bool non_blocking,
                      std::optional<at::MemoryFormat> format) {
  if (dtype == at::kDouble && (!device || device->type() == kNPU)) {
    warn_once("Device do not support double dtype now, dtype cast replace with float. (function operator())");
    dtype = at::kFloat;
  }
  return at::native::_to_copy(self, dtype, layout, device, pin, non_blocking, format);
}

// PyTorch takes this fused dropout on accelerators. Its CPU kernel has no generator argument and would draw from the
// host's; what it draws and computes here is what dropout does on a CPU.
static std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor noise = at::empty_like(input).bernoulli_(1.0 - p);
  if (p < 1.0) noise.div_(1.0 - p);
  return {input * noise, noise.ne(0)};
}

// Lets nn.Module.to() keep its Parameter objects (parameter.data = moved), as the real plugin does.
static bool has_compatible_shallow_copy_type(const Tensor& a, const Tensor& b) {
  const auto dense = [](const Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || t.is_privateuseone()); };
  return dense(a) && dense(b);
}

static void record_stream(Tensor&, c10::Stream) {}  // every operator has finished when it returns

// The "overrideable" convolutions have stubs that throw, which the boxed fallback would never replace.
static Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                          IntArrayRef output_padding, int64_t groups) {
  const auto device = input.device().index();
  enter_operator("aten::convolution_overrideable", device);
  std::optional<Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = cpu_alias(*bias);
  return to_npu(at::convolution(cpu_alias(input), cpu_alias(weight), cpu_bias, stride, padding, dilation, transposed,
                                output_padding, groups),
                device);
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const auto device = input.device().index();
  enter_operator("aten::convolution_backward_overrideable", device);
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [to_input, to_weight, to_bias] =
      at::convolution_backward(cpu_alias(grad), cpu_alias(input), cpu_alias(weight), IntArrayRef{channels}, stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  return {to_npu(to_input, device), to_npu(to_weight, device), to_npu(to_bias, device)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&alias_fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_to_copy", TORCH_FN(to_copy));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

// Autocast by PyTorch's own lists.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace npuemu
