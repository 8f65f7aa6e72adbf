// Counts what reaches the device by kind and name over all threads, and refuses what this chip does not support.
#include "npu.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>

namespace emulated {
namespace {

struct Counts {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, int64_t> by_name;
};
Counts& all_counts = *new Counts;  // never destroyed, because threads may still count at the end of a process
thread_local int quiet = 0;
std::atomic<int> captured_device{-1};

const char* hardware_name(c10::ScalarType type) {
  switch (type) {
    case at::kDouble: return "DT_DOUBLE";
    case at::kBFloat16: return "DT_BFLOAT16";
    case at::kHalf: return "DT_FLOAT16";
    case at::kFloat: return "DT_FLOAT";
    case at::kComplexFloat: return "DT_COMPLEX64";
    case at::kComplexDouble: return "DT_COMPLEX128";
    case at::kLong: return "DT_INT64";
    case at::kInt: return "DT_INT32";
    case at::kShort: return "DT_INT16";
    case at::kChar: return "DT_INT8";
    case at::kByte: return "DT_UINT8";
    case at::kBool: return "DT_BOOL";
    default: return c10::toString(type);
  }
}

} // namespace

Quiet::Quiet() {
  quiet++;
}

Quiet::~Quiet() {
  quiet--;
}

bool is_quiet() {
  return quiet > 0;
}

void push_quiet(int by) {
  quiet += by;
}

void count(const char* kind, const std::string& name, int64_t by) {
  if (quiet == 0) {
    std::lock_guard<std::mutex> lock(all_counts.mutex);
    all_counts.by_name[{kind, name}] += by;
  }
}

void count_kernel(const std::string& name, int64_t launches, int64_t bytes) {
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool captured = capturing() >= 0;
  if (launches) {
    count(captured ? "captured" : backward ? "backward" : "forward", name, launches);
  }
  if (bytes) {
    count(captured ? "captured_bytes" : backward ? "backward_bytes" : "forward_bytes", name, bytes);
  }
}

int64_t extent(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return 0;
  }
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) {
    elements *= tensor.stride(i) == 0 ? 1 : tensor.size(i);
  }
  return elements * static_cast<int64_t>(tensor.itemsize());
}

int capturing() {
  return captured_device;
}

void set_capturing(int device) {
  captured_device = device;
}

void refuse_while_capturing(const char* what) {
  TORCH_CHECK(capturing() < 0, "aclmdlRICapture: operation not permitted while a stream is capturing a graph: ", what,
              ". Error code is 107030.");
}

std::map<std::pair<std::string, std::string>, int64_t> counts() {
  std::lock_guard<std::mutex> lock(all_counts.mutex);
  return all_counts.by_name;
}

// aten::lerp_ and aten::lerp.Scalar_out both count as lerp: schema names omit the overload, in-place names end in _.
std::string base_name(const std::string& schema_name) {
  std::string name = schema_name.substr(schema_name.find("::") == std::string::npos ? 0 : schema_name.find("::") + 2);
  if (name.size() > 1 && name.back() == '_' && name[name.size() - 2] != '_') {
    name.pop_back();
  }
  return name;
}

void judge(const std::string& name, c10::ScalarType type) {
  if (quiet > 0) {
    return;
  }
  const auto& rules = settings().refused_by;
  const auto own = rules.find(name);
  const uint64_t refused = own == rules.end() ? settings().refused : own->second;
  TORCH_CHECK(!(refused & bit(type)), "call aclnn kernel of '", name, "' failed, error code is 161002. EZ1001: Tensor ",
              "not implemented for ", hardware_name(type), " on ", settings().chip,
              ", which is not in the dtype support list of this operator.");
}

} // namespace emulated
