// The Python module of the emulated device.
#include "hccl.h"
#include "npu.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace py = pybind11;

namespace emulated {
namespace {

bool takes_device(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().rfind("Device", 0) == 0) {
      return true;
    }
  }
  return false;
}

// Overloads of multi-tensor operators that are missing from the real package's lists, even if others of that name are
// there: a factor in a tensor, a weight per tensor. They are composed, with one kernel per tensor.
bool lacks_a_grouped_kernel(const c10::OperatorName& name) {
  return name.name.rfind("aten::_foreach", 0) == 0 &&
      (name.overload_name == "Tensor" ||
       (name.overload_name == "ScalarList" && name.name.rfind("aten::_foreach_lerp", 0) == 0));
}

// PyTorch would compose these operators from others, but they are one kernel on the device:
// - functional operators such as add.Tensor, from an allocation and add.out;
// - operators with their own kernel in the real package, such as _foreach_mul, from many kernels.
// Sent straight to the fallback, they are one kernel and cost as much as on a CPU.
void send_composed_operators_to_the_fallback() {
  using Key = c10::DispatchKey;
  static const std::unordered_set<std::string> kept_composed = {
      "clone", "copy", "empty_like", "resize_as", "new_empty_strided", "lift_fresh", "_lazy_clone", "record_stream"};
  static auto* kept = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->schema().name().rfind("aten::", 0) != 0 ||
        op->hasKernelForDispatchKey(Key::PrivateUse1)) {
      continue;
    }
    const bool functional = op->hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional) &&
        op->hasKernelForDispatchKey(Key::CPU);
    const std::string base = base_name(op->schema().name());
    const bool native = op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) &&
        settings().supported.count(base) && !kept_composed.count(base) && !takes_device(op->schema()) &&
        !gives_views(op->schema()) && !lacks_a_grouped_kernel(name);
    if (functional || native) {
      kept->push_back(dispatcher.registerImpl(
          name, Key::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr,
          "emulated npu"));
    }
  }
}

// torch 2.7 has no rule for operators without a gradient on this device, such as collectives: bypass autograd.
void let_autograd_pass_by() {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (!dispatcher.hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) {
    static auto* kept = new c10::RegistrationHandleRAII(dispatcher.registerFallback(
        c10::DispatchKey::AutogradPrivateUse1, c10::KernelFunction::makeFallthrough(), "emulated npu"));
    (void)kept;
  }
}

uint64_t bits(const std::vector<py::object>& dtypes) {
  uint64_t all = 0;
  for (const auto& dtype : dtypes) {
    all |= bit(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  }
  return all;
}

py::object counts_as_counter() {
  py::dict result;
  for (const auto& [key, value] : counts()) {
    result[py::make_tuple(key.first, key.second)] = value;
  }
  return py::module_::import("collections").attr("Counter")(result);
}

py::dict usage_as_dict(int device) {
  const Usage u = usage(device);
  py::dict result;
  result["current"] = u.current;
  result["peak"] = u.peak;
  result["allocated"] = u.allocated;
  result["freed"] = u.freed;
  result["allocations"] = u.allocations;
  result["frees"] = u.frees;
  result["out_of_memory"] = u.out_of_memory;
  return result;
}

void configure(
    int devices, int64_t memory, bool deferred, bool fallback_is_error, bool saturates, bool grouped,
    const std::string& chip, const std::vector<py::object>& multiplied_as_fp32,
    const std::vector<py::object>& refused, const std::map<std::string, std::vector<py::object>>& refused_by,
    const std::unordered_set<std::string>& supported) {
  TORCH_CHECK(devices >= 0 && devices <= kMaxDevices, "0 to 8 devices can be emulated, got ", devices);
  Settings& s = settings();
  s.devices = devices;
  s.memory = memory;
  s.deferred = deferred;
  s.fallback_is_error = fallback_is_error;
  s.saturates = saturates;
  s.grouped = grouped;
  s.chip = chip;
  s.multiplied_as_fp32 = bits(multiplied_as_fp32);
  s.refused = bits(refused);
  for (const auto& [name, dtypes] : refused_by) {
    s.refused_by[name] = bits(dtypes);
  }
  s.supported = supported;
  static const bool once = (let_autograd_pass_by(), send_composed_operators_to_the_fallback(), true);
  (void)once;
}

// Check a device that Python's module passes, and switch to it.
void set_device(int device) {
  check_device(device);
  set_current_device(device);
}

} // namespace

PYBIND11_MODULE(emulated_npu_device, m) {
  m.def("configure", torch::wrap_pybind_function(&configure));
  m.def("counts", &counts_as_counter);
  m.def("count", [](const std::string& kind, const std::string& name, int64_t by) { count(kind.c_str(), name, by); });
  m.def("count_kernel", [](const std::string& name, int64_t launches, int64_t bytes) {
    count_kernel(name, launches, bytes);
  });
  m.def("extent", torch::wrap_pybind_function(&extent));
  m.def("capturing", &capturing);
  m.def("set_capturing", &set_capturing);
  m.def("judge", torch::wrap_pybind_function([](const std::string& name, const at::Tensor& tensor) {
          judge(name, tensor.scalar_type());
        }));
  m.def("push_quiet", &push_quiet);

  m.def("saturate", torch::wrap_pybind_function(&saturate));
  m.def("overflow_flag", &overflow_flag);
  m.def("refuse_after_fork", torch::wrap_pybind_function(&refuse_after_fork));

  m.def("device_count", [] { return settings().devices; });
  m.def("current_device", &current_device);
  m.def("set_device", torch::wrap_pybind_function(&set_device));
  m.def("exchange_device", torch::wrap_pybind_function(&set_current_device));
  m.def("synchronize", torch::wrap_pybind_function([](int device) { synchronise_device(device, "synchronize"); }));
  m.def("current_stream_id", [](int device) { return current_stream(device).id(); });
  m.def("set_stream", [](int64_t id, int device) {
    set_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), id));
  });

  m.def("usage", &usage_as_dict);
  m.def("reset_peak", &reset_peak);
  m.def("set_fraction", &set_fraction);
  m.def("memory", [] { return settings().memory; });

  m.def("generator", torch::wrap_pybind_function([](int device) { return default_generator(device); }));
  m.def("cpu_alias", torch::wrap_pybind_function(&cpu_alias));
  m.def("wrap", torch::wrap_pybind_function(&wrap));
  m.def("make_hccl", torch::wrap_pybind_function(&make_hccl));
}

} // namespace emulated
