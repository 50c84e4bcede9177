// The live blocks, with the facts for the deleter, which only gets an address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <unordered_map>

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

// In shards, so that copying threads do not wait for the step's thread. No method holds two locks.
class LiveBlocks {
  struct alignas(64) Shard { // each on its own cache line
    std::mutex mutex;
    std::unordered_map<const void*, Block> blocks;
  };

  template <class Use>
  auto in_shard(const void* address, Use use) noexcept {
    // Blocks are aligned to 64 bytes; the multiplication carries the address into the upper half.
    Shard& shard = shards_[(reinterpret_cast<uintptr_t>(address) >> 6) * 0x9E3779B97F4A7C15ull >> 59];
    std::lock_guard<std::mutex> guard(shard.mutex);
    return use(shard.blocks);
  }

 public:
  // False if there is no memory for its entry. If the address has one, its block was freed unseen, and this replaces it.
  bool insert(const Block& block) noexcept {
    return in_shard(block.address, [&](auto& blocks) {
      try {
        blocks.insert_or_assign(block.address, block);
        return true;
      } catch (const std::bad_alloc&) {
        return false;
      }
    });
  }

  // The block that begins there, which is no entry any more; one without an address if none does.
  Block remove(const void* address) noexcept {
    return in_shard(address, [&](auto& blocks) {
      const auto found = blocks.extract(address);
      return found ? found.mapped() : Block{};
    });
  }

  // The block that begins there; one without an address if none does.
  Block at(const void* address) noexcept {
    return in_shard(address, [&](auto& blocks) {
      const auto found = blocks.find(address);
      return found == blocks.end() ? Block{} : found->second;
    });
  }

  int64_t count() noexcept {
    size_t sum = 0;
    for (Shard& shard : shards_) {
      std::lock_guard<std::mutex> guard(shard.mutex);
      sum += shard.blocks.size();
    }
    return static_cast<int64_t>(sum);
  }

  void lock() noexcept {
    for (Shard& shard : shards_) shard.mutex.lock();
  }

  void unlock() noexcept {
    for (Shard& shard : shards_) shard.mutex.unlock();
  }

 private:
  std::array<Shard, 32> shards_;
};

} // namespace pooch
