// The values that decisions need back, and when (`needs_of`), and the costs of each replay (`ReplayGraph.merged`).
#pragma once

#include <algorithm>

#include "problem.h"

namespace pooch {

inline void add_need(Scratch& scratch, int64_t value, int64_t point) {
  Chosen& here = scratch.values[value];
  const auto need = static_cast<int64_t>(scratch.needs.size());
  scratch.needs.push_back({point, -1, value});
  if (here.first_need < 0) {
    here.first_need = need;
  } else {
    scratch.needs[here.final_need].later = need;
  }
  here.final_need = need;
}

// Fills `targets` with the values that must be replayed for a value, each with the latest mark.
inline void close_targets(const Problem& problem, Scratch& scratch, int64_t value) {
  Ints &marks = scratch.store.value_marks, &targets = scratch.targets;
  const int64_t mark = ++scratch.store.mark;
  targets.assign(1, value);
  marks[value] = mark;
  for (size_t done = 0; done < targets.size(); ++done) {
    for (int64_t source : problem.listed(problem.values[targets[done]].inputs)) {
      if (scratch.decisions[source] != kRecompute || scratch.values[source].replayed_at >= 0) continue;
      if (marks[source] == mark) continue;
      marks[source] = mark;
      targets.push_back(source);
    }
  }
}

// Most bytes that the chosen ops hold: their results, of which targets live to the end, and their workspace.
inline int64_t peak_of(const Problem& problem, Store& store, const Ints& targets) {
  const auto count = static_cast<int64_t>(store.ops.size());
  for (int64_t position = 0; position < count; ++position) {
    store.change[position] = 0;
    for (int64_t value : problem.listed(problem.ops[store.ops[position]].temporaries)) {
      store.profile_marks[value] = store.mark;
      store.last_touch[value] = position;
    }
  }
  store.change[count] = 0;
  for (int64_t target : targets) {
    const int64_t value = problem.values[target].profile_value;
    store.profile_marks[value] = store.mark;
    store.last_touch[value] = count - 1;
  }
  int64_t live = 0, most = 0;
  for (int64_t position = 0; position < count; ++position) {
    const Op& op = problem.ops[store.ops[position]];
    for (int64_t value : problem.listed(op.outputs)) {
      const int64_t last = store.profile_marks[value] == store.mark ? store.last_touch[value] : position;
      store.change[position] += problem.value_bytes[value];
      store.change[std::max(last + 1, position)] -= problem.value_bytes[value];
    }
    live += store.change[position];
    most = std::max(most, live + op.workspace_bytes);
  }
  return most;
}

// Seconds of the chosen ops, those of their launches, and the largest delay of the thread (`replay_of`).
inline void time_ops(const Problem& problem, const Store& store, Merged& merged) {
  const double replay_s = problem.rates->replay_s;
  double launch_s = 0.0, work_s = 0.0, late_s = 0.0;
  int64_t position = 0;
  for (int64_t op : store.ops) {
    const double behind_s = launch_s + replay_s * static_cast<double>(position + 1) - work_s;
    late_s = position == 0 ? behind_s : std::max(late_s, behind_s);
    launch_s += problem.op_s[op].launch_s;
    work_s += problem.op_s[op].duration_s;
    ++position;
  }
  merged.ops_s = work_s;
  merged.launches_s = launch_s + replay_s * static_cast<double>(position);
  merged.late_s = late_s;
}

// The costs of the replay of the marked `targets`.
inline void merge(const Problem& problem, Store& store, const Ints& targets, int64_t key) {
  Ints& pool = store.pool;
  Merged merged{};
  merged.key = key;
  merged.begin = static_cast<int64_t>(pool.size());
  merged.targets = static_cast<int64_t>(targets.size());
  pool.insert(pool.end(), targets.begin(), targets.end());
  store.ops.clear();
  for (int64_t target : targets) {
    for (int64_t op : problem.listed(problem.values[target].ops)) {
      if (store.op_marks[op] == store.mark) continue;
      store.op_marks[op] = store.mark;
      store.ops.push_back(op);
    }
    for (int64_t source : problem.listed(problem.values[target].inputs)) {
      if (store.value_marks[source] == store.mark) continue;
      store.value_marks[source] = store.mark;
      pool.push_back(source);
      ++merged.sources;
    }
  }
  std::sort(store.ops.begin(), store.ops.end());
  std::sort(pool.end() - merged.sources, pool.end());
  merged.ops = static_cast<int64_t>(store.ops.size());
  merged.peak_bytes = pooch::peak_of(problem, store, targets);
  time_ops(problem, store, merged);
  if (problem.facts->is_ahead) pool.insert(pool.end(), store.ops.begin(), store.ops.end());
  store.merged.push_back(merged);
}

// The number of the marked targets in the store, which is added if necessary.
inline int64_t merged_of(const Problem& problem, Store& store, const Ints& targets) {
  int64_t key = 0;
  for (int64_t target : targets) key += problem.values[target].key;
  const size_t mask = store.slots.size() - 1;
  size_t slot = static_cast<size_t>(key ^ (key >> 20)) & mask;
  for (; store.slots[slot] > 0; slot = (slot + 1) & mask) {
    const int64_t number = store.slots[slot] - 1;
    const Merged& found = store.merged[number];
    if (found.key != key || found.targets != static_cast<int64_t>(targets.size())) continue;
    const int64_t* first = store.pool.data() + found.begin;
    const auto is_marked = [&](int64_t target) { return store.value_marks[target] == store.mark; };
    if (std::all_of(first, first + found.targets, is_marked)) return number;
  }
  pooch::merge(problem, store, targets, key);
  store.slots[slot] = static_cast<int64_t>(store.merged.size());
  return store.slots[slot] - 1;
}

// The replay of a value at `point`, and of its inputs that are not back yet.
inline void add_replay(const Problem& problem, Scratch& scratch, int64_t value, int64_t point) {
  close_targets(problem, scratch, value);
  const int64_t number = pooch::merged_of(problem, scratch.store, scratch.targets);
  int64_t target_bytes = 0;
  for (int64_t target : scratch.targets) {
    scratch.values[target].replayed_at = point;
    target_bytes += problem.values[target].size_bytes;
    for (int64_t source : problem.listed(problem.values[target].inputs)) {
      scratch.values[source].claim = problem.points[point].tick;
    }
  }
  for (int64_t source : scratch.store.sources_of(scratch.store.merged[number])) {
    const int64_t use = problem.values[source].first_use;
    if (scratch.decisions[source] == kSwap && (use < 0 || point < use)) add_need(scratch, source, point);
  }
  scratch.runs.push_back({point, number, target_bytes});
}

// The points at which the decisions need each value.
inline void find_needs(const Problem& problem, Scratch& scratch) {
  scratch.store.make_room();
  scratch.needs.clear();
  scratch.runs.clear();
  for (Chosen& here : scratch.values) here.replayed_at = here.claim = here.first_need = here.release = -1;
  for (const Use& use : problem.uses) {
    const int64_t value = problem.points[use.point].first_use_of;
    if (value < 0) continue;
    if (scratch.decisions[value] == kSwap) {
      add_need(scratch, value, use.point);
    } else if (scratch.decisions[value] == kRecompute && scratch.values[value].replayed_at < 0) {
      add_replay(problem, scratch, value, use.point);
    }
  }
  for (int64_t value : problem.listed(problem.facts->never)) {
    if (scratch.decisions[value] != kRecompute || scratch.values[value].replayed_at >= 0) continue;
    const int64_t until = std::max(problem.values[value].freed, scratch.values[value].claim);
    for (int64_t source : problem.listed(problem.values[value].inputs)) {
      scratch.values[source].claim = std::max(scratch.values[source].claim, until);
    }
  }
  for (int64_t value = 0; value < problem.values.count; ++value) {
    scratch.values[value].end = std::max(problem.values[value].freed, scratch.values[value].claim);
  }
}

} // namespace pooch
