// What the parts of the emulated device share. Device memory is host memory, and kernels run immediately on the CPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/op_registration/op_registration.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/version.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

// DeviceAllocator and HostAllocator are newer than 2.7; without them, the hooks provide pinned memory.
#define EMULATED_NEW_ALLOCATORS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9)

namespace emulated {

constexpr int kMaxDevices = 8;
constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// Dtypes as bits, so that a rule is a single number.
inline uint64_t bit(c10::ScalarType type) {
  return uint64_t{1} << static_cast<int>(type);
}

// ---- settings, which the stub gives once, before the first use ----
struct Settings {
  int devices = 1;
  int64_t memory = int64_t{64} << 30;  // bytes of each device
  bool deferred = true;                // non-blocking copies to pinned memory arrive at the next synchronisation
  bool fallback_is_error = false;      // TORCH_NPU_FALLBACK_CPU_DISABLE
  bool saturates = false;              // like the 910A: fp16 overflow gives the largest number, NaN gives 0
  bool grouped = true;                 // multi-tensor operators have kernels; otherwise one runs per tensor
  std::string chip = "Ascend910B3";
  uint64_t multiplied_as_fp32 = 0;                      // dtypes that the host's processor has no matrix unit for
  uint64_t refused = 0;                                 // dtypes that kernels of this chip refuse
  std::unordered_map<std::string, uint64_t> refused_by; // base name -> dtypes refused instead
  std::unordered_set<std::string> supported;            // base names in the real package's lists; empty = all
};
Settings& settings();

// ---- the log ----
// kind: forward, backward, captured (into a graph, and so not launched), the same three followed by _bytes, and
// synchronisations, copies, copied_bytes, unsupported, collectives
void count(const char* kind, const std::string& name, int64_t by = 1);
// `bytes`: what the kernel reads and writes, each operand once
void count_kernel(const std::string& name, int64_t launches = 1, int64_t bytes = 0);
// Bytes that a tensor's kernel reads or writes: a dimension that repeats the same memory counts once.
int64_t extent(const at::Tensor& tensor);
// The device that a graph is being captured on, or -1. While there is one, nothing may wait for the device.
int capturing();
void set_capturing(int device);
void refuse_while_capturing(const char* what);
std::map<std::pair<std::string, std::string>, int64_t> counts();

// While one exists in a thread, the thread's launches are inside a fused kernel: they are not logged or checked.
struct Quiet {
  Quiet();
  ~Quiet();
};
bool is_quiet();
void push_quiet(int by);

// ---- memory ----
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
struct Usage {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0, allocations = 0, frees = 0, out_of_memory = 0;
};
Usage usage(int device);
void reset_peak(int device);
void set_fraction(int device, double fraction);
int64_t memory_limit(int device);
// Device memory that uses and keeps alive a CPU storage's memory. It counts against the device's limit.
c10::DataPtr adopt(const c10::Storage& cpu, int device);

// ---- devices, streams, deferred copies ----
int current_device();
void check_device(int device);
int set_current_device(int device);  // returns the previous device
void refuse_after_fork();
c10::Stream current_stream(int device);
void set_stream(c10::Stream stream);
c10::Stream new_stream(int device);
void defer_copy(const at::Tensor& host, const at::Tensor& value, int device);
// If a deferred copy goes to this host tensor: what `stream` does before its next operation is done.
void finish_copies_into(const at::Tensor& host, c10::Stream stream);
void finish_stream(c10::Stream stream);
void finish_device(int device);
void synchronise_device(int device, const char* why);

// ---- tensors ----
// A CPU tensor over the same memory as `tensor`, which must be on an npu. The two share no metadata.
at::Tensor cpu_alias(const at::Tensor& tensor);
// An npu tensor over the memory of a CPU tensor.
at::Tensor wrap(const at::Tensor& cpu, int device);
// The CPU generator that draws the numbers of an npu generator.
at::Generator inner_generator(const at::Generator& generator);
const at::Generator& default_generator(int device);

// On a chip that saturates, replaces inf and NaN in an fp16 result like its kernels do, and sets the overflow flag.
void saturate(const at::Tensor& cpu);
bool overflow_flag(bool clear);

// Raises the chip's error if it has no kernel for a dtype.
void judge(const std::string& name, c10::ScalarType type);
std::string base_name(const std::string& schema_name);

// Whether an operator's results share memory with its arguments.
bool gives_views(const c10::FunctionSchema& schema);

// Products of 16-bit matrices, which multiply.cpp computes in fp32 where the host is slow at them.
bool is_product(const c10::FunctionSchema& schema);
bool multiplies_as_fp32(const c10::FunctionSchema& schema, const torch::jit::Stack& stack);  // by these arguments
void multiply_as_fp32(const c10::OperatorHandle& op, torch::jit::Stack* stack);              // of CPU tensors

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace emulated
