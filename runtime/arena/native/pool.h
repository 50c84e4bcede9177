// Pool: pages that freed blocks leave, from which later blocks are made. No layout is known or needed.
//
// Fresh pages are slow on the CPU: the kernel clears each and maps it by a fault. So pages of freed blocks stay, with
// live and free bytes together within a limit. A block takes a free range of its size, or the smallest larger one,
// whose rest stays free. Where no range is large enough but the limit allows no fresh pages, pages of several ranges
// are moved into one new range of addresses (mremap): their contents are nobody's, and addresses are plentiful.
//
// Whole huge pages are moved first, which is one entry of a table each. Every moved piece is a mapping of its own until
// it leaves, and the kernel limits their number: beyond `kMostMappings` all free pages are given back.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "scopes.h"

namespace pooch {

struct Range {
  char* begin = nullptr;
  char* end = nullptr;
  size_t size() const noexcept { return static_cast<size_t>(end - begin); }
};

// The mappings of the pool, as the kernel has them at most: it may have joined neighbours.
class Mappings {
 public:
  void add(Range range) { ends_[range.begin] = range.end; }
  void remove(Range range) {
    auto at = from(range.begin);
    while (at != ends_.end() && at->first < range.end) {
      const Range found{at->first, at->second};
      at = ends_.erase(at);
      if (found.begin < range.begin) ends_[found.begin] = range.begin;
      if (found.end > range.end) ends_[range.end] = found.end;
    }
  }
  // The part of the range that lies in the mapping of its first byte.
  Range first_of(Range range) const noexcept {
    const auto after = ends_.upper_bound(range.begin);
    return {range.begin, after == ends_.begin() ? range.end : std::min(range.end, std::prev(after)->second)};
  }
  size_t count() const noexcept { return ends_.size(); }

 private:
  std::map<char*, char*>::iterator from(char* begin) {
    auto at = ends_.lower_bound(begin);
    if (at != ends_.begin() && std::prev(at)->second > begin) --at;
    return at;
  }
  std::map<char*, char*> ends_; // by their beginnings
};

// The free ranges by address and by size. Neighbours are joined.
class FreeRanges {
 public:
  void insert(Range range) {
    auto after = by_address_.lower_bound(range.begin);
    if (after != by_address_.end() && after->first == range.end) {
      range.end = after->second;
      by_size_.erase({static_cast<size_t>(after->second - after->first), after->first});
      after = by_address_.erase(after);
    }
    if (after != by_address_.begin()) {
      const auto before = std::prev(after);
      if (before->second == range.begin) {
        range.begin = before->first;
        by_size_.erase({static_cast<size_t>(before->second - before->first), before->first});
        by_address_.erase(before);
      }
    }
    put(range);
  }
  // Takes a part out of a range that is here.
  void take(Range whole, Range part) {
    by_size_.erase({whole.size(), whole.begin});
    by_address_.erase(whole.begin);
    if (whole.begin < part.begin) put({whole.begin, part.begin});
    if (part.end < whole.end) put({part.end, whole.end});
  }
  // The smallest of at least that size; one without size if there is none.
  Range smallest(size_t size_bytes) const noexcept {
    const auto found = by_size_.lower_bound({size_bytes, nullptr});
    return found == by_size_.end() ? Range{} : Range{found->second, found->second + found->first};
  }
  Range largest() const noexcept {
    if (by_size_.empty()) return {};
    const auto& [size, begin] = *by_size_.rbegin();
    return {begin, begin + size};
  }
  template <class Visit> // true to go on
  void from_largest(Visit visit) const {
    for (auto at = by_size_.rbegin(); at != by_size_.rend(); ++at) {
      if (!visit(Range{at->second, at->second + at->first})) return;
    }
  }
  size_t count() const noexcept { return by_size_.size(); }

 private:
  void put(Range range) {
    by_address_[range.begin] = range.end;
    by_size_.insert({range.size(), range.begin});
  }
  std::map<char*, char*> by_address_;
  std::set<std::pair<size_t, char*>> by_size_;
};

class Pool {
 public:
  struct Counts {
    int64_t live, free, most, limit, blocks, exact, split, composed, moves, moved_bytes, fresh_bytes, given_back_bytes;
    int64_t mappings, most_mappings, emptied;
  };

  // Threads of the scope are served from here on. `limit_bytes`: of the pool and of the scope's blocks beside it.
  void open(Scope* scope, int64_t limit_bytes, size_t piece_bytes, size_t least_bytes) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    limit_bytes_ = limit_bytes;
    most_beside_ = 0;
    piece_ = piece_bytes;
    least_.store(least_bytes);
    scope_.store(scope);
  }
  // No more blocks are served, and free pages are given back; live blocks stay until they die.
  void close() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    scope_.store(nullptr);
    limit_bytes_ = 0;
    trim(counts_.free);
  }
  bool is_open_for(const Scope* scope) const noexcept {
    return scope != nullptr && scope == scope_.load(std::memory_order_relaxed);
  }

  // Smaller blocks come from the ordinary allocator.
  size_t least_bytes() const noexcept { return least_.load(std::memory_order_relaxed); }

  // Null if there is no memory.
  void* take(size_t size_bytes) noexcept {
    const size_t size = in_pages(size_bytes);
    std::lock_guard<std::mutex> guard(mutex);
    try {
      ++counts_.blocks;
      Range found = free_.smallest(size);
      if (found.size() == size) {
        ++counts_.exact;
        free_.take(found, found);
        counts_.free -= static_cast<int64_t>(size);
      } else if (found.size() > 0) {
        ++counts_.split;
        const Range part = part_of(found, size);
        free_.take(found, part);
        counts_.free -= static_cast<int64_t>(size);
        found = part;
      } else {
        found = fits_fresh(size) ? fresh_part(size) : composed(size);
      }
      if (found.begin == nullptr) return nullptr;
      counts_.live += static_cast<int64_t>(size);
      tell();
      return found.begin;
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

  void give_back(void* address, size_t size_bytes) noexcept {
    const size_t size = in_pages(size_bytes);
    const Range range{static_cast<char*>(address), static_cast<char*>(address) + size};
    std::lock_guard<std::mutex> guard(mutex);
    counts_.live -= static_cast<int64_t>(size);
    try {
      free_.insert(range);
      counts_.free += static_cast<int64_t>(size);
    } catch (const std::bad_alloc&) {
      unmap(range);
    }
    keep_within();
  }

  // The scope has another block beside the pool.
  void look() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    keep_within();
  }

  void counts(int64_t* out) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    counts_.limit = room();
    counts_.mappings = static_cast<int64_t>(mappings_.count());
    std::copy_n(reinterpret_cast<const int64_t*>(&counts_), sizeof counts_ / sizeof(int64_t), out);
  }
  void reset_most() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    counts_.most = counts_.live + counts_.free;
    counts_.most_mappings = static_cast<int64_t>(mappings_.count());
  }
  // Hears each change of the bytes that the pool has.
  void tell_to(void (*listener)(long)) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    listener_ = listener;
    told_ = 0;
    tell();
  }
  // In a forked child: blocks are served only in the parent.
  void stop() noexcept {
    scope_.store(nullptr);
    listener_ = nullptr;
  }

  std::mutex mutex;

 private:
  static constexpr size_t kHugePage = size_t{2} << 20, kMostMappings = 16384;

  static size_t up(size_t value, size_t unit) noexcept { return (value + unit - 1) / unit * unit; }
  static char* up(char* at, size_t unit) noexcept {
    return reinterpret_cast<char*>(up(reinterpret_cast<uintptr_t>(at), unit));
  }
  static char* down(char* at, size_t unit) noexcept {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(at) / unit * unit);
  }
  size_t in_pages(size_t size_bytes) const noexcept { return up(size_bytes, page_); }

  // What the pool may have: the limit less the scope's blocks beside it.
  int64_t room() noexcept {
    const Scope* scope = scope_.load(std::memory_order_relaxed);
    const int64_t beside = scope == nullptr ? 0 : scope->count_of(2);
    most_beside_ = std::max(most_beside_, beside);
    return limit_bytes_ - beside;
  }
  bool fits_fresh(size_t size) noexcept {
    room();
    return counts_.live + counts_.free + static_cast<int64_t>(size) <= limit_bytes_ - most_beside_;
  }

  // Where in a larger range a block is to lie: at its beginning or end, so that more whole huge pages stay free.
  static Range part_of(Range whole, size_t size) noexcept {
    const Range first{whole.begin, whole.begin + size}, last{whole.end - size, whole.end};
    return whole_pages({first.end, whole.end}) >= whole_pages({whole.begin, last.begin}) ? first : last;
  }
  static size_t whole_pages(Range range) noexcept {
    char *begin = up(range.begin, kHugePage), *end = down(range.end, kHugePage);
    return begin < end ? static_cast<size_t>(end - begin) / kHugePage : 0;
  }

  // New addresses without pages; the kernel may have none left.
  static Range reserve(size_t size, int protection) noexcept {
    const bool is_large = size >= kHugePage;
    const size_t whole = size + (is_large ? kHugePage : 0);
    void* found = mmap(nullptr, whole, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return {};
    char* begin = static_cast<char*>(found);
    if (!is_large) return {begin, begin + size};
    char* aligned = up(begin, kHugePage);
    if (begin < aligned) munmap(begin, static_cast<size_t>(aligned - begin));
    if (aligned + size < begin + whole) munmap(aligned + size, static_cast<size_t>(begin + whole - aligned - size));
    return {aligned, aligned + size};
  }

  Range fresh(size_t size) {
    const Range found = reserve(size, PROT_READ | PROT_WRITE);
    if (found.begin == nullptr) return {};
    madvise(found.begin, size, MADV_HUGEPAGE);
    mappings_.add(found);
    note_mappings();
    counts_.fresh_bytes += static_cast<int64_t>(size);
    return found;
  }

  // A smaller block leaves the rest of a huge page free, if the limit allows it.
  Range fresh_part(size_t size) {
    if (size >= kHugePage || !fits_fresh(kHugePage)) return fresh(size);
    const Range whole = fresh(kHugePage);
    if (whole.begin == nullptr) return {};
    free_.insert({whole.begin + size, whole.end});
    counts_.free += static_cast<int64_t>(kHugePage - size);
    return {whole.begin, whole.begin + size};
  }

  Range composed(size_t size) {
    ++counts_.composed;
    const Range target = reserve(size, PROT_READ | PROT_WRITE);
    if (target.begin == nullptr) return {};
    char* at = target.begin;
    const auto left = [&] { return static_cast<size_t>(target.end - at); };
    for (const size_t unit : {kHugePage, piece_, page_}) {
      while (left() >= unit) {
        const Range source = best(unit, left() / unit * unit);
        if (source.begin == nullptr) break;
        if (!move(source, at)) return finished(target, at);
        at += source.size();
      }
    }
    return finished(target, at);
  }

  // A part of whole units of a free range, at most so large. Empty if there is none.
  Range best(size_t unit, size_t most) {
    Range found, within;
    const auto look = [&](Range range) {
      char *begin = up(range.begin, unit), *end = down(range.end, unit);
      if (begin >= end) return range.size() >= unit;
      if (static_cast<size_t>(end - begin) > found.size()) {
        found = {begin, end};
        within = range;
      }
      return found.size() < most && range.size() > found.size();
    };
    const Range fitting = free_.smallest(most);
    if (fitting.size() > 0) look(fitting);
    if (found.size() < most) free_.from_largest(look);
    if (found.begin == nullptr) return {};
    if (found.size() > most) found = whole_pages({found.begin, found.end - most}) * kHugePage >= found.size() - most
                                         ? Range{found.end - most, found.end}
                                         : Range{found.begin, found.begin + most};
    free_.take(within, found);
    counts_.free -= static_cast<int64_t>(found.size());
    return found;
  }

  bool move(Range source, char* to) {
    while (source.size() > 0) {
      const Range piece = mappings_.first_of(source);
      if (mremap(piece.begin, piece.size(), piece.size(), MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
        free_.insert(source);
        counts_.free += static_cast<int64_t>(source.size());
        return false;
      }
      mappings_.remove(piece);
      mappings_.add({to, to + piece.size()});
      ++counts_.moves;
      counts_.moved_bytes += static_cast<int64_t>(piece.size());
      to += piece.size();
      source.begin = piece.end;
    }
    return true;
  }

  // What no free page was found for is fresh.
  Range finished(Range target, char* at) {
    if (at < target.end) {
      const size_t left = static_cast<size_t>(target.end - at);
      madvise(at, left, MADV_HUGEPAGE);
      mappings_.add({at, target.end});
      counts_.fresh_bytes += static_cast<int64_t>(left);
    }
    note_mappings();
    if (mappings_.count() > kMostMappings) {
      ++counts_.emptied;
      trim(counts_.free);
    }
    return target;
  }

  void note_mappings() noexcept {
    counts_.most_mappings = std::max(counts_.most_mappings, static_cast<int64_t>(mappings_.count()));
  }

  void keep_within() noexcept {
    const int64_t over = counts_.live + counts_.free - room();
    if (over > 0 && counts_.free > 0) trim(std::min(over, counts_.free));
    tell();
  }

  // Gives back free pages: first ranges that are less than a huge page.
  void trim(int64_t bytes) noexcept {
    while (bytes > 0 && counts_.free > 0) {
      const Range whole = free_.smallest(1);
      Range part = whole;
      if (static_cast<int64_t>(part.size()) > bytes) part.begin = part.end - in_pages(static_cast<size_t>(bytes));
      free_.take(whole, part);
      counts_.free -= static_cast<int64_t>(part.size());
      bytes -= static_cast<int64_t>(part.size());
      unmap(part);
    }
  }

  void unmap(Range range) noexcept {
    munmap(range.begin, range.size());
    mappings_.remove(range);
    counts_.given_back_bytes += static_cast<int64_t>(range.size());
  }

  void tell() noexcept {
    const int64_t now = counts_.live + counts_.free;
    counts_.most = std::max(counts_.most, now);
    if (listener_ != nullptr && now != told_) listener_(static_cast<long>(now - told_));
    told_ = now;
  }

  const size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t piece_ = size_t{64} << 10;
  std::atomic<Scope*> scope_{nullptr};
  std::atomic<size_t> least_{0};
  int64_t limit_bytes_ = 0, most_beside_ = 0, told_ = 0;
  void (*listener_)(long) = nullptr;
  FreeRanges free_;
  Mappings mappings_;
  Counts counts_{};
};

} // namespace pooch
