// Places of blocks in an arena. First fit puts each block at the lowest place that is free for its whole life, like
// `packing.py`. The search below a given height gives a block without room the cheapest place, and ejects others there.
//
// It is the ejection search of Nagata and Braeysy (2009, "A powerful route minimization heuristic for the vehicle
// routing problem with time windows"), for rectangles: each time that a block finds no room, its ejection becomes more
// expensive. It uses integers and its own random numbers, so equal calls have equal results.
#pragma once

#include <algorithm>

#include "problem.h"

namespace pooch {

constexpr int64_t kWaits = -1;             // offset of a block without a place
constexpr int64_t kForgetsAfter = 20'000;  // turns after which the added costs of blocks are halved
constexpr int64_t kPerEjection = 8;        // looks that each neighbour counts as when a block is ejected

// Rows with a column per block: its start, the time after its end, its size.
struct Spans {
  const int64_t *start, *end, *size;

  Spans(const int64_t* rows, int64_t blocks) : start(rows), end(rows + blocks), size(rows + 2 * blocks) {}
};

// The blocks that have a place, in the order of their first bytes.
struct Placed {
  int64_t count = 0;
  Ints block, start, end, low, high;

  explicit Placed(int64_t blocks) : block(blocks), start(blocks), end(blocks), low(blocks), high(blocks) {}

  bool lives_in(int64_t at, int64_t first, int64_t after) const { // always both: a mispredicted jump takes longer
    return (int{start[at] < after} & int{end[at] > first}) != 0;
  }

  void put(const Spans& spans, int64_t number, int64_t offset) {
    const int64_t at = std::lower_bound(low.begin(), low.begin() + count, offset) - low.begin();
    for (Ints* row : {&block, &start, &end, &low, &high}) {
      std::copy_backward(row->begin() + at, row->begin() + count, row->begin() + count + 1);
    }
    block[at] = number;
    start[at] = spans.start[number];
    end[at] = spans.end[number];
    low[at] = offset;
    high[at] = offset + spans.size[number];
    ++count;
  }
};

inline void first_fit(const Spans& spans, Rows<const int64_t> order, int64_t* offsets) {
  Placed placed(order.count);
  for (int64_t number : order) {
    int64_t offset = 0;
    for (int64_t k = 0; k < placed.count; ++k) {
      if (!placed.lives_in(k, spans.start[number], spans.end[number])) continue;
      if (placed.low[k] - offset >= spans.size[number]) break;
      offset = std::max(offset, placed.high[k]);
    }
    placed.put(spans, number, offset);
    offsets[number] = offset;
  }
}

// The neighbours of a block, lowest first, with the costs of all before them; then the same in the order of their ends.
struct Beside {
  int64_t count = 0;
  Ints block, from, to, cost_below, by_end, cost_ended;

  explicit Beside(int64_t blocks)
      : block(blocks), from(blocks), to(blocks), cost_below(blocks + 1), by_end(blocks), cost_ended(blocks + 1) {}
};

class Ejection {
 public:
  Ejection(const Spans& spans, int64_t blocks, int64_t* offsets, int64_t height, const int64_t* costs, int64_t seed)
      : spans_(spans), offsets_(offsets), height_(height), costs_(costs), state_(seed),
        placed_(blocks), beside_(blocks), factors_(blocks, 1) {
    for (int64_t block = 0; block < blocks; ++block) {
      if (offsets[block] < 0 || offsets[block] + spans.size[block] > height) {
        waiting_.push_back(block);
      } else {
        placed_.put(spans, block, offsets[block]);
      }
    }
  }

  // Gives every block a place below the height, or stops after `allowance` looks; returns the looks taken.
  int64_t place_all(int64_t allowance) {
    int64_t looks = 0;
    for (int64_t turn = 1; !waiting_.empty() && looks < allowance; ++turn) {
      const int64_t block = take_dearest();
      look_beside(block);
      looks += placed_.count + static_cast<int64_t>(waiting_.size());
      int64_t place = lowest_gap(spans_.size[block]);
      if (place == kWaits) {
        looks += kPerEjection * beside_.count;
        ++factors_[block];
        weigh();
        place = cheapest_place(spans_.size[block]);
        eject(block, place);
      }
      placed_.put(spans_, block, place);
      if (turn % kForgetsAfter == 0) {
        for (int64_t& factor : factors_) factor = (factor + 1) / 2;
      }
    }
    for (int64_t block : waiting_) offsets_[block] = kWaits;
    for (int64_t k = 0; k < placed_.count; ++k) offsets_[placed_.block[k]] = placed_.low[k];
    return looks;
  }

  int64_t left() const { return static_cast<int64_t>(waiting_.size()); }

 private:
  int64_t cost_of(int64_t block) const { return costs_[block] * factors_[block]; }

  // Removes the most expensive waiting block.
  int64_t take_dearest() {
    const auto is_cheaper = [&](int64_t one, int64_t other) { return cost_of(one) < cost_of(other); };
    const auto at = std::max_element(waiting_.begin(), waiting_.end(), is_cheaper);
    const int64_t block = *at;
    *at = waiting_.back();
    waiting_.pop_back();
    return block;
  }

  // Collects the blocks that live at the same time as the block.
  void look_beside(int64_t number) {
    const int64_t first = spans_.start[number], after = spans_.end[number], count = placed_.count;
    int64_t near = 0;
    for (int64_t k = 0; k < count; ++k) { // always written: a mispredicted jump takes longer
      beside_.block[near] = placed_.block[k];
      beside_.from[near] = placed_.low[k];
      beside_.to[near] = placed_.high[k];
      near += placed_.lives_in(k, first, after);
    }
    beside_.count = near;
  }

  // The lowest place with room for `size`; `kWaits` without one.
  int64_t lowest_gap(int64_t size) const {
    int64_t top = 0;
    for (int64_t k = 0; k < beside_.count; ++k) {
      if (size <= beside_.from[k] - top) return top;
      top = std::max(top, beside_.to[k]);
    }
    return top + size <= height_ ? top : kWaits;
  }

  // Adds up the costs of the neighbours, by their first bytes and by their last ones.
  void weigh() {
    const int64_t near = beside_.count;
    Ints& by_end = beside_.by_end;
    for (int64_t k = 0; k < near; ++k) by_end[k] = k;
    for (int64_t step = near / 2; step > 0; step /= 2) { // Shell's sort: it needs no more memory
      for (int64_t k = step; k < near; ++k) {
        const int64_t item = by_end[k];
        int64_t at = k;
        while (at >= step && beside_.to[by_end[at - step]] > beside_.to[item]) {
          by_end[at] = by_end[at - step];
          at -= step;
        }
        by_end[at] = item;
      }
    }
    int64_t below = 0, ended = 0;
    for (int64_t k = 0; k < near; ++k) {
      beside_.cost_below[k] = below;
      beside_.cost_ended[k] = ended;
      below += cost_of(beside_.block[k]);
      ended += cost_of(beside_.block[by_end[k]]);
    }
    beside_.cost_below[near] = below;
    beside_.cost_ended[near] = ended;
  }

  // The place with the least cost, a random one of the cheapest: on another block's end, or right below another.
  int64_t cheapest_place(int64_t size) {
    const int64_t near = beside_.count;
    ties_ = 0;
    for (int64_t k = 0, begun = 0; k <= near; ++k) { // on the end of the k-th block, or at the bottom
      const int64_t place = k > 0 ? beside_.to[beside_.by_end[k - 1]] : 0;
      if (place + size > height_) break;
      while (begun < near && beside_.from[begun] < place + size) ++begun;
      offer(beside_.cost_below[begun] - beside_.cost_ended[k], place);
    }
    for (int64_t k = 0, over = 0; k <= near; ++k) { // below the beginning of the k-th block, or below the height
      const int64_t place = (k < near ? beside_.from[k] : height_) - size;
      while (over < near && beside_.to[beside_.by_end[over]] <= place) ++over;
      if (place >= 0) offer(beside_.cost_below[k] - beside_.cost_ended[over], place);
    }
    return place_;
  }

  // Takes a cheaper place, or at random an equally cheap one.
  void offer(int64_t cost, int64_t place) {
    if (ties_ == 0 || cost < cost_) {
      cost_ = cost;
      place_ = place;
      ties_ = 1;
    } else if (cost == cost_) {
      ++ties_;
      if (lot() % ties_ == 0) place_ = place;
    }
  }

  // The next random number, of 23 bits.
  int64_t lot() {
    state_ = (state_ * 1'103'515'245 + 12'345) & 0x7FFF'FFFF;
    return state_ >> 8;
  }

  // Ejects all blocks where the block is put.
  void eject(int64_t number, int64_t place) {
    const int64_t top = place + spans_.size[number];
    int64_t kept = 0;
    for (int64_t k = 0; k < placed_.count; ++k) {
      const bool is_near = placed_.lives_in(k, spans_.start[number], spans_.end[number]);
      if (is_near && placed_.low[k] < top && placed_.high[k] > place) {
        waiting_.push_back(placed_.block[k]);
        continue;
      }
      if (kept < k) {
        for (Ints* row : {&placed_.block, &placed_.start, &placed_.end, &placed_.low, &placed_.high}) {
          (*row)[kept] = (*row)[k];
        }
      }
      ++kept;
    }
    placed_.count = kept;
  }

  const Spans spans_;
  int64_t* const offsets_;
  const int64_t height_;
  const int64_t* const costs_;
  int64_t state_, cost_ = 0, place_ = 0, ties_ = 0;
  Placed placed_;
  Beside beside_;
  Ints waiting_, factors_;
};

} // namespace pooch
