// Runs every operator without a kernel here: calls the CPU's kernel on aliases of the arguments, and maps results back.
//
// PyTorch's own at::native::cpu_fallback copies tensors, and accepts tensors of several devices; this one does neither.
#include "npu.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <mutex>

namespace emulated {
namespace {

// Facts about an operator, worked out once.
struct Operator {
  std::string name;
  bool launches;        // launches a kernel; it is no view, allocation or reshape
  bool waits;           // the shape of its result depends on values, so the host must wait for them
  bool takes_indices;   // CPU tensors in its list of indices are copied to the device, not refused
  bool per_tensor;      // a multi-tensor operator that launches one kernel per tensor
  bool by_chunks;       // a multi-tensor operator that launches one kernel per 48 tensors
  bool supported;
  bool overwrites;      // does not read what it writes in place
  bool gathers;         // reads only some rows of its first tensor: as much as it gives
  bool scatters;        // in place, it changes only some rows of its first tensor: as many as it is given
  bool multiplies;      // a product of matrices
  c10::SmallVector<int, 2> generators;  // arguments that are generators, even if they are None
};

const std::unordered_set<std::string> kShapeOnly = {
    "squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided", "resize", "resize_as", "set",
    "detach", "is_set_to", "record_stream", "_resize_output", "empty", "empty_strided", "view", "_reshape_alias"};
const std::unordered_set<std::string> kWaiting = {
    "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "repeat_interleave", "equal", "histc"};

const std::unordered_set<std::string> kOverwriting = {"fill", "zero", "copy", "normal", "uniform", "_foreach_zero",
                                                      "_foreach_copy"};
const std::unordered_set<std::string> kGathering = {"embedding", "index_select", "gather", "index"};
const std::unordered_set<std::string> kScattering = {"scatter", "scatter_add", "index_put", "_index_put_impl",
                                                     "index_add", "index_copy"};

Operator describe(const c10::FunctionSchema& schema) {
  Operator op{};
  op.name = base_name(schema.name());
  op.launches = !gives_views(schema) && !kShapeOnly.count(op.name);
  op.waits = kWaiting.count(op.name) > 0;
  op.takes_indices = op.name == "index" || op.name == "index_put" || op.name == "_index_put_impl";
  op.per_tensor = op.name.rfind("_fused_adam", 0) == 0 || op.name.rfind("_amp_foreach", 0) == 0;
  op.by_chunks = op.name.rfind("_foreach", 0) == 0;
  op.supported = settings().supported.empty() || settings().supported.count(op.name) > 0;
  op.overwrites = kOverwriting.count(op.name) > 0;
  op.gathers = kGathering.count(op.name) > 0;
  op.scatters = kScattering.count(op.name) > 0;
  op.multiplies = is_product(schema);
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].type()->str().rfind("Generator", 0) == 0) {
      op.generators.push_back(static_cast<int>(i));
    }
  }
  return op;
}

const Operator& known(const c10::FunctionSchema& schema) {
  static auto& table = *new std::unordered_map<const c10::FunctionSchema*, Operator>;
  static std::mutex mutex;
  thread_local std::unordered_map<const c10::FunctionSchema*, const Operator*> mine;
  auto found = mine.find(&schema);
  if (found != mine.end()) {
    return *found->second;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = table.try_emplace(&schema);
  if (fresh) {
    entry->second = describe(schema);
  }
  mine[&schema] = &entry->second;  // references into an unordered_map stay valid
  return entry->second;
}

void release_original(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// A CPU storage that uses the memory of an npu storage and keeps it alive.
c10::Storage cpu_storage(const c10::Storage& original) {
  c10::DataPtr data(
      const_cast<void*>(original.data()), new c10::Storage(original), &release_original, c10::DeviceType::CPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), original.nbytes(), std::move(data), c10::GetCPUAllocator(),
                      /*resizable=*/true);
}

at::Tensor over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  at::Tensor tensor(std::move(impl));
  if (like.is_conj()) {
    tensor._set_conj(true);
  }
  if (like.is_neg()) {
    tensor._set_neg(true);
  }
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

c10::Storage npu_storage(const c10::Storage& cpu, int device) {
  c10::DataPtr data = adopt(cpu, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(), std::move(data), device_allocator(),
                      /*resizable=*/true);
}

// The arguments of one call: npu tensors and their CPU aliases. Tensors that share storage have aliases that share it.
struct Call {
  const Operator& op;
  struct Pair {
    at::Tensor original, alias;
  };
  struct StoragePair {
    c10::Storage original, alias;
    const void* data;
  };
  c10::SmallVector<Pair, 8> tensors;
  c10::SmallVector<StoragePair, 8> storages;
  int device = -1;
  bool host_matrix = false;  // a CPU tensor with at least one dimension was given
  int64_t list_size = -1;

  at::Tensor alias(const at::Tensor& tensor, bool index = false) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() != kNpu) {
      if (index && tensor.is_cpu()) {  // indexing copies it to the device, like the real device
        count("copies", "host to device");
        count("copied_bytes", "host to device", static_cast<int64_t>(tensor.nbytes()));
        count("synchronisations", "index on the host");
      } else {
        host_matrix |= tensor.dim() > 0 || !tensor.is_cpu();
      }
      return tensor;
    }
    const int here = tensor.device().index();
    TORCH_CHECK(device < 0 || device == here, "Expected all tensors to be on the same device, but found at least two ",
                "devices, npu:", device, " and npu:", here, "! (operator ", op.name, ")");
    device = here;
    if (op.launches) {
      judge(op.name, tensor.scalar_type());
    }
    for (auto& pair : tensors) {
      if (pair.original.is_same(tensor)) {
        return pair.alias;
      }
    }
    tensors.push_back({tensor, over(storage(tensor.storage()), tensor, c10::DispatchKey::CPU)});
    return tensors.back().alias;
  }

  const c10::Storage& storage(const c10::Storage& original) {
    for (auto& pair : storages) {
      if (pair.original.is_alias_of(original)) {
        return pair.alias;
      }
    }
    storages.push_back({original, cpu_storage(original), original.data()});
    return storages.back().alias;
  }

  // Copy back the shapes, strides and memory that the CPU kernel changed in its arguments.
  void write_back() {
    for (auto& pair : storages) {
      if (pair.alias.data() != pair.data || pair.alias.nbytes() != pair.original.nbytes()) {
        auto* impl = pair.original.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(kNpu, device)));  // free before taking
        impl->set_data_ptr_noswap(adopt(pair.alias, device));
        impl->set_nbytes(pair.alias.nbytes());
      }
    }
    for (auto& pair : tensors) {
      const auto &a = pair.alias, &o = pair.original;
      if (a.sizes() != o.sizes() || a.strides() != o.strides() || a.storage_offset() != o.storage_offset()) {
        o.unsafeGetTensorImpl()->set_sizes_and_strides(a.sizes(), a.strides(), a.storage_offset());
      }
    }
  }

  at::Tensor result(const at::Tensor& cpu) {
    if (!cpu.defined()) {
      return cpu;
    }
    for (auto& pair : tensors) {
      if (pair.alias.is_same(cpu)) {
        return pair.original;
      }
    }
    for (auto& pair : storages) {
      if (cpu.storage().is_alias_of(pair.alias)) {
        // In inference mode, a view of a normal tensor is not an inference tensor either.
        std::optional<c10::InferenceMode> outside;
        for (auto& given : tensors) {
          if (!outside && !given.original.is_inference() && given.alias.storage().is_alias_of(pair.alias)) {
            outside.emplace(false);
          }
        }
        return over(pair.original, cpu, c10::DispatchKey::PrivateUse1);
      }
    }
    at::Tensor made = over(npu_storage(cpu.storage(), device), cpu, c10::DispatchKey::PrivateUse1);
    // A second result in the same memory must find this storage.
    storages.push_back({made.storage(), cpu.storage(), cpu.storage().data()});
    return made;
  }
};

c10::IValue to_cpu(Call& call, const c10::IValue& value) {
  if (value.isTensor()) {
    return call.alias(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(call.alias(tensor));
    }
    if (call.list_size < 0) {
      call.list_size = static_cast<int64_t>(list.size());
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(call.alias(*tensor, call.op.takes_indices)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kNpu) {
    const int index = value.toDevice().index();
    call.device = call.device < 0 ? (index < 0 ? current_device() : index) : call.device;
    return c10::Device(c10::DeviceType::CPU);
  }
  if (value.isGenerator() && value.toGenerator().device().type() == kNpu) {
    return inner_generator(value.toGenerator());
  }
  return value;
}

c10::IValue to_npu(Call& call, const c10::IValue& value) {
  if (value.isTensor()) {
    if (call.op.launches) {
      saturate(value.toTensor());
    }
    return call.result(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (call.op.launches) {
        saturate(tensor);
      }
      list.push_back(call.result(tensor));
    }
    return list;
  }
  return value;
}

int64_t extents(const c10::IValue& value) {
  int64_t bytes = 0;
  if (value.isTensor()) {
    bytes = extent(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      bytes += extent(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      bytes += tensor ? extent(*tensor) : 0;
    }
  }
  return bytes;
}

// What a kernel reads and writes of its arguments, which lie on the stack from `first`. Every operand counts once, and
// one that is changed in place twice.
int64_t argument_bytes(const Operator& op, const c10::FunctionSchema& schema, const torch::jit::Stack& stack,
                       size_t first) {
  int64_t bytes = 0, rest = 0;
  bool scattered = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    const int64_t here = extents(stack[first + i]);
    // fused optimizers may scale the gradients that they are given, and are not asked to
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite() && argument.name() != "grads";
    const bool given = !(writes && (argument.kwarg_only() || op.overwrites));
    if (i == 0 && op.gathers) {
      continue;
    }
    if (i == 0 && op.scatters && writes) {
      scattered = true;
      continue;
    }
    bytes += (writes ? here : 0) + (given ? here : 0);
    rest += here;
  }
  return bytes + (scattered ? 2 * rest : 0);
}

void log_bytes(const Call& call, const c10::FunctionSchema& schema, const torch::jit::Stack& stack, int64_t before) {
  if (!call.op.launches || !call.op.supported || is_quiet()) {
    return;
  }
  int64_t made = 0;
  const size_t first = stack.size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    made += schema.returns()[i].alias_info() ? 0 : extents(stack[first + i]);
  }
  count_kernel(call.op.name, 0, before + made * (call.op.gathers ? 2 : 1));
}

void log_call(const Call& call) {
  const Operator& op = call.op;
  if (!op.launches || is_quiet()) {
    return;
  }
  if (!op.supported) {
    TORCH_CHECK(!settings().fallback_is_error, "The operator 'aten::", op.name,
                "' is not currently supported on the NPU backend, and TORCH_NPU_FALLBACK_CPU_DISABLE=1 forbids to run "
                "it on the CPU.");
    TORCH_WARN("CAUTION: The operator 'aten::", op.name, "' is not currently supported on the NPU backend and will ",
               "fall back to run on the CPU. This may have performance implications.");
    count("unsupported", op.name);
    return;
  }
  int64_t launches = 1;
  if (call.list_size >= 0 && op.per_tensor) {
    launches = call.list_size;
  } else if (call.list_size >= 0 && op.by_chunks) {
    launches = settings().grouped ? (call.list_size + 47) / 48 : call.list_size;
  }
  count_kernel(op.name, launches);
  if (op.waits) {
    refuse_while_capturing(op.name.c_str());
    count("synchronisations", op.name);
  }
}

} // namespace

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const Operator& op = known(schema);
  Call call{op};
  const size_t given = schema.arguments().size(), first = stack->size() - given;
  for (size_t i = first; i < stack->size(); i++) {
    (*stack)[i] = to_cpu(call, (*stack)[i]);
  }
  TORCH_CHECK(!call.host_matrix || call.device < 0,
              "Expected all tensors to be on the same device, but found at least two devices, npu:", call.device,
              " and cpu! (operator ", op.name, ")");
  if (call.device < 0) {
    call.device = current_device();
  }
  for (int i : op.generators) {
    auto& generator = (*stack)[first + i];
    if (generator.isNone()) {
      generator = inner_generator(default_generator(call.device));
    }
  }
  log_call(call);
  const int64_t bytes = argument_bytes(op, schema, *stack, first);
  {
    at::AutoDispatchBelowADInplaceOrView plain;
    Quiet inside;
    if (op.multiplies && multiplies_as_fp32(schema, *stack)) {
      multiply_as_fp32(handle, stack);
    } else {
      handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
  }
  call.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    (*stack)[i] = to_npu(call, (*stack)[i]);
  }
  log_bytes(call, schema, *stack, bytes);
}

bool gives_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kNpu, "expected an npu tensor, got one on ", tensor.device());
  return over(cpu_storage(tensor.storage()), tensor, c10::DispatchKey::CPU);
}

at::Tensor wrap(const at::Tensor& cpu, int device) {
  return over(npu_storage(cpu.storage(), device), cpu, c10::DispatchKey::PrivateUse1);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace emulated
