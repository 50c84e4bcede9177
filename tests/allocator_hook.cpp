// An allocator hook of the tests, which shares no code with the package: bytes that torch has from the C library.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, size_t> sizes;
// Blocks of less than this, such as the step counts of optimizers, are told of apart.
constexpr size_t kLeast = 64;
long live = 0, peak = 0, small = 0, small_peak = 0;

void change(size_t size, int sign) {
  (size < kLeast ? small : live) += sign * static_cast<long>(size);
  peak = std::max(peak, live);
  small_peak = std::max(small_peak, small);
}

c10::Allocator* before;

void give_back(void* address) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = sizes.find(address);
    if (found != sizes.end()) {
      change(found->second, -1);
      sizes.erase(found);
    }
  }
  before->raw_deleter()(address);
}

struct Hook : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = before->allocate(size).release_context();
    if (address != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[address] = size;
      change(size, 1);
    }
    return {address, address, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} hook;

} // namespace

extern "C" void hook_install() {
  // A child of a fork must not find it locked by a thread that it does not have.
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&hook, 100);
}
extern "C" long hook_live() {
  std::lock_guard<std::mutex> guard(mutex);
  return live;
}
extern "C" long hook_peak() {
  std::lock_guard<std::mutex> guard(mutex);
  return peak;
}
extern "C" long hook_small_peak() {
  std::lock_guard<std::mutex> guard(mutex);
  return small_peak;
}
extern "C" void hook_restart() {
  std::lock_guard<std::mutex> guard(mutex);
  peak = live;
  small_peak = small;
}
// Bytes that another allocator than the C library's has taken, or given back.
extern "C" void hook_change(long bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  live += bytes;
  peak = std::max(peak, live);
}
