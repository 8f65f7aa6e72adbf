// What PyTorch asks of an accelerator as a whole, and random numbers, which come from a CPU generator per device.
#include "npu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace emulated {
namespace {

struct NpuGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  NpuGenerator(int device, at::Generator from)
      : c10::GeneratorImpl(c10::Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(from)) {}

  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  NpuGenerator* clone_impl() const override {
    return new NpuGenerator(device_.index(), inner.clone());
  }
};

at::Generator make_generator(int device) {
  return at::make_generator<NpuGenerator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return settings().devices > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_current_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_current_device(device));
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return {kNpu, static_cast<c10::DeviceIndex>(current_device())};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_generator(device < 0 ? current_device() : device);
  }
  // FSDP2 frees a gathered parameter by resizing its storage to zero, and allocates it again in the same way.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const int device = storage.device().index();
    const int before = set_current_device(device);
    c10::DataPtr fresh = device_allocator()->allocate(bytes);
    set_current_device(before);
    if (const size_t kept = std::min(bytes, storage.nbytes())) {
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

} // namespace

at::Generator inner_generator(const at::Generator& generator) {
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++) {
      made->push_back(make_generator(i));
    }
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

} // namespace emulated
