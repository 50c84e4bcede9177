// The live blocks, with the facts for the deleter, which only gets an address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace pooch {

class Arena;

struct Block {
  void* address = nullptr;
  size_t size_bytes = 0;
  int64_t id = 0;         // in order of birth, over all threads
  uint32_t thread = 0;    // that allocated it
  uint32_t scope = 0;     // the serial of the scope that thread had joined, or 0
  Arena* arena = nullptr; // that has it, or null for the ordinary allocator
};

// An open-addressed table by address with linear probing. Entries move back on removal, so no tombstones accumulate in
// a table that lives as long as the process.
class Shard {
 public:
  std::mutex mutex;

  // False if there is no memory for a larger table. If the address has an entry, its block was freed unseen, and the
  // new block replaces it.
  bool insert(const Block& block, size_t hash) noexcept {
    if (10 * (count_ + 1) > 7 * capacity_ && !grow()) return false;
    size_t at = hash & (capacity_ - 1);
    while (entries_[at].address != nullptr && entries_[at].address != block.address) at = (at + 1) & (capacity_ - 1);
    if (entries_[at].address == nullptr) ++count_;
    entries_[at] = block;
    return true;
  }

  bool remove(void* address, size_t hash, Block& found) noexcept {
    if (count_ == 0) return false;
    size_t at = hash & (capacity_ - 1);
    while (entries_[at].address != address) {
      if (entries_[at].address == nullptr) return false;
      at = (at + 1) & (capacity_ - 1);
    }
    found = entries_[at];
    --count_;
    close_gap(at);
    return true;
  }

  // The block that begins there; one without an address if none does.
  Block at(const void* address, size_t hash) const noexcept {
    if (count_ == 0) return {};
    size_t at = hash & (capacity_ - 1);
    while (entries_[at].address != nullptr && entries_[at].address != address) at = (at + 1) & (capacity_ - 1);
    return entries_[at];
  }

  size_t count() const noexcept { return count_; }

  static size_t hash_of(const void* address) noexcept {
    // Blocks are aligned to 64 bytes; the multiplication carries the address into the upper half.
    return (reinterpret_cast<uintptr_t>(address) >> 6) * 0x9E3779B97F4A7C15ull >> 20;
  }

 private:
  void close_gap(size_t gap) noexcept {
    const size_t mask = capacity_ - 1;
    for (size_t at = (gap + 1) & mask; entries_[at].address != nullptr; at = (at + 1) & mask) {
      const size_t home = (hash_of(entries_[at].address) >> kShardBits) & mask;
      if (((at - home) & mask) < ((at - gap) & mask)) continue; // it would lie before its home
      entries_[gap] = entries_[at];
      gap = at;
    }
    entries_[gap] = Block{};
  }

  bool grow() noexcept {
    const size_t larger = capacity_ == 0 ? kLeast : 2 * capacity_;
    std::unique_ptr<Block[]> before(new (std::nothrow) Block[larger]);
    if (!before) return false;
    std::swap(before, entries_);
    const size_t held = std::exchange(capacity_, larger);
    for (size_t at = 0; at < held; ++at) {
      if (before[at].address == nullptr) continue;
      size_t to = (hash_of(before[at].address) >> kShardBits) & (capacity_ - 1);
      while (entries_[to].address != nullptr) to = (to + 1) & (capacity_ - 1);
      entries_[to] = before[at];
    }
    return true;
  }

 public:
  static constexpr size_t kShardBits = 5;

 private:
  static constexpr size_t kLeast = 64;
  std::unique_ptr<Block[]> entries_;
  size_t capacity_ = 0;
  size_t count_ = 0;
};

// Sharded, so that copying threads do not wait for the step's thread. No method holds two locks.
class LiveBlocks {
  struct alignas(64) Aligned : Shard {}; // each on its own cache line

  template <class Use>
  auto in_shard(const void* address, Use use) noexcept {
    const size_t hash = Shard::hash_of(address);
    Shard& shard = shards_[hash & (shards_.size() - 1)];
    std::lock_guard<std::mutex> guard(shard.mutex);
    return use(shard, hash >> Shard::kShardBits);
  }

 public:
  bool insert(const Block& block) noexcept {
    return in_shard(block.address, [&](Shard& shard, size_t hash) { return shard.insert(block, hash); });
  }

  bool remove(void* address, Block& found) noexcept {
    return in_shard(address, [&](Shard& shard, size_t hash) { return shard.remove(address, hash, found); });
  }

  // The block that begins there; one without an address if none does.
  Block at(const void* address) noexcept {
    return in_shard(address, [&](Shard& shard, size_t hash) { return shard.at(address, hash); });
  }

  int64_t count() noexcept {
    size_t sum = 0;
    for (Aligned& shard : shards_) {
      std::lock_guard<std::mutex> guard(shard.mutex);
      sum += shard.count();
    }
    return static_cast<int64_t>(sum);
  }

  void lock() noexcept {
    for (Aligned& shard : shards_) shard.mutex.lock();
  }

  void unlock() noexcept {
    for (Aligned& shard : shards_) shard.mutex.unlock();
  }

 private:
  std::array<Aligned, size_t{1} << Shard::kShardBits> shards_;
};

} // namespace pooch
