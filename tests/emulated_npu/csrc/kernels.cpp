// Operators that the fallback cannot run: allocation, copies between devices, storages, and reading a number.
#include "npu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <atomic>

namespace emulated {
namespace {

struct OnDevice {
  int before;
  explicit OnDevice(std::optional<c10::Device> device)
      : before(device && device->index() >= 0 ? set_current_device(device->index()) : current_device()) {}
  ~OnDevice() {
    set_current_device(before);
  }
};

c10::DispatchKeySet npu_keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice here(device);
  return at::detail::empty_generic(
      size, device_allocator(), npu_keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned) {
  OnDevice here(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), npu_keys(), c10::dtype_or_default(dtype));
}

void count_copy(const char* direction, const at::Tensor& tensor) {
  count("copies", direction);
  count("copied_bytes", direction, static_cast<int64_t>(tensor.nbytes()));
}

void on_host(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView plain;
  at::Tensor target = to;
  target.copy_(from);
  if (from.scalar_type() != to.scalar_type()) {
    saturate(target);
  }
}

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  count_copy("host to device", from);
  if (!non_blocking) {
    synchronise_device(to.device().index(), "copy to device");
  } else if (!is_pinned(from.storage().data())) {
    refuse_while_capturing("copy of pageable memory");
    count("synchronisations", "copy of pageable memory");  // the host waits while the runtime stages the copy
  } else {
    finish_copies_into(from, current_stream(to.device().index()));  // a stream copies in order
  }
  if (from.scalar_type() != to.scalar_type()) {
    judge("copy", to.scalar_type());
    count_kernel("copy", 1, extent(from) + extent(to));
  }
  on_host(cpu_alias(to), from);
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = from.device().index();
  count_copy("device to host", from);
  if (from.scalar_type() != to.scalar_type()) {
    judge("copy", from.scalar_type());
    count_kernel("copy", 1, extent(from) + extent(to));
  }
  const at::Tensor value = cpu_alias(from);
  if (non_blocking && settings().deferred && is_pinned(to.storage().data())) {
    defer_copy(to, value, device);
    return;
  }
  if (!non_blocking || !is_pinned(to.storage().data())) {
    synchronise_device(device, "copy to host");
  }
  on_host(to, value);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.defined() && to.defined(), "copy: a tensor is undefined");
  if (from.numel() == 0 && to.numel() == 0) {
    return to;
  }
  if (from.device().type() != kNpu) {
    to_device(from, to, non_blocking);
  } else if (to.device().type() != kNpu) {
    to_host(from, to, non_blocking);
  } else {
    if (from.device() != to.device()) {
      count_copy("device to device", from);
    } else {
      if (from.scalar_type() != to.scalar_type()) {
        judge("copy", from.scalar_type());
        judge("copy", to.scalar_type());
      }
      count_kernel("copy", 1, extent(from) + extent(to));
    }
    on_host(cpu_alias(to), cpu_alias(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  synchronise_device(tensor.device().index(), "item");
  return at::_local_scalar_dense(cpu_alias(tensor));
}

at::Tensor& set_storage_and_shape(
    at::Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
  return set_storage_and_shape(tensor, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_and_shape(
      tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  OnDevice here(tensor.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_and_shape(tensor, std::move(none), 0, {0}, {});
}

bool is_set_to(const at::Tensor& tensor, const at::Tensor& source) {
  return tensor.storage().is_alias_of(source.storage()) && tensor.storage_offset() == source.storage_offset() &&
      tensor.sizes() == source.sizes() && tensor.strides() == source.strides();
}

void record_stream(at::Tensor&, at::Stream) {}  // memory is free as soon as nobody holds it

// Attention as matmuls and softmax, for chips without a fused kernel. For the others, the stub replaces it.
int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// Like on the real device. Only then does Module.to() keep its Parameter objects, and with them tied weights.
bool compatible_shallow_copy(const at::Tensor& tensor, const at::Tensor& from) {
  auto dense = [](const at::Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || t.device().type() == kNpu); };
  return dense(tensor) && dense(from);
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups) {
  judge("convolution", input.scalar_type());
  count_kernel("convolution");
  at::AutoDispatchBelowADInplaceOrView plain;
  Quiet inside;
  const auto host_bias = bias && bias->defined() ? std::optional<at::Tensor>(cpu_alias(*bias)) : std::nullopt;
  return wrap(at::convolution(cpu_alias(input), cpu_alias(weight), host_bias, stride, padding, dilation, transposed,
                              output_padding, groups), input.device().index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  judge("convolution_backward", input.scalar_type());
  count_kernel("convolution_backward");
  at::AutoDispatchBelowADInplaceOrView plain;
  Quiet inside;
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const int64_t bias_sizes[] = {outputs};
  auto [a, b, c] = at::convolution_backward(
      cpu_alias(gradient), cpu_alias(input), cpu_alias(weight), at::OptionalIntArrayRef(bias_sizes), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  auto back = [&](const at::Tensor& t) { return t.defined() ? wrap(t, input.device().index()) : t; };
  return {back(a), back(b), back(c)};
}

} // namespace

namespace {
std::atomic<bool> overflowed{false};
}

void saturate(const at::Tensor& cpu) {
  if (!settings().saturates || !cpu.defined() || cpu.scalar_type() != at::kHalf) {
    return;
  }
  at::AutoDispatchBelowADInplaceOrView plain;
  if (!at::isfinite(cpu).all().item<bool>()) {
    overflowed = true;
    at::Tensor target = cpu;
    target.nan_to_num_(0.0);  // infinities become the dtype's largest numbers
  }
}

bool overflow_flag(bool clear) {
  return clear ? overflowed.exchange(false) : overflowed.load();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("set_.source_Storage_storage_offset", &set_storage_and_shape);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("is_set_to", &is_set_to);
  library.impl("record_stream", &record_stream);
  library.impl("_fused_sdp_choice", &sdp_choice);
  library.impl("_has_compatible_shallow_copy_type", &compatible_shallow_copy);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

// Resolving a conjugate, negative or zero tensor copies it. Without these, that copy would resolve it again, forever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, ZeroTensor, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace emulated
