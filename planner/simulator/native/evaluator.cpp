// What Python calls (`evaluator.py`). Arrays are Python's; those of a problem outlive its evaluator.
#include <new>

#include "evaluate.h"
#include "packing.h"

using namespace pooch;

#define POOCH extern "C" __attribute__((visibility("default")))

// Null where there is no memory for it.
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

// Returns how many blocks have no place; `looks` is the most to take, and then how many were taken.
POOCH int64_t pooch_place_all(const int64_t* spans, int64_t blocks, int64_t* offsets, int64_t height,
                              const int64_t* costs, int64_t seed, int64_t* looks) {
  Ejection ejection(Spans(spans, blocks), blocks, offsets, height, costs, seed);
  *looks = ejection.place_all(*looks);
  return ejection.left();
}
