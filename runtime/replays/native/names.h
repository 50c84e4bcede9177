// Names of Python's attributes, each made once.

#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pooch {

namespace py = pybind11;

class Names {
 public:
#define POOCH_NAME(name) const py::object name = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(#name))
  POOCH_NAME(saves);
  POOCH_NAME(packs);
  POOCH_NAME(uses);
  POOCH_NAME(saved_values);
  POOCH_NAME(saved_bytes);
  POOCH_NAME(used);
  POOCH_NAME(raised);
  POOCH_NAME(number);
  POOCH_NAME(lease);
  POOCH_NAME(value);
  POOCH_NAME(geometry);
  POOCH_NAME(shell);
  POOCH_NAME(tensor);
  POOCH_NAME(version);
  POOCH_NAME(segment);
  POOCH_NAME(ordinal);
  POOCH_NAME(decision);
  POOCH_NAME(index);
  POOCH_NAME(compute);
  POOCH_NAME(storage);
  POOCH_NAME(state);
  POOCH_NAME(beside);
  POOCH_NAME(home);
  POOCH_NAME(dtype);
  POOCH_NAME(shape);
  POOCH_NAME(stride);
  POOCH_NAME(offset);
  POOCH_NAME(record);
  POOCH_NAME(generation);
  POOCH_NAME(recipe);
  POOCH_NAME(host_offset);
  POOCH_NAME(out_copy);
  POOCH_NAME(in_copy);
  POOCH_NAME(note);
  POOCH_NAME(error);
  POOCH_NAME(mechanism);
  POOCH_NAME(timed);
  POOCH_NAME(rebuild);
  POOCH_NAME(transfers);
  POOCH_NAME(host);
  POOCH_NAME(recorder);
  POOCH_NAME(lock);
  POOCH_NAME(acquire);
  POOCH_NAME(release);
  POOCH_NAME(prefetch);
  POOCH_NAME(replay);
  POOCH_NAME(place);
  POOCH_NAME(leaves);
  POOCH_NAME(lets_go);
  POOCH_NAME(wait);
  POOCH_NAME(out);
  POOCH_NAME(back);
  POOCH_NAME(switch_on);
  POOCH_NAME(switch_off);
  POOCH_NAME(report);
  POOCH_NAME(out_bytes);
  POOCH_NAME(in_bytes);
  POOCH_NAME(stall_s);
  POOCH_NAME(replay_s);
  POOCH_NAME(replayed_values);
  POOCH_NAME(acts_at_save);
  POOCH_NAME(acts_at_use);
  POOCH_NAME(resident);
  POOCH_NAME(owner);
  POOCH_NAME(watched);
  POOCH_NAME(stream);
  POOCH_NAME(seen);
  POOCH_NAME(memory);
  POOCH_NAME(size_bytes);
  POOCH_NAME(_parameters);
  POOCH_NAME(_buffers);
  POOCH_NAME(_modules);
#undef POOCH_NAME
};

inline const Names& names() {
  static const auto& found = *new Names();
  return found;
}

inline py::object attribute(const py::handle& of, const py::object& name) {
  PyObject* found = PyObject_GetAttr(of.ptr(), name.ptr());
  if (found == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

}  // namespace pooch
