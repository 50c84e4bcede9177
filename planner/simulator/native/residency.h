// The releases of swapped values, so that memory stays within the budget (`_Scheduler`).
#pragma once

#include <algorithm>

#include "scratch.h"

namespace pooch {

// Adds bytes that live from tick `first` to `last` to the changes at each tick (`occupancy`).
inline void put(Ints& moves, int64_t ticks, int64_t first, int64_t last, int64_t size_bytes) {
  const int64_t start = std::min(first, ticks);
  moves[start] += size_bytes;
  moves[std::min(std::max(last + 1, start), ticks)] -= size_bytes;
}

inline void apply(Ints& curve, const Ints& moves) {
  int64_t moved = 0;
  for (size_t tick = 0; tick < curve.size(); ++tick) {
    moved += moves[tick];
    curve[tick] += moved;
  }
}

// Bytes live at each tick if no swapped value leaves, including inside replays.
inline void lay_curve(const Problem& problem, Scratch& scratch) {
  const int64_t ticks = problem.ticks.count;
  clear(scratch.moves);
  for (int64_t number = 0; number < problem.values.count; ++number) {
    const Value& value = problem.values[number];
    const Chosen& here = scratch.values[number];
    const bool is_away = scratch.decisions[number] == kRecompute;
    const int64_t last = is_away ? value.death : std::max(value.death, here.end);
    put(scratch.moves, ticks, value.born, last, value.size_bytes);
    if (is_away && here.replayed_at >= 0) {
      put(scratch.moves, ticks, problem.points[here.replayed_at].tick, here.end, value.size_bytes);
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
  const int64_t need = need_after(scratch.needs, here.first_need, point);
  const int64_t last = absent_until(problem, scratch, number, need);
  const int64_t first = std::max(value.death + 1, problem.points[point].tick);
  if (last >= first) put(scratch.moves, problem.ticks.count, first, last, -value.size_bytes);
  here.back = need >= 0 ? scratch.needs[need].point : -1;
  here.release = point;
  scratch.released.push_back(number);
}

// Releases every swapped value at its forward death.
inline void release_early(const Problem& problem, Scratch& scratch) {
  clear(scratch.moves);
  for (int64_t value = 0; value < problem.values.count; ++value) {
    if (scratch.decisions[value] == kSwap) release(problem, scratch, value, problem.values[value].early_point);
  }
  apply(scratch.curve, scratch.moves);
}

// Releases the first waiting values that make a tick fit, without those that turn out to be unnecessary; returns the
// bytes by which the tick then exceeds the budget.
inline int64_t release_for(const Problem& problem, Scratch& scratch, int64_t tick, int64_t point, int64_t over_bytes) {
  const auto helps = [&](int64_t number) {
    const Value& value = problem.values[number];
    if (value.death >= tick || value.save_point > point) return false;
    const int64_t need = need_after(scratch.needs, scratch.values[number].first_need, point);
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
  clear(scratch.moves);
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
  apply(scratch.curve, scratch.moves);
}

} // namespace pooch
