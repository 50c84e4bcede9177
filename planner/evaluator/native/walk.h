// Walks through the decisions, as `walk.py` and `descent.py` say, with the same names and in the same order.
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

struct Ground {
  Rows<const int64_t> values;
  Rows<const double> weights;
  Rows<const int64_t> by_size, place;
  Rows<const bool> replayable;
  Rows<const int64_t> role, role_first, role_values;

  bool may(int64_t value, int8_t decision) const { return decision != kRecompute || replayable[value]; }
};

struct Trail {
  Rows<int8_t> here, best, trial, mate;
  Rows<double> scores;
  Rows<int64_t> styles;
};

inline void copy(const Rows<int8_t>& from, const Rows<int8_t>& to) { std::copy(from.begin(), from.end(), to.begin()); }

inline int64_t times(double draw, int64_t count) { return static_cast<int64_t>(draw * static_cast<double>(count)); }

inline double score(Evaluator& evaluator, const Limits& limits, int64_t style, const int8_t* decisions) {
  const Layout& layout = evaluator.layout;
  const Evaluation found = evaluator.evaluate(decisions, limits.budget_bytes, style);
  const auto over = [](int64_t over_bytes, int64_t of_bytes) {
    const auto whole = static_cast<double>(std::max(int64_t{1}, of_bytes));
    return kOverBudget + kOverBudgetSlope * static_cast<double>(over_bytes) / whole;
  };
  double share = layout.rates->step_s > 0.0 ? found.step_s / layout.rates->step_s : 1.0;
  if (found.peak_bytes > limits.budget_bytes) {
    share += over(found.peak_bytes - limits.budget_bytes, limits.budget_bytes);
  }
  if (limits.host_bytes >= 0) {
    int64_t over_bytes = -limits.host_bytes;
    for (int64_t value = 0; value < layout.values.count; ++value) {
      if (evaluator.scratch.decisions[value] == kSwap) over_bytes += layout.values[value].moved_bytes;
    }
    if (over_bytes > 0) share += over(over_bytes, limits.host_bytes);
  }
  return share;
}

// One of the values, by its weight.
inline int64_t drawn(const Ground& ground, double draw) {
  int64_t low = 0, high = ground.values.count - 1;
  const double wanted = draw * ground.weights[high];
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ground.weights[middle] > wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return ground.values[low];
}

// Any decision that is possible for the value.
inline int8_t decision_for(const Ground& ground, int64_t value, double draw) {
  if (ground.replayable[value]) return static_cast<int8_t>(times(draw, 3));
  return draw < 0.5 ? kKeep : kSwap;
}

inline void exchange(const Ground& ground, const Rows<int8_t>& trial, const double* draws) {
  const int64_t count = ground.values.count, one = drawn(ground, draws[0]);
  int64_t away = 1 + times(draws[1], 3);
  if (draws[2] < 0.5) away = -away;
  const int64_t other = ground.by_size[((ground.place[one] + away) % count + count) % count];
  if (ground.may(other, trial[one]) && ground.may(one, trial[other])) std::swap(trial[one], trial[other]);
}

inline void change_few(const Ground& ground, const Rows<int8_t>& trial, const double* draws) {
  const int count = draws[0] > 0.86 ? 3 : draws[0] > 0.57 ? 2 : 1;
  for (int which = 0; which < count; ++which) {
    const int64_t value = drawn(ground, draws[1 + 2 * which]);
    trial[value] = decision_for(ground, value, draws[2 + 2 * which]);
  }
}

inline void change_role(const Ground& ground, const Rows<int8_t>& trial, const double* draws) {
  const int64_t role = ground.role[drawn(ground, draws[0])];
  const int64_t low = ground.role_first[role], high = ground.role_first[role + 1];
  const int64_t longest = std::max(kLongestRun, times(kLongestStretch, high - low));
  const int64_t count = 1 + times(draws[1], std::min(high - low, longest));
  const int64_t begin = low + times(draws[2], high - low);
  const auto decision = static_cast<int8_t>(times(draws[3], 3));
  for (int64_t at = begin; at < std::min(high, begin + count); ++at) {
    const int64_t value = ground.role_values[at];
    if (ground.may(value, decision)) trial[value] = decision;
  }
}

inline void copy_layer(const Ground& ground, const Rows<int8_t>& trial, const double* draws) {
  const int64_t role = ground.role[drawn(ground, draws[0])];
  const int64_t layers = ground.role_first[role + 1] - ground.role_first[role];
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
  for (int64_t other = 0; other < ground.role_first.count - 1; ++other) {
    const int64_t low = ground.role_first[other], high = ground.role_first[other + 1];
    const int64_t each = (high - low) / layers;
    if (each * layers != high - low) continue;
    for (int64_t at = begin * each; at < end * each; ++at) {
      const int8_t decision = trial[ground.role_values[low + source * each + at % each]];
      const int64_t value = ground.role_values[low + at];
      if (ground.may(value, decision)) trial[value] = decision;
    }
  }
}

inline void change_window(const Ground& ground, const Rows<int8_t>& trial, const double* draws) {
  const int64_t count = ground.values.count, begin = times(draws[0], count);
  const int64_t length = 2 + times(draws[1], kLongestWindow - 1);
  for (int64_t at = begin; at < std::min(count, begin + length); ++at) {
    const double* which = draws + 2 + 2 * (at - begin);
    const int64_t value = ground.values[at];
    if (which[0] < 0.6) trial[value] = decision_for(ground, value, which[1]);
  }
}

inline void take_over(const Ground& ground, const Rows<int8_t>& trial, const Rows<int8_t>& mate, const double* draws) {
  const int64_t count = ground.values.count, begin = times(draws[0], count);
  const auto length = 1 + static_cast<int64_t>(draws[1] * kLongestStretch * static_cast<double>(count));
  for (int64_t at = begin; at < std::min(count, begin + length); ++at) {
    trial[ground.values[at]] = mate[ground.values[at]];
  }
}

// Changes `trial` in one of the ways there are; returns the style to try it in.
inline int64_t change(const Ground& ground, const Trail& trail, const double* draws) {
  const double kind = draws[0];
  if (kind < 0.25) {
    exchange(ground, trail.trial, draws + 1);
  } else if (kind < 0.60) {
    change_few(ground, trail.trial, draws + 1);
  } else if (kind < 0.75) {
    change_role(ground, trail.trial, draws + 1);
  } else if (kind < 0.83) {
    change_window(ground, trail.trial, draws + 1);
  } else if (kind < 0.95) {
    copy_layer(ground, trail.trial, draws + 1);
  } else if (kind < 0.98) {
    take_over(ground, trail.trial, trail.mate, draws + 1);
  } else {
    return times(draws[1], kStyles);
  }
  return trail.styles[0];
}

inline int64_t walk_on(Evaluator& evaluator, const Ground& ground, const Trail& trail, const Limits& limits,
                       int64_t steps, double temperature, const double* draws) {
  int64_t spent = 0;
  for (int64_t step = 0; step < steps; ++step, draws += kDraws) {
    copy(trail.here, trail.trial);
    const int64_t style = change(ground, trail, draws);
    const bool is_same = std::equal(trail.trial.begin(), trail.trial.end(), trail.here.begin());
    if (style == trail.styles[0] && is_same) continue;
    const double found = score(evaluator, limits, style, trail.trial.first);
    ++spent;
    const double loss = found - trail.scores[0];
    if (!(loss <= 0.0 || draws[kDraws - 1] < std::exp(-loss / temperature))) continue;
    copy(trail.trial, trail.here);
    trail.scores[0] = found;
    trail.styles[0] = style;
    if (found >= trail.scores[1]) continue;
    copy(trail.trial, trail.best);
    trail.scores[1] = found;
    trail.styles[1] = style;
  }
  return spent;
}

// -- descent ----------------------------------------------------------------------------------------------------------

constexpr double kMinGain = 1e-6, kFarOff = 0.01;
constexpr int64_t kSearchStyles = 2;

inline int64_t sweep(Evaluator& evaluator, const Rows<const bool>& replayable, const Trail& trail,
                     const Limits& limits, const Rows<const int64_t>& values) {
  int64_t spent = 0;
  for (int64_t value : values) {
    for (int8_t decision : {kKeep, kSwap, kRecompute}) {
      if (decision == trail.here[value] || (decision == kRecompute && !replayable[value])) continue;
      const int8_t before = trail.here[value];
      trail.here[value] = decision;
      bool is_better = false;
      for (int64_t style = 0; style < kSearchStyles; ++style) {
        const double found = score(evaluator, limits, style, trail.here.first);
        ++spent;
        if (found < trail.scores[0] - kMinGain) {
          trail.scores[0] = trail.scores[1] = found;
          trail.styles[0] = trail.styles[1] = style;
          is_better = true;
        }
        if (found > trail.scores[0] + kFarOff) break;
      }
      if (is_better) {
        trail.best[value] = decision;
      } else {
        trail.here[value] = before;
      }
    }
  }
  return spent;
}

} // namespace pooch
