// The order of both queues: copies out as bytes can be released, copies back in the order of need (`_Scheduler`).
#pragma once

#include <algorithm>

#include "scratch.h"

namespace pooch {

// Sorts values by one of their fields, which is below `keys`, and stably. Those with key k are then in `found` from
// `start[k]` to before `start[k + 1]`.
inline void sort_by(const std::vector<Chosen>& values, int64_t Chosen::*key, const Ints& items, int64_t keys,
                    Ints& start, Ints& found) {
  start.assign(keys + 1, 0);
  found.resize(items.size());
  for (int64_t item : items) ++start[values[item].*key + 1];
  for (int64_t k = 1; k <= keys; ++k) start[k] += start[k - 1];
  for (int64_t item : items) found[start[values[item].*key]++] = item;
  for (int64_t k = keys; k > 0; --k) start[k] = start[k - 1];
  start[0] = 0;
}

// The released values in the order of rank, by the save point that their copies must not pass.
inline void find_due(const Problem& problem, Scratch& scratch, bool is_released) {
  scratch.tried.clear();
  if (is_released) {
    for (const Value& row : problem.values) {
      Chosen& here = scratch.values[row.by_rank];
      if (!here.wanted) continue;
      here.due_at = std::max(row.by_rank, problem.points[here.release].saves_before - 1);
      scratch.tried.push_back(row.by_rank);
    }
  }
  sort_by(scratch.values, &Chosen::due_at, scratch.tried, problem.values.count, scratch.due_start, scratch.due);
}

// Puts the wanted copies into the order of the queue, with the points at which they are queued.
//
// A copy is queued at its save point. But if forward still holds the value, others go first while the link is busy. No
// copy is queued after its release.
inline void queue_out(const Problem& problem, Scratch& scratch, bool is_released) {
  const Rows<const Value>& values = problem.values;
  find_due(problem, scratch, is_released);
  clear(scratch.pending);
  scratch.queue.clear();
  const int64_t last = values.count - 1;
  int64_t waiting = 0, low = last + 1;
  double link_free_s = 0.0;
  for (int64_t index = 0; index <= last; ++index) {
    const int64_t point = values[index].save_point;
    if (scratch.values[index].wanted) {
      scratch.pending[values[index].rank] = 1;
      low = std::min(low, values[index].rank);
      ++waiting;
    }
    if (waiting == 0) continue;
    const Point& soon = problem.points[index == last ? problem.points.count - 1 : values[index + 1].save_point];
    const double soon_s = problem.op_s[soon.op].work_s, now_s = problem.op_s[problem.points[point].op].work_s;
    const auto enqueue = [&](int64_t value) {
      scratch.pending[values[value].rank] = 0;
      scratch.queue.push_back({value, point});
      link_free_s = std::max(link_free_s, now_s) + problem.copy_s[value].of[kOut];
      --waiting;
    };
    while (waiting > 0) {
      while (!scratch.pending[low]) ++low;
      const int64_t value = values[low].by_rank;
      if (index != last && values[value].frees_tick > soon.tick && link_free_s > soon_s) break;
      enqueue(value);
    }
    for (int64_t k = scratch.due_start[index]; k < scratch.due_start[index + 1]; ++k) {
      if (scratch.pending[values[scratch.due[k]].rank]) enqueue(scratch.due[k]);
    }
  }
}

// Released values that come back, by the points that need them, then by value.
inline void find_order_of_need(const Problem& problem, Scratch& scratch) {
  scratch.tried.clear();
  for (int64_t value = 0; value < problem.values.count; ++value) {
    if (scratch.values[value].release >= 0 && scratch.values[value].back >= 0) scratch.tried.push_back(value);
  }
  sort_by(scratch.values, &Chosen::back, scratch.tried, problem.points.count, scratch.prefetch_start, scratch.fetched);
}

// The most bytes from each use point to the next.
inline void fill_segments(const Problem& problem, Scratch& scratch) {
  clear(scratch.block_raised);
  clear(scratch.block_most);
  for (int64_t use = 0; use + 1 < problem.uses.count; ++use) {
    const auto first = scratch.curve.begin() + problem.uses[use].tick;
    const auto after = scratch.curve.begin() + problem.uses[use + 1].tick;
    const int64_t most = first < after ? *std::max_element(first, after) : *first;
    int64_t& of_block = scratch.block_most[use / Scratch::kBlock];
    scratch.segment[use] = most;
    of_block = std::max(of_block, most);
  }
}

// The first use point at `tick` or after it.
inline int64_t first_use(const Problem& problem, int64_t tick) {
  const auto is_before = [](const Use& use, int64_t wanted) { return use.tick < wanted; };
  return std::lower_bound(problem.uses.begin(), problem.uses.end(), tick, is_before) - problem.uses.begin();
}

// The first use point, from `lowest` on, from which to `back` no segment has more than `room`.
inline int64_t go_back(const Scratch& scratch, int64_t back, int64_t lowest, int64_t room) {
  int64_t use = back;
  while (use > lowest) {
    const int64_t block = (use - 1) / Scratch::kBlock;
    const bool is_whole = use % Scratch::kBlock == 0 && use - Scratch::kBlock >= lowest;
    if (is_whole && scratch.block_most[block] <= room) {
      use -= Scratch::kBlock;
    } else if (scratch.segment[use - 1] + scratch.block_raised[block] <= room) {
      --use;
    } else {
      break;
    }
  }
  return use;
}

// Adds bytes to the segments from `use` to `back`.
inline void raise(Scratch& scratch, int64_t use, int64_t back, int64_t size_bytes) {
  while (use < back) {
    const int64_t block = use / Scratch::kBlock;
    int64_t &most = scratch.block_most[block], &raised = scratch.block_raised[block];
    if (use % Scratch::kBlock == 0 && use + Scratch::kBlock <= back) {
      raised += size_bytes;
      most += size_bytes;
      use += Scratch::kBlock;
    } else {
      scratch.segment[use] += size_bytes;
      most = std::max(most, scratch.segment[use] + raised);
      ++use;
    }
  }
}

// Points of the copies back, each as early as memory permits.
//
// Copies back begin and end at use points. So only the most live bytes between two of them matter: a segment. A block
// of segments is skipped, or raised, at once.
inline void prefetch(const Problem& problem, Scratch& scratch, int64_t budget_bytes, int64_t style) {
  find_order_of_need(problem, scratch);
  if (style != kOnDemand) fill_segments(problem, scratch);
  int64_t earliest = 0;
  for (int64_t number : scratch.fetched) {
    const Value& value = problem.values[number];
    Chosen& here = scratch.values[number];
    const int64_t back = problem.points[here.back].use;
    int64_t use = back;
    if (style != kOnDemand) {
      const int64_t gone = std::max(problem.points[here.release].tick, value.death) + 1;
      const int64_t lowest = problem.uses[earliest].tick < gone ? first_use(problem, gone) : earliest;
      use = go_back(scratch, back, lowest, budget_bytes - value.size_bytes);
      raise(scratch, use, back, value.size_bytes);
    }
    here.prefetch = problem.uses[use].point;
    if (style != kLateOutOfOrder) earliest = use;
  }
}

} // namespace pooch
