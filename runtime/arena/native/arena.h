// Arena: one mapping from which a step's blocks are served at planned places.
//
// The live blocks decide, never the sequence. Births come in the recorded order. Deaths may not, because Python's
// collector runs at any time, on any thread. So a place is used only if no byte of it belongs to a live block, and
// unexpected blocks come from the ordinary allocator. A wrong plan costs time and bytes, but never damages contents.
//
// A step that leaves out layers has fewer bytes live than its layout, but not in the same order, so places may be in
// use. From then on such blocks take any gap. Where none is large enough they lie behind the arena, and as many pages
// of the gaps are given back: the memory stays that of the arena. What such a step has let go of may still be intact where
// nothing came. A block that was noted before it died is then found again, at the cost of no byte and no copy.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace pooch {

// The live blocks, by their bytes. No two overlap. Each lies at a place, or at one of an earlier layout. Room for all
// of them is reserved with the places, so births and deaths do not allocate.
class LiveSet {
 public:
  void make_room(size_t count) { spans_.reserve(count); }
  bool insert(int64_t begin, int64_t end) noexcept {
    const auto after = above(begin);
    if (after != spans_.end() && after->begin < end) return false;
    if (after != spans_.begin() && std::prev(after)->end > begin) return false;
    if (spans_.size() == spans_.capacity()) return false;
    spans_.insert(after, {begin, end});
    return true;
  }
  void erase(int64_t begin) noexcept {
    const auto found = above(begin);
    if (found != spans_.begin() && std::prev(found)->begin == begin) spans_.erase(std::prev(found));
  }
  size_t size() const noexcept { return spans_.size(); }
  // Where the block ends that begins there, or -1.
  int64_t end_of(int64_t begin) noexcept {
    const auto found = above(begin);
    return found == spans_.begin() || std::prev(found)->begin != begin ? -1 : std::prev(found)->end;
  }

  struct Span {
    int64_t begin, end;
  };
  const std::vector<Span>& spans() const noexcept { return spans_; }
  // Where the smallest gap of at least that size begins that ends before `end`, or -1.
  int64_t smallest_gap(int64_t size_bytes, int64_t end) const noexcept {
    int64_t found = -1, least = end + 1, from = 0;
    const auto look = [&](int64_t to) {
      if (to - from < size_bytes || to - from >= least) return;
      found = from;
      least = to - from;
    };
    for (const Span& span : spans_) {
      look(std::min(span.begin, end));
      from = span.end;
    }
    look(end);
    return found;
  }
  // The gap around a byte that belongs to no block. The last gap ends at `size`.
  Span gap_at(int64_t at, int64_t size) noexcept {
    const auto after = above(at);
    return {after == spans_.begin() ? 0 : std::prev(after)->end, after == spans_.end() ? size : after->begin};
  }

 private:
  std::vector<Span>::iterator above(int64_t begin) noexcept {
    return std::upper_bound(spans_.begin(), spans_.end(), begin,
                            [](int64_t value, const Span& span) { return value < span.begin; });
  }
  std::vector<Span> spans_; // sorted
};

// The places in order of birth. Points never decrease. An offset of -1 is a block outside the arena.
struct Places {
  Places() = default;
  Places(int64_t count, const int64_t* of_sizes, const int64_t* of_offsets, const int64_t* of_points)
      : sizes(of_sizes, of_sizes + count), offsets(of_offsets, of_offsets + count), points(of_points, of_points + count) {}
  std::vector<int64_t> sizes, offsets, points;
};

// The outcome for a block, in the order in which `counts` writes it. Blocks outside as planned are not counted.
enum Fate { kServed, kUnplanned, kTaken, kFates };

struct BlockCount {
  int64_t blocks = 0, bytes = 0;
};

struct Miss {
  int64_t fate, size_bytes, point;
};

// Never freed, only unmapped, because a served thread may still point to it. It is small without its places.
class Arena {
 public:
  explicit Arena(int64_t size_bytes) : size_bytes_(size_bytes) { misses_.reserve(kMostMisses); }

  // False if there is no address space.
  bool map() noexcept {
    const auto size = static_cast<size_t>(size_bytes_);
    if (!reserve(2 * size + kHugePage) && !reserve(size + kHugePage)) return false;
    const auto address = reinterpret_cast<uintptr_t>(mapping_);
    base_ = reinterpret_cast<char*>((address + kHugePage - 1) / kHugePage * kHugePage);
    if (mprotect(base_, size, PROT_READ | PROT_WRITE) != 0) {
      munmap(mapping_, mapped_bytes_);
      mapping_ = base_ = nullptr;
      return false;
    }
    madvise(base_, static_cast<size_t>(size_bytes_), MADV_HUGEPAGE);
    mapped_count().fetch_add(1);
    return true;
  }

  // Sets other places for the next steps. Live blocks stay where they are. Memory from `kept_bytes` on is released,
  // except for these blocks. False if a step is being served, or the arena was dropped.
  bool lay_out(Places places, int64_t smallest_bytes, int64_t kept_bytes) {
    std::vector<int64_t> met(places.sizes.size(), 0);
    std::lock_guard<std::mutex> guard(mutex);
    if (is_serving_ || is_dropped_) return false;
    live_.make_room(live_.size() + places.sizes.size());
    std::swap(places_, places);
    std::swap(met_, met);
    smallest_bytes_ = smallest_bytes;
    end_ = 0;
    for (size_t at = 0; at < places_.sizes.size(); ++at) {
      if (places_.offsets[at] >= 0) end_ = std::max(end_, places_.offsets[at] + in_units(places_.sizes[at]));
    }
    range_begin_ = range_end_ = next_ = 0;
    resident_.clear();
    notes_.clear();
    int64_t from = kept_bytes;
    for (const LiveSet::Span& span : live_.spans()) {
      if (span.end <= from) continue;
      give_back_between(from, span.begin);
      from = span.end;
    }
    give_back_between(from, space_bytes_);
    return true;
  }

  // The number of the step that begins, or -1 if the arena was dropped. Only threads that know it are served.
  int64_t begin(int64_t point) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    if (is_dropped_) return -1;
    is_serving_ = true;
    step_ = {};
    misses_.clear();
    notes_.clear();
    again_ = -1;
    go_to(point);
    return ++step_number_;
  }

  void at(int64_t point) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    if (is_serving_ && point != point_) go_to(point);
  }

  void end() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    is_serving_ = false;
  }

  // From here on a block whose own place is missing or in use takes any gap between the live blocks.
  void fill_gaps() {
    std::lock_guard<std::mutex> guard(mutex);
    if (!resident_.empty() || mapping_ == nullptr || end_ == 0) return;
    const auto size = static_cast<size_t>(size_bytes_);
    if (space_bytes_ == size_bytes_ && mapped_bytes_ > 2 * size && mprotect(base_ + size, size, PROT_READ | PROT_WRITE) == 0)
      space_bytes_ *= 2;
    madvise(base_, static_cast<size_t>(space_bytes_), MADV_NOHUGEPAGE); // what is given back comes back by small pages
    live_.make_room(live_.size() + 2 * places_.sizes.size() + 64);
    page_bytes_ = sysconf(_SC_PAGESIZE);
    most_pages_ = pages_to(end_);
    resident_.assign(static_cast<size_t>(pages_to(space_bytes_)), 0);
    std::fill_n(resident_.begin(), most_pages_, 1);
    int64_t from = end_;
    for (const LiveSet::Span& span : live_.spans()) {
      if (span.end <= end_) continue;
      give_back_between(from, span.begin);
      std::fill(resident_.begin() + span.begin / page_bytes_, resident_.begin() + pages_to(span.end), 1);
      from = span.end;
    }
    give_back_between(from, space_bytes_);
    resident_pages_ = std::count(resident_.begin(), resident_.end(), 1);
  }

  // The number of a note of the live block at an address, by which it may be found again once it has died; 0 if none is
  // taken, as in steps that fill no gaps.
  int64_t note(const void* address) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!is_serving_ || resident_.empty()) return 0;
    const int64_t begin = static_cast<const char*>(address) - base_;
    const int64_t end = begin < 0 || begin >= space_bytes_ ? -1 : live_.end_of(begin);
    if (end < 0) return 0;
    notes_.push_back({begin, end, next_note().fetch_add(1), false});
    return notes_.back().number;
  }

  // Where the noted block was, if it has died and its bytes are intact: the next block of that size lies there. Else null.
  void* again(int64_t number, int64_t size_bytes) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found =
        std::find_if(notes_.begin(), notes_.end(), [number](const Note& note) { return note.number == number; });
    if (found == notes_.end()) return nullptr;
    const Note note = *found;
    notes_.erase(found);
    if (!is_serving_ || !note.is_dead || note.end - note.begin != in_units(size_bytes)) return nullptr;
    again_ = note.begin;
    again_bytes_ = size_bytes;
    return base_ + note.begin;
  }

  // All memory is released when the last block here dies; that between live blocks is released at once.
  void drop() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    is_serving_ = false;
    is_dropped_ = true;
    unmap_if_unused();
    give_back_gap(0);
    for (const LiveSet::Span& span : live_.spans()) give_back_gap(span.end);
  }

  // A place for a block, or null for the ordinary allocator.
  void* take(size_t size, int64_t step_number) noexcept {
    const auto size_bytes = static_cast<int64_t>(size);
    if (size_bytes < smallest_bytes_) return nullptr;
    std::lock_guard<std::mutex> guard(mutex);
    if (!is_serving_ || step_number != step_number_) return nullptr;
    if (again_ >= 0 && size_bytes == again_bytes_) {
      const int64_t offset = std::exchange(again_, -1);
      if (occupy(offset, size_bytes)) {
        count(kServed, size_bytes);
        return base_ + offset;
      }
    }
    const size_t place = next_of(size_bytes);
    if (place == kNone) return beside(kUnplanned, size_bytes);
    met_[place] = step_number_;
    if (place >= next_) next_ = place + 1;
    const int64_t offset = places_.offsets[place];
    if (offset < 0) return nullptr;
    if (!occupy(offset, size_bytes)) return beside(kTaken, size_bytes);
    count(kServed, size_bytes);
    return base_ + offset;
  }

  void give_back(void* address) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    const int64_t offset = static_cast<char*>(address) - base_;
    live_.erase(offset);
    for (Note& note : notes_) note.is_dead |= note.begin == offset;
    if (!is_dropped_) return;
    unmap_if_unused();
    give_back_gap(offset);
  }

  // Blocks and bytes of each fate in this step.
  void counts(int64_t* out) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    for (const BlockCount& count : step_) {
      *out++ = count.blocks;
      *out++ = count.bytes;
    }
  }

  int64_t misses(Miss* out, int64_t most) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    const auto count = std::min<int64_t>(most, static_cast<int64_t>(misses_.size()));
    std::copy_n(misses_.begin(), count, out);
    return count;
  }

  int64_t live_blocks() noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(live_.size());
  }

  // -1 if the kernel gives no figure.
  int64_t resident_bytes() {
    std::lock_guard<std::mutex> guard(mutex);
    if (mapping_ == nullptr || size_bytes_ == 0) return 0;
    const int64_t page = sysconf(_SC_PAGESIZE);
    std::vector<unsigned char> pages(static_cast<size_t>((space_bytes_ + page - 1) / page));
    if (mincore(base_, static_cast<size_t>(space_bytes_), pages.data()) != 0) return -1;
    return page * std::count_if(pages.begin(), pages.end(), [](unsigned char page_bits) { return page_bits & 1; });
  }

  // In a forked child: the step continues only in the parent.
  void stop() noexcept { is_serving_ = false; }

  // Number of arenas that still have their memory.
  static std::atomic<int64_t>& mapped_count() noexcept {
    static std::atomic<int64_t> count{0};
    return count;
  }

  std::mutex mutex;
  Arena* following = nullptr; // in the list of all arenas

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1), kHugePage = size_t{2} << 20;
  static constexpr int64_t kUnit = 512;
  static constexpr size_t kLookAhead = 32, kMostMisses = 8;

  static int64_t in_units(int64_t size_bytes) noexcept { return (size_bytes + kUnit - 1) / kUnit * kUnit; }

  size_t first_of(int64_t point) const noexcept {
    const auto& points = places_.points;
    return static_cast<size_t>(std::lower_bound(points.begin(), points.end(), point) - points.begin());
  }

  void go_to(int64_t point) noexcept {
    point_ = point;
    range_begin_ = next_ = first_of(point);
    range_end_ = first_of(point + 1);
  }

  // The next place of that size in the sequence; else one that was passed over, if blocks came in another order.
  size_t next_of(int64_t size_bytes) const noexcept {
    const size_t ahead = std::min(range_end_, next_ + kLookAhead);
    for (size_t at = next_; at < ahead; ++at) {
      if (is_open(at, size_bytes)) return at;
    }
    const size_t behind = next_ - std::min(next_ - range_begin_, kLookAhead);
    for (size_t at = behind; at < next_; ++at) {
      if (is_open(at, size_bytes)) return at;
    }
    return kNone;
  }

  bool is_open(size_t place, int64_t size_bytes) const noexcept {
    return places_.sizes[place] == size_bytes && met_[place] != step_number_;
  }

  // A block whose own place is missing or in use.
  void* beside(Fate fate, int64_t size_bytes) noexcept {
    const int64_t gap = resident_.empty() ? -1 : live_.smallest_gap(in_units(size_bytes), space_bytes_);
    if (gap < 0 || !occupy(gap, size_bytes)) return missed(fate, size_bytes);
    count(kServed, size_bytes);
    return base_ + gap;
  }

  bool occupy(int64_t offset, int64_t size_bytes) noexcept {
    const int64_t end = offset + in_units(size_bytes);
    if (!live_.insert(offset, end)) return false;
    forget_between(offset, end);
    if (resident_.empty() || make_resident(offset, end)) return true;
    live_.erase(offset);
    return false;
  }

  // A live block is about to be written. False if its pages were too many, with those that cannot be given back.
  bool make_resident(int64_t begin, int64_t end) noexcept {
    const auto first = resident_.begin() + begin / page_bytes_, behind = resident_.begin() + pages_to(end);
    const int64_t more = std::count(first, behind, 0);
    if (more == 0) return true;
    if (give_back_pages(resident_pages_ + more - most_pages_) > 0) return false;
    std::fill(first, behind, 1);
    resident_pages_ += more;
    return true;
  }

  // Gives back so many pages of the gaps, the last ones first. Returns how many were not found.
  int64_t give_back_pages(int64_t wanted) noexcept {
    int64_t to = space_bytes_;
    for (auto span = live_.spans().rbegin(); wanted > 0; ++span) {
      const bool is_last = span == live_.spans().rend();
      const int64_t least = pages_to(is_last ? 0 : span->end);
      for (int64_t page = to / page_bytes_ - 1; page >= least && wanted > 0; --page) {
        if (!resident_[static_cast<size_t>(page)]) continue;
        int64_t first = page;
        while (first > least && page - first + 1 < wanted && resident_[static_cast<size_t>(first - 1)]) --first;
        const int64_t count = page - first + 1;
        madvise(base_ + first * page_bytes_, static_cast<size_t>(count * page_bytes_), MADV_DONTNEED);
        std::fill_n(resident_.begin() + first, count, 0);
        forget_between(first * page_bytes_, (page + 1) * page_bytes_);
        resident_pages_ -= count;
        wanted -= count;
        page = first;
      }
      if (is_last) break;
      to = span->begin;
    }
    return wanted;
  }

  // These bytes are no longer what a block has left there.
  void forget_between(int64_t begin, int64_t end) noexcept {
    std::erase_if(notes_, [=](const Note& note) { return note.is_dead && note.begin < end && begin < note.end; });
  }

  int64_t pages_to(int64_t at) const noexcept { return (at + page_bytes_ - 1) / page_bytes_; }

  bool reserve(size_t bytes) noexcept {
    void* mapping = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    mapping_ = static_cast<char*>(mapping);
    mapped_bytes_ = bytes;
    return true;
  }

  void* missed(Fate fate, int64_t size_bytes) noexcept {
    if (misses_.size() < kMostMisses) misses_.push_back({fate, size_bytes, point_});
    count(fate, size_bytes);
    return nullptr;
  }

  void count(Fate fate, int64_t size_bytes) noexcept {
    ++step_[fate].blocks;
    step_[fate].bytes += size_bytes;
  }

  void unmap_if_unused() noexcept {
    if (!is_dropped_ || live_.size() != 0 || mapping_ == nullptr) return;
    munmap(mapping_, mapped_bytes_);
    mapping_ = base_ = nullptr;
    places_ = {};
    met_ = {};
    live_ = {};
    resident_ = {};
    notes_ = {};
    mapped_count().fetch_sub(1);
  }

  // Releases the memory between the blocks around a byte.
  void give_back_gap(int64_t at) noexcept {
    if (mapping_ == nullptr) return;
    const LiveSet::Span gap = live_.gap_at(at, space_bytes_);
    give_back_between(gap.begin, gap.end);
  }

  void give_back_between(int64_t from, int64_t to) noexcept {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t begin = (from + page - 1) / page * page, end = to / page * page;
    if (begin < end) madvise(base_ + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
  }

  Places places_;
  std::vector<int64_t> met_; // the step in which each place was last requested
  LiveSet live_;
  const int64_t size_bytes_;
  int64_t space_bytes_ = size_bytes_; // with what may be used behind the arena
  int64_t smallest_bytes_ = 0, end_ = 0; // of the places
  // No two arenas have a note of the same number: a value of an earlier step may outlive its arena.
  static std::atomic<int64_t>& next_note() noexcept {
    static std::atomic<int64_t> number{1};
    return number;
  }
  struct Note {
    int64_t begin, end, number;
    bool is_dead;
  };
  std::vector<Note> notes_; // of this step's blocks
  int64_t again_ = -1, again_bytes_ = 0; // where the next block of so many bytes lies
  std::vector<char> resident_; // by page, whether it may have memory; empty until blocks fill gaps
  int64_t resident_pages_ = 0, most_pages_ = 0, page_bytes_ = 1;
  char *mapping_ = nullptr, *base_ = nullptr;
  size_t mapped_bytes_ = 0;
  bool is_serving_ = false, is_dropped_ = false;
  int64_t step_number_ = 0, point_ = 0;
  size_t range_begin_ = 0, range_end_ = 0, next_ = 0; // the places of the current point; the next one of them
  std::array<BlockCount, kFates> step_;
  std::vector<Miss> misses_; // the first misses of this step
};

} // namespace pooch
