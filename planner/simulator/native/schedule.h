// The schedule (`_Scheduler`): the releases of swapped values, so that memory stays within the budget, and the order of
// both queues, copies out as bytes can be released, copies back in the order of need.
#pragma once

#include <algorithm>

#include "problem.h"

namespace pooch {

// Adds bytes that live from tick `first` to `last` to the changes at each tick (`occupancy`).
inline void put(Ints& moves, int64_t ticks, int64_t first, int64_t last, int64_t size_bytes) {
  const int64_t start = std::min(first, ticks);
  moves[start] += size_bytes;
  moves[std::min(std::max(last + 1, start), ticks)] -= size_bytes;
}

inline void add_moves(Ints& curve, const Ints& moves) {
  int64_t moved = 0;
  for (size_t tick = 0; tick < curve.size(); ++tick) {
    moved += moves[tick];
    curve[tick] += moved;
  }
}

// Bytes live at each tick if no swapped value leaves, including inside replays.
inline void lay_curve(const Problem& problem, Scratch& scratch) {
  const int64_t ticks = problem.ticks.count;
  pooch::clear(scratch.moves);
  for (int64_t number = 0; number < problem.values.count; ++number) {
    const Value& value = problem.values[number];
    const Chosen& here = scratch.values[number];
    const bool is_away = scratch.decisions[number] == kRecompute;
    const int64_t last = is_away ? value.death : std::max(value.death, here.end);
    pooch::put(scratch.moves, ticks, value.born, last, value.size_bytes);
    if (is_away && here.replayed_at >= 0) {
      pooch::put(scratch.moves, ticks, problem.points[here.replayed_at].tick, here.end, value.size_bytes);
    }
  }
  int64_t live = 0;
  for (int64_t tick = 0; tick < ticks; ++tick) {
    live += scratch.moves[tick];
    scratch.curve[tick] = live + problem.ticks[tick].base_bytes;
  }
  for (const Run& run : scratch.runs) {
    const int64_t extra_bytes = scratch.store.merged[run.merged].peak_bytes - run.target_bytes;
    if (extra_bytes > 0) scratch.curve[problem.points[run.point].tick] += extra_bytes;
  }
}

// The first of a value's needs at `point` or after it, from `need` on; -1 if there is none.
inline int64_t need_after(const std::vector<Need>& needs, int64_t need, int64_t point) {
  while (need >= 0 && needs[need].point < point) need = needs[need].later;
  return need;
}

// Last tick at which a value stays away whose next need is `need`; -1 if it must not leave any more.
inline int64_t absent_until(const Problem& problem, const Scratch& scratch, int64_t value, int64_t need) {
  if (need >= 0) return problem.points[scratch.needs[need].point].tick - 1;
  if (problem.values[value].first_use >= 0) return -1;
  return std::min(std::max(problem.values[value].death, scratch.values[value].end), problem.ticks.count - 1);
}

inline void release(const Problem& problem, Scratch& scratch, int64_t number, int64_t point) {
  const Value& value = problem.values[number];
  Chosen& here = scratch.values[number];
  const int64_t need = pooch::need_after(scratch.needs, here.first_need, point);
  const int64_t last = absent_until(problem, scratch, number, need);
  const int64_t first = std::max(value.death + 1, problem.points[point].tick);
  if (last >= first) pooch::put(scratch.moves, problem.ticks.count, first, last, -value.size_bytes);
  here.back = need >= 0 ? scratch.needs[need].point : -1;
  here.release = point;
  scratch.released.push_back(number);
}

// Whether a value is a source from which no replay starts.
inline bool is_idle(const Problem& problem, const Scratch& scratch, int64_t value) {
  return problem.values[value].is_source && scratch.values[value].end <= problem.values[value].death;
}

// Releases every swapped value at its forward death.
inline void release_early(const Problem& problem, Scratch& scratch) {
  pooch::clear(scratch.moves);
  for (int64_t value = 0; value < problem.values.count; ++value) {
    if (scratch.decisions[value] != kSwap || is_idle(problem, scratch, value)) continue;
    release(problem, scratch, value, problem.values[value].early_point);
  }
  pooch::add_moves(scratch.curve, scratch.moves);
}

// Releases the first waiting values that make a tick fit, without those that turn out to be unnecessary; returns the
// bytes by which the tick then exceeds the budget.
inline int64_t release_for(const Problem& problem, Scratch& scratch, int64_t tick, int64_t point, int64_t over_bytes) {
  const auto helps = [&](int64_t number) {
    const Value& value = problem.values[number];
    if (value.death >= tick || value.save_point > point) return false;
    const int64_t need = pooch::need_after(scratch.needs, scratch.values[number].first_need, point);
    return tick <= absent_until(problem, scratch, number, need);
  };
  Ints &waiting = scratch.waiting, &tried = scratch.tried;
  auto next = waiting.begin();
  tried.clear();
  for (; next != waiting.end() && over_bytes > 0; ++next) {
    if (!helps(*next)) continue;
    tried.push_back(*next);
    over_bytes -= problem.values[*next].size_bytes;
  }
  for (size_t at = tried.size(); at-- > 0;) { // the wait for the last in the queue is the longest
    const int64_t size_bytes = problem.values[tried[at]].size_bytes;
    if (at + 1 == tried.size() || size_bytes > -over_bytes) continue;
    over_bytes += size_bytes;
    tried[at] = -1;
  }
  for (int64_t value : tried) {
    if (value >= 0) release(problem, scratch, value, point);
  }
  const auto is_released = [&](int64_t value) { return scratch.values[value].release >= 0; };
  waiting.erase(std::remove_if(waiting.begin(), next, is_released), next);
  return over_bytes;
}

// Releases values of the queue where their bytes are needed.
inline void release_late(const Problem& problem, Scratch& scratch, int64_t budget_bytes) {
  Ints& waiting = scratch.waiting;
  waiting.clear();
  for (const Queued& queued : scratch.queue) waiting.push_back(queued.value);
  pooch::clear(scratch.moves);
  int64_t moved = 0, point = -1;
  for (int64_t tick = 0; tick < problem.ticks.count; ++tick) {
    moved += scratch.moves[tick];
    const int64_t over_bytes = scratch.curve[tick] + moved - budget_bytes;
    if (over_bytes <= 0) continue;
    while (point + 1 < problem.points.count && problem.points[point + 1].tick <= tick) ++point;
    const int64_t left_bytes = release_for(problem, scratch, tick, point, over_bytes);
    moved -= over_bytes - left_bytes;
    if (left_bytes > 0) {
      // These decisions do not fit. The others are released early, so that the missing bytes are exact.
      for (int64_t value : waiting) release(problem, scratch, value, problem.values[value].early_point);
      break;
    }
  }
  pooch::add_moves(scratch.curve, scratch.moves);
}

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
  pooch::sort_by(scratch.values, &Chosen::due_at, scratch.tried, problem.values.count, scratch.due_start, scratch.due);
}

// Puts the wanted copies into the order of the queue, with the points at which they are queued.
//
// A copy is queued at its save point. But if forward still holds the value, others go first while the link is busy. No
// copy is queued after its release.
inline void queue_out(const Problem& problem, Scratch& scratch, bool is_released) {
  const Rows<const Value>& values = problem.values;
  find_due(problem, scratch, is_released);
  pooch::clear(scratch.pending);
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
  pooch::sort_by(scratch.values, &Chosen::back, scratch.tried, problem.points.count, scratch.prefetch_start,
                 scratch.fetched);
}

// The most bytes from each use point to the next.
inline void fill_segments(const Problem& problem, Scratch& scratch) {
  pooch::clear(scratch.block_raised);
  pooch::clear(scratch.block_most);
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
