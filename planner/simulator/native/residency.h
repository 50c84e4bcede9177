// Where swapped values are given up, so that memory stays within the budget (`_Scheduler`).
#pragma once

#include <algorithm>

#include "scratch.h"

namespace pooch {

// Has bytes live from tick `first` to `last` in what comes and goes at each of `ticks` (`occupancy`).
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

// Bytes live at each tick if no swapped value leaves, inside replays included.
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

// The first of a value's needs at `point` or behind it, from `need` on; -1 when there is none.
inline int64_t need_after(const std::vector<Need>& needs, int64_t need, int64_t point) {
  while (need >= 0 && needs[need].point < point) need = needs[need].later;
  return need;
}

// Last tick at which a value stays away that is needed at `need` next; -1 when it must not leave any more.
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

// Releases every swapped value as soon as forward lets go of it.
inline void release_early(const Problem& problem, Scratch& scratch) {
  clear(scratch.moves);
  for (int64_t value = 0; value < problem.values.count; ++value) {
    if (scratch.decisions[value] == kSwap) release(problem, scratch, value, problem.values[value].early_point);
  }
  apply(scratch.curve, scratch.moves);
}

inline void stop_helping(const Problem& problem, Scratch& scratch, int64_t value) {
  const int64_t place = scratch.values[value].place;
  if (!scratch.helps[place]) return;
  scratch.helps[place] = 0;
  scratch.help_of[place / Scratch::kBlock] -= problem.values[value].size_bytes;
}

// Notes whether a release of the value at `point` would take it away at `tick`.
inline void refresh(const Problem& problem, Scratch& scratch, int64_t number, int64_t tick, int64_t point) {
  const Value& value = problem.values[number];
  Chosen& here = scratch.values[number];
  if (!here.wanted || here.release >= 0) return;
  here.next_need = need_after(scratch.needs, here.next_need, point); // points that ask only ascend
  const int64_t last = absent_until(problem, scratch, number, here.next_need);
  stop_helping(problem, scratch, number);
  if (value.death < tick && value.save_point <= point && tick <= last) {
    scratch.helps[here.place] = 1;
    scratch.help_of[here.place / Scratch::kBlock] += value.size_bytes;
  }
}

// Up to where releases have looked: at values that forward lets go of, at needs, and behind them.
struct Passed {
  int64_t died = 0;
  size_t needed = 0, passed = 0;
};

// Which values a release at `point` would take away at `tick`. It changes only where forward lets go of a value, at a
// point that needs it, behind that point, and where one that backward never uses is gone anyway.
inline void update_help(const Problem& problem, Scratch& scratch, int64_t tick, int64_t point, Passed& up_to) {
  const Rows<const Value>& values = problem.values;
  const std::vector<Need>& needs = scratch.needs;
  for (; up_to.died < values.count; ++up_to.died) {
    const int64_t value = values[up_to.died].by_rank;
    if (values[value].frees_tick > tick) break;
    refresh(problem, scratch, value, tick, point);
  }
  for (; up_to.needed < needs.size() && needs[up_to.needed].point <= point; ++up_to.needed) {
    refresh(problem, scratch, needs[up_to.needed].value, tick, point);
  }
  for (; up_to.passed < needs.size() && needs[up_to.passed].point < point; ++up_to.passed) {
    refresh(problem, scratch, needs[up_to.passed].value, tick, point);
  }
  for (int64_t value : problem.listed(problem.facts->unused)) refresh(problem, scratch, value, tick, point);
}

// Fills `tried` with what is released from the front of the queue until a tick fits; returns their bytes.
//
// Then goes back over them, but for the last, and lets stay what turns out not to be needed: what is behind in the
// queue is waited for the longest. A block of the queue is passed at once where all of it does, or stays.
inline int64_t find_help(const Problem& problem, Scratch& scratch, int64_t over_bytes) {
  const Ints &helps = scratch.helps, &help_of = scratch.help_of;
  const auto waiting = static_cast<int64_t>(scratch.queue.size());
  int64_t helped = 0, place = 0;
  scratch.tried.clear();
  while (place < waiting && helped + help_of[place / Scratch::kBlock] < over_bytes) {
    helped += help_of[place / Scratch::kBlock];
    place += Scratch::kBlock;
  }
  if (place >= waiting) {
    for (int64_t all = 0; all < waiting; ++all) {
      if (helps[all]) scratch.tried.push_back(scratch.queue[all].value);
    }
    return helped;
  }
  for (; helped < over_bytes; ++place) {
    if (helps[place]) helped += problem.values[scratch.queue[place].value].size_bytes;
  }
  int64_t spare = helped - over_bytes;
  --place;
  scratch.tried.push_back(scratch.queue[place].value);
  --place;
  while (place >= 0) {
    if (place % Scratch::kBlock == Scratch::kBlock - 1 && help_of[place / Scratch::kBlock] <= spare) {
      spare -= help_of[place / Scratch::kBlock];
      place -= Scratch::kBlock;
      continue;
    }
    if (helps[place]) {
      const int64_t value = scratch.queue[place].value, size_bytes = problem.values[value].size_bytes;
      if (size_bytes <= spare) {
        spare -= size_bytes;
      } else {
        scratch.tried.push_back(value);
      }
    }
    --place;
  }
  std::reverse(scratch.tried.begin(), scratch.tried.end());
  return over_bytes + spare;
}

inline void start_helping(Scratch& scratch) {
  clear(scratch.helps);
  clear(scratch.help_of);
  int64_t place = 0;
  for (const Queued& queued : scratch.queue) {
    Chosen& here = scratch.values[queued.value];
    here.place = place++;
    here.next_need = here.first_need;
  }
}

// Releases of what is in the queue, where memory asks for it.
inline void release_late(const Problem& problem, Scratch& scratch, int64_t budget_bytes) {
  start_helping(scratch);
  clear(scratch.moves);
  int64_t moved = 0, point = -1;
  Passed up_to;
  for (int64_t tick = 0; tick < problem.ticks.count; ++tick) {
    moved += scratch.moves[tick];
    const int64_t over_bytes = scratch.curve[tick] + moved - budget_bytes;
    if (over_bytes <= 0) continue;
    while (point + 1 < problem.points.count && problem.points[point + 1].tick <= tick) ++point;
    update_help(problem, scratch, tick, point, up_to);
    const int64_t helped = find_help(problem, scratch, over_bytes);
    for (int64_t value : scratch.tried) {
      stop_helping(problem, scratch, value);
      release(problem, scratch, value, point);
    }
    moved -= helped;
    if (over_bytes > helped) {
      // These decisions do not fit: release the rest early, so that what is missing is exact.
      for (const Queued& queued : scratch.queue) {
        if (scratch.values[queued.value].release >= 0) continue;
        release(problem, scratch, queued.value, problem.values[queued.value].early_point);
      }
      break;
    }
  }
  apply(scratch.curve, scratch.moves);
}

} // namespace pooch
