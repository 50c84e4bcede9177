// Walks through the decisions, as `annealing.py` says, with the same names and in the same order.
#pragma once

#include <cmath>

#include "evaluate.h"

namespace pooch {

constexpr double kOverBudget = 0.02, kOverBudgetSlope = 5.0;
constexpr int64_t kStyles = 3, kDraws = 48, kLongestRun = 24, kLongestWindow = 6;
constexpr double kLongestStretch = 0.25;

struct Limits {
  int64_t budget_bytes, host_bytes;
};

struct SearchSpace {
  Rows<const int64_t> values;
  Rows<const double> weights;
  Rows<const int64_t> by_size, place;
  Rows<const bool> replayable;
  Rows<const int64_t> role, role_first, role_values;

  bool may(int64_t value, int8_t decision) const { return decision != kRecompute || replayable[value]; }
};

struct ChainState {
  Rows<int8_t> here, best, trial, mate;
  Rows<double> scores;
  Rows<int64_t> styles;
};

inline void copy(const Rows<int8_t>& from, const Rows<int8_t>& to) { std::copy(from.begin(), from.end(), to.begin()); }

inline int64_t times(double draw, int64_t count) { return static_cast<int64_t>(draw * static_cast<double>(count)); }

inline double score(Evaluator& evaluator, const Limits& limits, int64_t style, const int8_t* decisions) {
  const Problem& problem = evaluator.problem;
  const Evaluation found = evaluator.evaluate(decisions, limits.budget_bytes, style);
  const auto over = [](int64_t over_bytes, int64_t of_bytes) {
    const auto whole = static_cast<double>(std::max(int64_t{1}, of_bytes));
    return kOverBudget + kOverBudgetSlope * static_cast<double>(over_bytes) / whole;
  };
  double share = problem.rates->step_s > 0.0 ? found.step_s / problem.rates->step_s : 1.0;
  if (found.peak_bytes > limits.budget_bytes) {
    share += over(found.peak_bytes - limits.budget_bytes, limits.budget_bytes);
  }
  if (limits.host_bytes >= 0) {
    int64_t over_bytes = -limits.host_bytes;
    for (int64_t value = 0; value < problem.values.count; ++value) {
      if (evaluator.scratch.decisions[value] == kSwap) over_bytes += problem.values[value].moved_bytes;
    }
    if (over_bytes > 0) share += over(over_bytes, limits.host_bytes);
  }
  return share;
}

// One of the values, by its weight.
inline int64_t drawn(const SearchSpace& space, double draw) {
  int64_t low = 0, high = space.values.count - 1;
  const double wanted = draw * space.weights[high];
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (space.weights[middle] > wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return space.values[low];
}

// Any decision that is possible for the value.
inline int8_t decision_for(const SearchSpace& space, int64_t value, double draw) {
  if (space.replayable[value]) return static_cast<int8_t>(times(draw, 3));
  return draw < 0.5 ? kKeep : kSwap;
}

inline void exchange(const SearchSpace& space, const Rows<int8_t>& trial, const double* draws) {
  const int64_t count = space.values.count, one = drawn(space, draws[0]);
  int64_t away = 1 + times(draws[1], 3);
  if (draws[2] < 0.5) away = -away;
  const int64_t other = space.by_size[((space.place[one] + away) % count + count) % count];
  if (space.may(other, trial[one]) && space.may(one, trial[other])) std::swap(trial[one], trial[other]);
}

inline void change_few(const SearchSpace& space, const Rows<int8_t>& trial, const double* draws) {
  const int count = draws[0] > 0.86 ? 3 : draws[0] > 0.57 ? 2 : 1;
  for (int which = 0; which < count; ++which) {
    const int64_t value = drawn(space, draws[1 + 2 * which]);
    trial[value] = decision_for(space, value, draws[2 + 2 * which]);
  }
}

inline void change_role(const SearchSpace& space, const Rows<int8_t>& trial, const double* draws) {
  const int64_t role = space.role[drawn(space, draws[0])];
  const int64_t low = space.role_first[role], high = space.role_first[role + 1];
  const int64_t longest = std::max(kLongestRun, times(kLongestStretch, high - low));
  const int64_t count = 1 + times(draws[1], std::min(high - low, longest));
  const int64_t begin = low + times(draws[2], high - low);
  const auto decision = static_cast<int8_t>(times(draws[3], 3));
  for (int64_t at = begin; at < std::min(high, begin + count); ++at) {
    const int64_t value = space.role_values[at];
    if (space.may(value, decision)) trial[value] = decision;
  }
}

inline void copy_layer(const SearchSpace& space, const Rows<int8_t>& trial, const double* draws) {
  const int64_t role = space.role[drawn(space, draws[0])];
  const int64_t layers = space.role_first[role + 1] - space.role_first[role];
  if (layers < 2) return;
  const int64_t source = times(draws[1], layers);
  const double seldom = draws[4] * draws[4];
  const int64_t count = 1 + static_cast<int64_t>(seldom * seldom * static_cast<double>(layers) / 4);
  int64_t target = source + 1;
  if (draws[2] < 0.4) {
    target = source - count;
  } else if (draws[2] > 0.8) {
    target = times(draws[3], layers);
  }
  const int64_t begin = std::max(int64_t{0}, target), end = std::min(layers, target + count);
  for (int64_t other = 0; other < space.role_first.count - 1; ++other) {
    const int64_t low = space.role_first[other], high = space.role_first[other + 1];
    const int64_t each = (high - low) / layers;
    if (each * layers != high - low) continue;
    for (int64_t at = begin * each; at < end * each; ++at) {
      const int8_t decision = trial[space.role_values[low + source * each + at % each]];
      const int64_t value = space.role_values[low + at];
      if (space.may(value, decision)) trial[value] = decision;
    }
  }
}

inline void change_window(const SearchSpace& space, const Rows<int8_t>& trial, const double* draws) {
  const int64_t count = space.values.count, begin = times(draws[0], count);
  const int64_t length = 2 + times(draws[1], kLongestWindow - 1);
  for (int64_t at = begin; at < std::min(count, begin + length); ++at) {
    const double* which = draws + 2 + 2 * (at - begin);
    const int64_t value = space.values[at];
    if (which[0] < 0.6) trial[value] = decision_for(space, value, which[1]);
  }
}

inline void take_over(const SearchSpace& space, const Rows<int8_t>& trial, const Rows<int8_t>& mate, const double* draws) {
  const int64_t count = space.values.count, begin = times(draws[0], count);
  const auto length = 1 + static_cast<int64_t>(draws[1] * kLongestStretch * static_cast<double>(count));
  for (int64_t at = begin; at < std::min(count, begin + length); ++at) {
    trial[space.values[at]] = mate[space.values[at]];
  }
}

// Changes `trial` in one of the ways there are; returns the style to try it in.
inline int64_t change(const SearchSpace& space, const ChainState& state, const double* draws) {
  const double kind = draws[0];
  if (kind < 0.25) {
    exchange(space, state.trial, draws + 1);
  } else if (kind < 0.60) {
    change_few(space, state.trial, draws + 1);
  } else if (kind < 0.75) {
    change_role(space, state.trial, draws + 1);
  } else if (kind < 0.83) {
    change_window(space, state.trial, draws + 1);
  } else if (kind < 0.95) {
    copy_layer(space, state.trial, draws + 1);
  } else if (kind < 0.98) {
    take_over(space, state.trial, state.mate, draws + 1);
  } else {
    return times(draws[1], kStyles);
  }
  return state.styles[0];
}

inline int64_t walk_on(Evaluator& evaluator, const SearchSpace& space, const ChainState& state, const Limits& limits,
                       int64_t steps, double temperature, const double* draws) {
  int64_t spent = 0;
  for (int64_t step = 0; step < steps; ++step, draws += kDraws) {
    copy(state.here, state.trial);
    const int64_t style = change(space, state, draws);
    const bool is_same = std::equal(state.trial.begin(), state.trial.end(), state.here.begin());
    if (style == state.styles[0] && is_same) continue;
    const double found = score(evaluator, limits, style, state.trial.first);
    ++spent;
    const double loss = found - state.scores[0];
    if (!(loss <= 0.0 || draws[kDraws - 1] < std::exp(-loss / temperature))) continue;
    copy(state.trial, state.here);
    state.scores[0] = found;
    state.styles[0] = style;
    if (found >= state.scores[1]) continue;
    copy(state.trial, state.best);
    state.scores[1] = found;
    state.styles[1] = style;
  }
  return spent;
}

// -- descent ----------------------------------------------------------------------------------------------------------

constexpr double kMinGain = 1e-6, kFarOff = 0.01;
constexpr int64_t kSearchStyles = 2;

inline int64_t sweep(Evaluator& evaluator, const Rows<const bool>& replayable, const ChainState& state,
                     const Limits& limits, const Rows<const int64_t>& values) {
  int64_t spent = 0;
  for (int64_t value : values) {
    for (int8_t decision : {kKeep, kSwap, kRecompute}) {
      if (decision == state.here[value] || (decision == kRecompute && !replayable[value])) continue;
      const int8_t before = state.here[value];
      state.here[value] = decision;
      bool is_better = false;
      for (int64_t style = 0; style < kSearchStyles; ++style) {
        const double found = score(evaluator, limits, style, state.here.first);
        ++spent;
        if (found < state.scores[0] - kMinGain) {
          state.scores[0] = state.scores[1] = found;
          state.styles[0] = state.styles[1] = style;
          is_better = true;
        }
        if (found > state.scores[0] + kFarOff) break;
      }
      if (is_better) {
        state.best[value] = decision;
      } else {
        state.here[value] = before;
      }
    }
  }
  return spent;
}

} // namespace pooch
