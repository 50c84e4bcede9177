// The live blocks, with the facts for the deleter, which only gets an address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace pooch {

class Arena;

struct Block {
  void* address = nullptr;
  size_t size_bytes = 0;
  int64_t id = 0;         // in order of birth, over all threads
  uint32_t thread = 0;    // that allocated it
  uint32_t scope = 0;     // the serial of the scope that thread had joined, or 0
  Arena* arena = nullptr; // that has it, or null for the ordinary allocator
  bool is_pooled = false; // whether the pool has it

  bool is_outside() const noexcept { return arena == nullptr && !is_pooled; }
};

// An open-addressed table by address with linear probing. Entries move back on removal, so no tombstones accumulate in
// a table that lives as long as the process.
class Shard {
 public:
  std::mutex mutex;

  // False if there is no memory for a larger table. If the address has an entry, its block was freed unseen, and the
  // new block replaces it.
  bool insert(const Block& block, size_t hash) noexcept {
    if (10 * (count_ + 1) > 7 * entries_.size() && !grow()) return false;
    Block& entry = entries_[find(block.address, hash)];
    if (entry.address == nullptr) ++count_;
    entry = block;
    return true;
  }

  // The block that begins there; one without an address if none does.
  Block at(const void* address, size_t hash) const noexcept { return entries_[find(address, hash)]; }

  // The same, and its entry is removed.
  Block remove(const void* address, size_t hash) noexcept {
    const size_t at = find(address, hash);
    const Block found = entries_[at];
    if (found.address == nullptr) return found;
    --count_;
    close_gap(at);
    return found;
  }

  size_t count() const noexcept { return count_; }

  static size_t hash_of(const void* address) noexcept {
    // Blocks are aligned to 64 bytes; the multiplication carries the address into the upper half.
    return (reinterpret_cast<uintptr_t>(address) >> 6) * 0x9E3779B97F4A7C15ull >> 20;
  }

 private:
  // The place of the address's entry, or of the gap where it would be. There always is a gap.
  size_t find(const void* address, size_t hash) const noexcept {
    const size_t mask = entries_.size() - 1;
    size_t at = hash & mask;
    while (entries_[at].address != nullptr && entries_[at].address != address) at = (at + 1) & mask;
    return at;
  }

  void close_gap(size_t gap) noexcept {
    const size_t mask = entries_.size() - 1;
    for (size_t at = (gap + 1) & mask; entries_[at].address != nullptr; at = (at + 1) & mask) {
      const size_t home = (hash_of(entries_[at].address) >> kShardBits) & mask;
      if (((at - home) & mask) < ((at - gap) & mask)) continue; // it would lie before its home
      entries_[gap] = entries_[at];
      gap = at;
    }
    entries_[gap] = Block{};
  }

  bool grow() noexcept {
    try {
      std::vector<Block> before(2 * entries_.size());
      std::swap(before, entries_);
      for (const Block& block : before) {
        if (block.address != nullptr) entries_[find(block.address, hash_of(block.address) >> kShardBits)] = block;
      }
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

 public:
  static constexpr size_t kShardBits = 5;

 private:
  std::vector<Block> entries_{64}; // its size is a power of two
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

  Block at(const void* address) noexcept {
    return in_shard(address, [&](Shard& shard, size_t hash) { return shard.at(address, hash); });
  }

  Block remove(const void* address) noexcept {
    return in_shard(address, [&](Shard& shard, size_t hash) { return shard.remove(address, hash); });
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
