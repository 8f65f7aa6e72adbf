// Devices, streams and events. Kernels run immediately; only non-blocking copies to pinned memory are deferred.
#include "npu.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <list>
#include <mutex>

namespace emulated {
namespace {

thread_local int device_now = 0;
thread_local c10::StreamId streams_now[kMaxDevices] = {};
std::atomic<c10::StreamId> next_stream{1};
std::atomic<uint64_t> next_moment{1};

// A process cannot use a device if its parent used one before the fork: the driver's context does not survive.
std::atomic<bool> used{false}, forked_after_use{false};
const int watching = pthread_atfork(nullptr, nullptr, [] { forked_after_use = used.load(); });

using StreamKey = std::pair<int, c10::StreamId>;

StreamKey key(c10::Stream stream) {
  return {stream.device_index(), stream.id()};
}

struct LateCopy {
  uint64_t moment;
  StreamKey stream;
  at::Tensor host;   // holds poison until the copy arrives
  at::Tensor value;  // the device's values when the copy was requested
};

struct Event {
  StreamKey stream;
  uint64_t moment;  // wait for all copies of the stream before this one
  std::chrono::steady_clock::time_point time;
};

// Never destroyed, because tensors and threads outlive static objects at the end of a process.
struct Late {
  std::recursive_mutex mutex;
  std::list<LateCopy> copies;
  std::map<StreamKey, std::map<StreamKey, uint64_t>> waits;  // stream -> what it must wait for
};
Late& late = *new Late;

// The same memory without the history of `tensor`, so that autograd and inference mode allow writing to it.
at::Tensor bare(const at::Tensor& tensor) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return at::Tensor(std::move(impl));
}

void poison(at::Tensor host) {
  if (host.is_floating_point() || host.is_complex()) {
    host.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (host.scalar_type() == at::kBool) {
    host.logical_not_();
  } else {
    host.fill_(host.scalar_type() == at::kByte ? 165 : -91);  // fits every integer type, and is an unlikely value
  }
}

void arrive(StreamKey stream, uint64_t before) {
  std::list<LateCopy> due;
  {
    std::lock_guard<std::recursive_mutex> lock(late.mutex);
    for (auto it = late.copies.begin(); it != late.copies.end();) {
      auto here = it++;
      if (here->stream == stream && here->moment < before) {
        due.splice(due.end(), late.copies, here);
      }
    }
  }
  at::AutoDispatchBelowADInplaceOrView plain;
  for (auto& copy : due) {
    copy.host.copy_(copy.value);
  }
}

void finish(StreamKey stream) {
  std::map<StreamKey, uint64_t> waits;
  {
    std::lock_guard<std::recursive_mutex> lock(late.mutex);
    waits.swap(late.waits[stream]);
  }
  arrive(stream, std::numeric_limits<uint64_t>::max());
  for (auto& [other, moment] : waits) {
    arrive(other, moment);
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNpu;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNpu, static_cast<c10::DeviceIndex>(set_current_device(device.index()))};
  }
  c10::Device getDevice() const override {
    return {kNpu, static_cast<c10::DeviceIndex>(device_now)};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      device_now = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = current_stream(stream.device_index());
    set_stream(stream);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {key(stream), next_moment++, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      const auto* e = static_cast<Event*>(event);
      std::lock_guard<std::recursive_mutex> lock(late.mutex);
      late.waits[key(stream)][e->stream] = e->moment;
    }
  }
  bool queryEvent(void* event) const override {
    if (event) {  // a caller that learns of the event may read the data that it waited for
      arrive(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->moment);
    }
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    count("synchronisations", "synchronize");
    queryEvent(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    finish(key(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("synchronisations", "synchronize");
    finish(key(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronise_device(device, "synchronize");
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

Settings& settings() {
  static auto* the = new Settings;
  return *the;
}

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < settings().devices, "Invalid device ID ", device, ": this host shows ",
              settings().devices, " NPU(s). EE9999: aclrtSetDevice failed, error code is 107001");
}

void refuse_after_fork() {
  TORCH_CHECK(!forked_after_use, "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you ",
              "must use the 'spawn' start method");
  used = true;
}

int current_device() {
  return device_now;
}

int set_current_device(int device) {
  const int before = device_now;
  if (device >= 0 && device != before) {
    check_device(device);
    device_now = device;
  }
  return before;
}

c10::Stream current_stream(int device) {
  device = device < 0 ? device_now : device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), streams_now[device]);
}

void set_stream(c10::Stream stream) {
  streams_now[stream.device_index()] = stream.id();
}

c10::Stream new_stream(int device) {
  device = device < 0 ? device_now : device;
  check_device(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), next_stream++);
}

void defer_copy(const at::Tensor& host, const at::Tensor& value, int device) {
  at::AutoDispatchBelowADInplaceOrView plain;
  LateCopy copy{next_moment++, key(current_stream(device)), bare(host), value.clone()};
  poison(copy.host);
  std::lock_guard<std::recursive_mutex> lock(late.mutex);
  late.copies.push_back(std::move(copy));
}

void finish_copies_into(const at::Tensor& host, c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> lock(late.mutex);
  for (auto& copy : late.copies) {
    if (copy.host.storage().data() == host.storage().data()) {
      finish(key(stream));
      return;
    }
  }
}

void finish_stream(c10::Stream stream) {
  finish(key(stream));
}

void finish_device(int device) {
  std::vector<StreamKey> streams;
  {
    std::lock_guard<std::recursive_mutex> lock(late.mutex);
    for (auto& copy : late.copies) {
      if (copy.stream.first == device) {
        streams.push_back(copy.stream);
      }
    }
  }
  for (auto& stream : streams) {
    finish(stream);
  }
}

void synchronise_device(int device, const char* why) {
  refuse_while_capturing(why);
  count("synchronisations", why);
  finish_device(device < 0 ? device_now : device);
}

} // namespace emulated
