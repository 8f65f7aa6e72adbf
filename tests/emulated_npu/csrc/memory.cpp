// Device memory and pinned host memory. Both are host memory, and are counted to the byte.
#include "npu.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#if EMULATED_NEW_ALLOCATORS
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <mutex>

namespace emulated {
namespace {

std::mutex mutex;
Usage usages[kMaxDevices];
double fractions[kMaxDevices] = {1, 1, 1, 1, 1, 1, 1, 1};

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / (int64_t{1} << 30);
}

void take(int device, int64_t bytes) {
  refuse_after_fork();
  if (capturing() >= 0 && capturing() != device) {
    refuse_while_capturing("allocation outside the pool of the graph");
  }
  std::lock_guard<std::mutex> lock(mutex);
  Usage& u = usages[device];
  const auto limit = static_cast<int64_t>(settings().memory * fractions[device]);
  if (u.current + bytes > limit) {
    u.out_of_memory++;
    char text[300];
    snprintf(text, sizeof text,
             "NPU out of memory. Tried to allocate %.2f GiB (NPU %d; %.2f GiB total capacity; %.2f GiB already "
             "allocated; %.2f GiB current active; %.2f GiB free; %.2f GiB reserved in total by PyTorch)",
             gib(bytes), device, gib(limit), gib(u.current), gib(u.current), gib(limit - u.current), gib(u.current));
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }
  u.current += bytes;
  u.allocated += bytes;
  u.allocations++;
  u.peak = std::max(u.peak, u.current);
}

void give(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  usages[device].current -= bytes;
  usages[device].freed += bytes;
  usages[device].frees++;
}

// A block of device memory: bytes of a CPU storage, or from the host's heap.
struct Block {
  int device;
  int64_t bytes;
  c10::DataPtr own;
  c10::Storage storage;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  give(block->device, block->bytes);
  delete block;
}

c10::DataPtr allocate_on(int device, size_t bytes) {
  if (bytes == 0) {
    return {nullptr, c10::Device(kNpu, device)};
  }
  take(device, static_cast<int64_t>(bytes));
  auto* block = new Block{device, static_cast<int64_t>(bytes), c10::GetCPUAllocator()->allocate(bytes), {}};
  return {block->own.get(), block, &free_block, c10::Device(kNpu, device)};
}

#if EMULATED_NEW_ALLOCATORS
using DeviceBase = c10::DeviceAllocator;
#else
using DeviceBase = c10::Allocator;
#endif

struct NpuAllocator final : DeviceBase {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(current_device(), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
#if EMULATED_NEW_ALLOCATORS
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Usage u = usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = u.current;
    all.peak = u.peak;
    all.allocated = u.allocated;
    all.freed = u.freed;
    stats.reserved_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] = all;
    stats.num_ooms = u.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    usages[device].allocated = usages[device].freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {settings().memory - usage(device).current, settings().memory};
  }
#endif
};

NpuAllocator npu_allocator;
REGISTER_ALLOCATOR(kNpu, &npu_allocator);

// ---- pinned memory: a map of addresses tells whether a pointer is in it ----
// start -> bytes; never destroyed, because tensors outlive static objects at the end of a process
auto& pinned_blocks = *new std::map<const char*, size_t>;

struct PinnedBlock {
  c10::DataPtr own;
};

void free_pinned(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned_blocks.erase(static_cast<const char*>(block->own.get()));
  }
  delete block;
}

c10::DataPtr allocate_pinned(size_t bytes) {
  auto* block = new PinnedBlock{c10::GetCPUAllocator()->allocate(std::max<size_t>(bytes, 1))};
  std::lock_guard<std::mutex> lock(mutex);
  pinned_blocks[static_cast<const char*>(block->own.get())] = std::max<size_t>(bytes, 1);
  return {block->own.get(), block, &free_pinned, c10::DeviceType::CPU};
}

#if EMULATED_NEW_ALLOCATORS
struct PinnedAllocator final : at::HostAllocator {
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
#else
struct PinnedAllocator final : c10::Allocator {
#endif
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_pinned(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator the_pinned_allocator;
#if EMULATED_NEW_ALLOCATORS
REGISTER_HOST_ALLOCATOR(kNpu, &the_pinned_allocator)
#endif

} // namespace

c10::Allocator* device_allocator() {
  return &npu_allocator;
}

c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* address = static_cast<const char*>(data);
  auto after = pinned_blocks.upper_bound(address);
  if (after == pinned_blocks.begin()) {
    return false;
  }
  --after;
  return address < after->first + after->second;
}

Usage usage(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return usages[device];
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  usages[device].peak = usages[device].current;
}

void set_fraction(int device, double fraction) {
  std::lock_guard<std::mutex> lock(mutex);
  fractions[device] = fraction;
}

c10::DataPtr adopt(const c10::Storage& cpu, int device) {
  const auto bytes = static_cast<int64_t>(cpu.nbytes());
  take(device, bytes);
  auto* block = new Block{device, bytes, {}, cpu};
  return {cpu.mutable_data(), block, &free_block, c10::Device(kNpu, device)};
}

} // namespace emulated
