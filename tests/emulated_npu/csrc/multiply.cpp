// Multiplies 16-bit matrices as fp32 where the host's processor has no unit for them.
//
// Without such a unit (AVX512-BF16, AVX512-FP16 or AMX), the CPU's own 16-bit matmuls are about six times slower than
// fp32. An NPU's matrix unit multiplies 16-bit numbers exactly, adds the products in fp32, and rounds once at the end.
// So does this: a product of two 16-bit numbers fits fp32, and the result is rounded when it is converted back.
#include "npu.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace emulated {
namespace {

const std::unordered_set<std::string> kProducts = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"};

} // namespace

bool is_product(const c10::FunctionSchema& schema) {
  // the overloads with a dtype of their own already give fp32
  return kProducts.count(base_name(schema.name())) > 0 && schema.overload_name().rfind("dtype", 0) != 0;
}

bool multiplies_as_fp32(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  auto common = at::ScalarType::Undefined;
  for (size_t i = stack.size() - schema.arguments().size(); i < stack.size(); i++) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) {
      continue;
    }
    const auto type = stack[i].toTensor().scalar_type();
    if (!(settings().multiplied_as_fp32 & bit(type)) || (common != at::ScalarType::Undefined && common != type)) {
      return false;  // where dtypes are mixed, the CPU's kernel raises its error
    }
    common = type;
  }
  return common != at::ScalarType::Undefined;
}

void multiply_as_fp32(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& arguments = handle.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  auto common = at::ScalarType::Undefined;
  at::Tensor target, wide_target;  // what the operator writes in place or into `out`
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) {
      continue;
    }
    const at::Tensor narrow = value.toTensor();
    const at::Tensor wide = narrow.to(at::kFloat);
    common = narrow.scalar_type();
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) {
      target = narrow, wide_target = wide;
    }
    value = wide;
  }
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (target.defined()) {
    if (target.sizes() != wide_target.sizes()) {
      target.resize_(wide_target.sizes());
    }
    target.copy_(wide_target);
    stack->back() = target;
  } else {
    stack->back() = stack->back().toTensor().to(common);
  }
}

} // namespace emulated
