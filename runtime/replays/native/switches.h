// torch's switches, read for each op: equal ones are one object.

#pragma once

#include "records.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

namespace pooch {

inline Switches switches_now(bool is_cuda) {
  const at::Context& context = at::globalContext();
  int64_t legacy = -1;  // it raises if other names have set something else
  try {
    legacy = static_cast<int64_t>(context.float32MatmulPrecision());
  } catch (const c10::Error&) {
  }
  Switches found{};
  size_t i = 0;
  const auto add = [&](auto value) { found.at(i++) = static_cast<int64_t>(value); };
  add(is_cuda);
  add(legacy);
  add(at::get_num_threads());
  add(c10::typeMetaToScalarType(c10::get_default_dtype()));
  add(context.deterministicAlgorithms());
  add(context.deterministicAlgorithmsWarnOnly());
  add(context.userEnabledMkldnn());
  add(context.userEnabledCuDNN());
  add(context.userEnabledNNPACK());
  add(context.deterministicMkldnn());
  const auto backend = is_cuda ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN;
  for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL}) {
    add(context.float32Precision(backend, op));
  }
  if (is_cuda) {
    add(context.allowFP16ReductionCuBLAS());
    add(context.allowBF16ReductionCuBLAS());
    add(context.allowFP16AccumulationCuBLAS());
    add(at::globalContext().blasPreferredBackend());
    add(context.linalgPreferredBackend());
    add(context.deterministicCuDNN());
    add(context.benchmarkCuDNN());
    add(context.userEnabledFlashSDP());
    add(context.userEnabledMemEfficientSDP());
    add(context.userEnabledMathSDP());
    add(context.userEnabledCuDNNSDP());
  }
  return found;
}

// The states that were met, as Python has them.
inline std::map<Switches, py::object>& switch_states() {
  static auto& states = *new std::map<Switches, py::object>();
  return states;
}

}  // namespace pooch
