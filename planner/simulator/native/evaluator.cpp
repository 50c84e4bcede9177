// Evaluates decisions: seconds of the step, peak bytes and bytes moved, equal to those of `try_style`, to the bit.
// Python calls it (`evaluator.py`). Arrays belong to Python; those of a problem outlive its evaluator.
#include <new>

#include "elapsed.h"
#include "needs.h"
#include "packing.h"
#include "schedule.h"

namespace pooch {

struct Evaluation {
  double step_s;
  int64_t peak_bytes, moved_bytes;
  double replay_s;
};

// Evaluations of one problem, for one thread at a time.
class Evaluator {
 public:
  Evaluator(const Problem& given, int64_t pooled) : problem(given), scratch(given, pooled) {}

  // Evaluates decisions, scheduled in a style within a budget. Afterwards `scratch.decisions` are the resulting ones,
  // and `scratch.moves` the bytes at each tick.
  Evaluation evaluate(const int8_t* decisions, int64_t budget_bytes, int64_t style) {
    std::copy_n(decisions, problem.values.count, scratch.decisions.begin());
    find_needs(problem, scratch);
    lay_curve(problem, scratch);
    schedule(budget_bytes, style);
    pooch::start_clock(problem, scratch.decisions, scratch.clock);
    Evaluation found = walk();
    found.peak_bytes = peak_bytes();
    return found;
  }

  const Problem problem;
  Scratch scratch;

 private:
  // Chooses the points of releases and copies.
  void schedule(int64_t budget_bytes, int64_t style) {
    scratch.released.clear();
    if (style == kEarly || style == kOnDemand) {
      release_early(problem, scratch);
    } else {
      for (int64_t value = 0; value < problem.values.count; ++value) {
        scratch.values[value].wanted = scratch.decisions[value] == kSwap && !is_idle(problem, scratch, value);
      }
      queue_out(problem, scratch, false);
      release_late(problem, scratch, budget_bytes);
    }
    for (int64_t value = 0; value < problem.values.count; ++value) {
      scratch.values[value].wanted = scratch.values[value].release >= 0;
      if (scratch.decisions[value] == kSwap && !scratch.values[value].wanted) scratch.decisions[value] = kKeep;
    }
    prefetch(problem, scratch, budget_bytes, style);
    const int64_t points = problem.points.count;
    pooch::sort_by(scratch.values, &Chosen::prefetch, scratch.fetched, points, scratch.prefetch_start,
                   scratch.by_prefetch);
    pooch::sort_by(scratch.values, &Chosen::release, scratch.released, points, scratch.release_start,
                   scratch.by_release);
    queue_out(problem, scratch, true);
  }

  // Goes through the points once, like the runtime.
  Evaluation walk() {
    Clock& clock = scratch.clock;
    Evaluation found{};
    size_t out = 0, run = 0;
    for (int64_t point = 0; point < problem.points.count; ++point) {
      const Point& here = problem.points[point];
      if (is_dropped(here)) {
        reach(problem, clock, here.op);
        take(problem, clock, problem.rates->drop_s);
      }
      for (; out < scratch.queue.size() && scratch.queue[out].point == point; ++out) {
        reach(problem, clock, here.op);
        take(problem, clock, problem.rates->out_s);
        queue_copy(problem, clock, scratch.queue[out].value, kOut);
        found.moved_bytes += problem.values[scratch.queue[out].value].moved_bytes;
      }
      for (int64_t k = scratch.release_start[point]; k < scratch.release_start[point + 1]; ++k) {
        reach(problem, clock, here.op);
        wait_for(problem, clock, scratch.by_release[k], kOut);
        clock.values[scratch.by_release[k]].release_tick = here.tick;
      }
      for (int64_t k = scratch.prefetch_start[point]; k < scratch.prefetch_start[point + 1]; ++k) {
        found.moved_bytes += fetch(here, scratch.by_prefetch[k]);
      }
      if (run < scratch.runs.size() && scratch.runs[run].point == point) {
        const Merged& merged = scratch.store.merged[scratch.runs[run].merged];
        found.moved_bytes += replay(here, merged);
        found.replay_s += merged.ops_s;
        ++run;
      }
      if (here.first_use_of >= 0 && scratch.decisions[here.first_use_of] == kSwap) {
        found.moved_bytes += fetch(here, here.first_use_of);
        wait_in(here, here.first_use_of);
      }
    }
    const double recording_s = finish(problem, clock), added_s = clock.runtime_s + recording_s;
    found.step_s = problem.rates->step_s + found.replay_s + clock.stall_s + clock.interference_s + added_s;
    return found;
  }

  // Whether a value is given up there for a replay, and that takes time.
  bool is_dropped(const Point& here) const {
    const bool is_save = here.use < 0;
    return is_save && problem.rates->drop_s > 0.0 && scratch.decisions[here.saves_before] == kRecompute;
  }

  // Queues the copy back of a value that is away; returns its bytes.
  int64_t fetch(const Point& here, int64_t value) {
    Moved& moved = scratch.clock.values[value];
    if (moved.release_tick < 0 || moved.back_tick >= 0) return 0;
    reach(problem, scratch.clock, here.op);
    take(problem, scratch.clock, problem.rates->fetch_s);
    queue_copy(problem, scratch.clock, value, kIn);
    moved.back_tick = here.tick;
    moved.is_arriving = true;
    return problem.values[value].moved_bytes;
  }

  void wait_in(const Point& here, int64_t value) {
    Moved& moved = scratch.clock.values[value];
    if (!moved.is_arriving) return;
    moved.is_arriving = false;
    reach(problem, scratch.clock, here.op);
    wait_for(problem, scratch.clock, value, kIn);
  }

  // Brings back the inputs of a replay, and runs it; returns the bytes of copies.
  int64_t replay(const Point& here, const Merged& merged) {
    int64_t moved_bytes = 0;
    for (int64_t source : scratch.store.sources_of(merged)) {
      moved_bytes += fetch(here, source);
      wait_in(here, source);
    }
    reach(problem, scratch.clock, here.op);
    run_replay(problem, scratch.clock, scratch.store, merged);
    return moved_bytes;
  }

  // Most bytes live at any tick, of this step or of the first one (`lives`, `add_inside_replays`).
  int64_t peak_bytes() {
    const int64_t ticks = problem.ticks.count, last = ticks - 1;
    pooch::clear(scratch.moves);
    for (int64_t number = 0; number < problem.values.count; ++number) {
      const Value& value = problem.values[number];
      const Chosen& here = scratch.values[number];
      const Moved& moved = scratch.clock.values[number];
      int64_t until = std::max(value.death, here.end), back = moved.back_tick;
      if (scratch.decisions[number] == kRecompute) {
        until = value.death;
        back = here.replayed_at >= 0 ? problem.points[here.replayed_at].tick : -1;
      } else if (moved.release_tick >= 0) {
        until = std::max(value.death, moved.release_tick - 1);
      }
      pooch::put(scratch.moves, ticks, value.born, std::min(until, last), value.size_bytes);
      if (back >= 0) pooch::put(scratch.moves, ticks, back, std::min(std::max(here.end, back), last), value.size_bytes);
    }
    int64_t live = 0, most = 0;
    size_t run = 0;
    for (int64_t tick = 0; tick < ticks; ++tick) {
      live += scratch.moves[tick];
      int64_t now = live + problem.ticks[tick].base_bytes;
      if (run < scratch.runs.size() && problem.points[scratch.runs[run].point].tick == tick) {
        const Run& here = scratch.runs[run++];
        now = std::max(now, now - here.target_bytes + scratch.store.merged[here.merged].peak_bytes);
      }
      most = std::max({most, now, now - problem.ticks[tick].less_bytes});
      scratch.moves[tick] = now;
    }
    return most;
  }
};

} // namespace pooch

using namespace pooch;

#define POOCH extern "C" __attribute__((visibility("default")))

// Null if there is no memory for it.
POOCH Evaluator* pooch_evaluator_new(const Problem* problem, int64_t pooled) {
  try {
    return new Evaluator(*problem, pooled);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

POOCH void pooch_evaluator_drop(Evaluator* evaluator) { delete evaluator; }

POOCH void pooch_evaluate(Evaluator* evaluator, const int8_t* decisions, int64_t budget_bytes, int64_t style,
                          Evaluation* found, int8_t* final_decisions) {
  *found = evaluator->evaluate(decisions, budget_bytes, style);
  const auto& final = evaluator->scratch.decisions;
  std::copy(final.begin(), final.end(), final_decisions);
}

// Most bytes live at each tick, in the last evaluation.
POOCH void pooch_memory(const Evaluator* evaluator, int64_t* memory_bytes) {
  std::copy_n(evaluator->scratch.moves.begin(), evaluator->problem.ticks.count, memory_bytes);
}

POOCH void pooch_first_fit(const int64_t* spans, const int64_t* order, int64_t blocks, int64_t* offsets) {
  first_fit(Spans(spans, blocks), {order, blocks}, offsets);
}

// Returns the number of blocks without a place. `looks` is the most to take, and then the number taken.
POOCH int64_t pooch_place_all(const int64_t* spans, int64_t blocks, int64_t* offsets, int64_t height,
                              const int64_t* costs, int64_t seed, int64_t* looks) {
  Ejection ejection(Spans(spans, blocks), blocks, offsets, height, costs, seed);
  *looks = ejection.place_all(*looks);
  return ejection.left();
}
