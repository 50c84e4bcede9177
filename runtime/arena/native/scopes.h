// Scopes: groups of threads whose blocks are counted and recorded. A block belongs to the scope of the thread that
// allocated it. Its death, on any thread, is reported to that scope.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "blocks.h"

namespace pooch {

enum class EventKind : int64_t { kBirth = 0, kDeath = 1, kMark = 2 };

struct Event {
  int64_t kind, block, size_bytes;
  int64_t value; // of a birth: 1 in an arena; of a death: 1 on a thread that is not of the scope; of a mark: its own
};

// The deaths that a scope counts: those of its own blocks, and of blocks that the beginning thread allocated before.
// Blocks of other threads are never counted.
struct Since {
  std::atomic<bool> is_on{false};
  std::atomic<uint32_t> thread{0};
  std::atomic<int64_t> first_id{0};

  void begin(uint32_t of_thread, int64_t next_id) noexcept {
    thread.store(of_thread);
    first_id.store(next_id);
    is_on.store(true);
  }
  bool has(const Block& block, uint32_t serial) const noexcept {
    if (!is_on.load(std::memory_order_acquire)) return false;
    return block.scope == serial || (block.thread == thread.load() && block.id < first_id.load());
  }
};

// Never freed, because a thread may still be in it.
class Scope {
 public:
  explicit Scope(uint32_t serial_number) : serial(serial_number) {}

  const uint32_t serial;

  void begin_count(int64_t unit_bytes, uint32_t thread, int64_t next_id) noexcept {
    counts_.is_on.store(false);
    unit_bytes_.store(unit_bytes);
    for (auto& one : bytes_) one.store(0);
    counts_.begin(thread, next_id);
  }
  void end_count() noexcept { counts_.is_on.store(false); }
  int64_t count_of(int which) const noexcept { return bytes_[which].load(); }
  void reset_most() noexcept {
    bytes_[kMostLive].store(bytes_[kLive].load());
    bytes_[kMostOutside].store(bytes_[kOutside].load());
  }

  void begin_record(uint32_t thread, int64_t next_id) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    events_.clear();
    has_lost_ = false;
    records_.begin(thread, next_id);
  }
  void mark(int64_t value) noexcept { append({static_cast<int64_t>(EventKind::kMark), -1, 0, value}); }
  // Number of events; -1 if there was no memory for all of them.
  int64_t end_record() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    records_.is_on.store(false);
    return has_lost_ ? -1 : static_cast<int64_t>(events_.size());
  }
  void take_events(Event* out, int64_t count) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    std::copy_n(events_.begin(), std::min<int64_t>(count, static_cast<int64_t>(events_.size())), out);
    std::vector<Event>().swap(events_);
  }

  void stop() noexcept {
    counts_.is_on.store(false);
    records_.is_on.store(false);
  }

  void born(const Block& block) noexcept {
    if (counts_.is_on.load(std::memory_order_acquire)) {
      const int64_t size_bytes = rounded(block.size_bytes);
      raise_to(bytes_[kLive].fetch_add(size_bytes) + size_bytes, bytes_[kMostLive]);
      if (block.is_outside()) raise_to(bytes_[kOutside].fetch_add(size_bytes) + size_bytes, bytes_[kMostOutside]);
    }
    if (records_.is_on.load(std::memory_order_acquire) && block.thread == records_.thread.load()) {
      append({static_cast<int64_t>(EventKind::kBirth), block.id, static_cast<int64_t>(block.size_bytes),
              !block.is_outside()});
    }
  }
  void died(const Block& block, bool is_on_its_thread) noexcept {
    if (counts_.has(block, serial)) {
      bytes_[kLive].fetch_sub(rounded(block.size_bytes));
      if (block.is_outside()) bytes_[kOutside].fetch_sub(rounded(block.size_bytes));
    }
    if (records_.has(block, serial)) {
      append({static_cast<int64_t>(EventKind::kDeath), block.id, static_cast<int64_t>(block.size_bytes),
              !is_on_its_thread});
    }
  }

  std::mutex mutex; // of the events
  Scope* following = nullptr; // in the list of all scopes

 private:
  // Python's numbers become blocks of 8 bytes when passed to ops: blocks smaller than this do not count.
  static constexpr size_t kLeastBytes = 64;

  int64_t rounded(size_t size_bytes) const noexcept {
    if (size_bytes < kLeastBytes) return 0;
    const int64_t unit = unit_bytes_.load(std::memory_order_relaxed);
    return (static_cast<int64_t>(size_bytes) + unit - 1) / unit * unit;
  }
  static void raise_to(int64_t bytes, std::atomic<int64_t>& most) noexcept {
    int64_t before = most.load(std::memory_order_relaxed);
    while (before < bytes && !most.compare_exchange_weak(before, bytes)) {
    }
  }
  void append(const Event& event) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    if (!records_.is_on.load()) return;
    try {
      events_.push_back(event);
    } catch (const std::bad_alloc&) {
      has_lost_ = true;
    }
  }

  Since counts_, records_;
  std::atomic<int64_t> unit_bytes_{1};
  enum Bytes { kLive, kMostLive, kOutside, kMostOutside, kKinds }; // outside: of blocks that lie in no arena
  std::array<std::atomic<int64_t>, kKinds> bytes_{};
  std::vector<Event> events_;
  bool has_lost_ = false;
};

} // namespace pooch
