// Seconds: one compute stream, two copy queues and the launching thread (`Streams`, `Thread`).
#pragma once

#include <algorithm>
#include <limits>

#include "problem.h"

namespace pooch {

// -- the beginning of a step ------------------------------------------------------------------------------------------

constexpr int64_t kMergeGapOps = 4; // MERGE_GAP_OPS

// Marks (-1) the ops between two save points, or between the step's beginning and recording's end.
inline void switch_on(const Problem& problem, Ints& recorded, int64_t begin, int64_t end) {
  const auto op_of = [&](int64_t save) { return problem.points[problem.values[save].save_point].op; };
  const int64_t last = end < problem.values.count ? op_of(end) : problem.facts->last_save_op;
  for (int64_t op = begin >= 0 ? op_of(begin) : 0; op < last; ++op) recorded[op] = -1;
}

// Ops recorded before each op, and in all (`recording_of`, `recorded_before`).
inline void record(const Problem& problem, const std::vector<int8_t>& decisions, Ints& recorded) {
  const auto op_of = [&](int64_t save) { return problem.points[problem.values[save].save_point].op; };
  pooch::clear(recorded);
  for (int64_t value = 0; value < problem.values.count; ++value) {
    if (decisions[value] != kRecompute) continue;
    for (int64_t op : problem.listed(problem.values[value].recorded)) recorded[op] = 1;
  }
  int64_t begin = -2, end = -1; // no window yet
  for (int64_t op = 0; op < problem.ops.count; ++op) {
    if (recorded[op] <= 0) continue;
    recorded[op] = 0;
    const int64_t on = problem.ops[op].on;
    if (begin == -2) {
      begin = on;
    } else if (on >= 0 && end < problem.values.count && op_of(on) - op_of(end) >= kMergeGapOps) {
      pooch::switch_on(problem, recorded, begin, end);
      begin = on;
    }
    end = problem.ops[op].off;
  }
  if (begin > -2) pooch::switch_on(problem, recorded, begin, end);
  int64_t done = 0;
  for (int64_t& here : recorded) {
    const bool is_recorded = here < 0;
    here = done;
    done += is_recorded;
  }
}

// Sets the clock to the beginning of a step in which the thread records for the decisions' replays.
inline void start_clock(const Problem& problem, const std::vector<int8_t>& decisions, Clock& clock) {
  const double record_s = problem.rates->record_s;
  const auto recorded_s = [&](int64_t op) { return record_s * static_cast<double>(clock.recorded[op]); };
  clock.now_s = clock.stall_s = clock.interference_s = clock.runtime_s = clock.taken_s = clock.done_s = 0.0;
  clock.thread_op = 0;
  for (Copying& copying : clock.copying) {
    copying.now = -1;
    copying.left_s = 0.0;
    copying.head = 0;
    copying.values.clear();
  }
  for (Moved& moved : clock.values) moved = {{false, false}, false, -1, -1};
  if (record_s > 0.0) pooch::record(problem, decisions, clock.recorded);
  for (int64_t op = 0; op < problem.op_s.count; ++op) {
    clock.ops[op].computed_s = problem.op_s[op].work_s;
    if (!problem.facts->is_ahead) clock.ops[op].computed_s += recorded_s(op);
  }
  if (!problem.facts->is_ahead) return;
  for (int64_t op = 0; op < problem.op_s.count - 1; ++op) {
    const auto more = static_cast<double>(clock.recorded[op + 1] - clock.recorded[op]);
    const double launched_s = problem.op_s[op].before_s + recorded_s(op) + record_s * more;
    clock.ops[op].behind_s = launched_s - problem.op_s[op].work_s;
  }
}

// -- streams ----------------------------------------------------------------------------------------------------------

inline void start_next(const Problem& problem, Clock& clock, int queue) {
  Copying& copying = clock.copying[queue];
  copying.now = -1;
  if (copying.head == copying.values.size()) return;
  copying.now = copying.values[copying.head++];
  copying.left_s = problem.copy_s[copying.now].of[queue];
}

inline void queue_copy(const Problem& problem, Clock& clock, int64_t value, int queue) {
  clock.copying[queue].values.push_back(value);
  if (clock.copying[queue].now < 0) start_next(problem, clock, queue);
}

// Moves the clock by `limit_s`, or to the next end of a copy if earlier; returns the seconds moved.
inline double advance(const Problem& problem, Clock& clock, double limit_s) {
  const bool is_running[2] = {clock.copying[kOut].now >= 0, clock.copying[kIn].now >= 0};
  const double share = is_running[kOut] && is_running[kIn] ? problem.rates->duplex : 1.0;
  double wall_s = limit_s;
  for (int queue : {kOut, kIn}) {
    if (is_running[queue]) wall_s = std::min(wall_s, clock.copying[queue].left_s / share);
  }
  clock.now_s += wall_s;
  for (int queue : {kOut, kIn}) {
    Copying& copying = clock.copying[queue];
    if (!is_running[queue]) continue;
    if (copying.left_s / share <= wall_s) {
      clock.values[copying.now].is_done[queue] = true;
      start_next(problem, clock, queue);
    } else {
      copying.left_s -= wall_s * share;
    }
  }
  return wall_s;
}

// The compute stream waits for a copy.
inline void wait_for(const Problem& problem, Clock& clock, int64_t value, int queue) {
  while (!clock.values[value].is_done[queue]) {
    clock.stall_s += advance(problem, clock, std::numeric_limits<double>::infinity());
  }
}

// Runs seconds of ops, slowed by the copies beside them.
inline void compute(const Problem& problem, Clock& clock, double work_s) {
  while (work_s > 0.0) {
    double slow = 1.0;
    for (int queue : {kOut, kIn}) {
      if (clock.copying[queue].now >= 0) slow += problem.rates->interference[queue];
    }
    const double wall_s = advance(problem, clock, work_s * slow);
    const double done_s = std::min(work_s, wall_s / slow);
    clock.interference_s += wall_s - done_s;
    work_s = wall_s >= work_s * slow ? 0.0 : work_s - done_s;
  }
}

inline void spend(const Problem& problem, Clock& clock, double work_s) {
  compute(problem, clock, work_s);
  clock.runtime_s += work_s;
}

inline void pass(const Problem& problem, Clock& clock, double left_s) {
  while (left_s > 0.0) left_s -= advance(problem, clock, left_s);
}

inline void wait_until(const Problem& problem, Clock& clock, double wall_s) {
  if (wall_s <= clock.now_s) return;
  const double idle_s = wall_s - clock.now_s;
  clock.runtime_s += idle_s;
  pass(problem, clock, idle_s);
}

inline bool is_undisturbed(const Problem& problem, const Clock& clock) {
  const double* interference = problem.rates->interference;
  const bool is_copying = clock.copying[kOut].now >= 0 || clock.copying[kIn].now >= 0;
  return (interference[kOut] <= 0.0 && interference[kIn] <= 0.0) || !is_copying;
}

// -- the launching thread ---------------------------------------------------------------------------------------------

inline double thread_s(const Problem& problem, const Clock& clock) {
  const double recorded_s = problem.rates->record_s * static_cast<double>(clock.recorded[clock.thread_op]);
  return problem.op_s[clock.thread_op].before_s + recorded_s + clock.taken_s;
}

inline double most_behind(const Clock& clock, int64_t begin, int64_t end) {
  double most_s = clock.ops[begin].behind_s;
  for (int64_t op = begin + 1; op < end; ++op) most_s = std::max(most_s, clock.ops[op].behind_s);
  return most_s;
}

// Ops of a thread ahead of the device: all together if none waits for its launch, else one by one.
inline void run_on(const Problem& problem, Clock& clock, int64_t begin, int64_t end) {
  const Rows<const OpSeconds>& op_s = problem.op_s;
  double late_s = clock.taken_s + most_behind(clock, begin, end) + op_s[begin].work_s;
  if (late_s <= clock.now_s) {
    compute(problem, clock, op_s[end].work_s - op_s[begin].work_s);
    return;
  }
  for (int64_t op = begin; op < end; ++op) {
    if (is_undisturbed(problem, clock)) {
      late_s = clock.taken_s + most_behind(clock, op, end) + op_s[op].work_s;
      const double idle_s = std::max(0.0, late_s - clock.now_s);
      clock.runtime_s += idle_s;
      pass(problem, clock, op_s[end].work_s - op_s[op].work_s + idle_s);
      return;
    }
    wait_until(problem, clock, clock.taken_s + (clock.ops[op].behind_s + op_s[op].work_s));
    compute(problem, clock, op_s[op].duration_s);
  }
}

// Runs all work before op `op` and before the point in front of it.
inline void reach(const Problem& problem, Clock& clock, int64_t op) {
  if (!problem.facts->is_ahead) {
    const double work_s = clock.ops[op].computed_s;
    if (work_s <= clock.done_s) return;
    compute(problem, clock, work_s - clock.done_s);
    clock.done_s = work_s;
    return;
  }
  if (op > clock.thread_op) {
    run_on(problem, clock, clock.thread_op, op);
    clock.thread_op = op;
  }
  wait_until(problem, clock, thread_s(problem, clock));
}

// Runs the rest of the step; returns the seconds of recording.
inline double finish(const Problem& problem, Clock& clock) {
  const int64_t op = problem.op_s.count - 1;
  if (problem.facts->is_ahead) {
    reach(problem, clock, op);
    return 0.0;
  }
  compute(problem, clock, clock.ops[op].computed_s - clock.done_s);
  return problem.rates->record_s * static_cast<double>(clock.recorded[op]);
}

// Runs the runtime's own work at a point.
inline void take(const Problem& problem, Clock& clock, double taken_s) {
  if (!problem.facts->is_ahead) return spend(problem, clock, taken_s);
  clock.taken_s += taken_s;
  wait_until(problem, clock, thread_s(problem, clock));
}

inline void replay_ahead(const Problem& problem, Clock& clock, const Store& store, const Merged& merged) {
  double start_s = thread_s(problem, clock);
  const double idle_s = start_s + merged.late_s - clock.now_s;
  if (idle_s <= 0.0) {
    compute(problem, clock, merged.ops_s);
  } else if (is_undisturbed(problem, clock)) {
    clock.runtime_s += idle_s;
    pass(problem, clock, merged.ops_s + idle_s);
  } else {
    for (int64_t op : store.ops_of(merged)) {
      start_s += problem.rates->replay_s;
      wait_until(problem, clock, start_s);
      compute(problem, clock, problem.op_s[op].duration_s);
      start_s += problem.op_s[op].launch_s;
    }
  }
}

// Runs the ops of a merged replay.
inline void run_replay(const Problem& problem, Clock& clock, const Store& store, const Merged& merged) {
  if (problem.facts->is_ahead) {
    replay_ahead(problem, clock, store, merged);
    clock.taken_s += merged.launches_s;
  } else {
    compute(problem, clock, merged.ops_s);
    spend(problem, clock, problem.rates->replay_s * static_cast<double>(merged.ops));
  }
}

} // namespace pooch
