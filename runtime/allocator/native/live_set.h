// LiveSet: which bytes of an arena are in use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pooch {

// The blocks that are alive, by their bytes. No two overlap and each lies at a place, or did before other places came:
// room for all of them is made with the places, and neither a birth nor a death allocates.
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

  struct Span {
    int64_t begin, end;
  };
  const std::vector<Span>& spans() const noexcept { return spans_; }
  // Between the blocks around a byte that is none's; the last gap ends at `size`.
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

} // namespace pooch
