// The model's own tensors, as OwnTensors.look_at finds them anew for each step: here all that are ordinary tensors.

#pragma once

#include "names.h"
#include "tape.h"

#include <torch/csrc/autograd/python_variable.h>

namespace pooch {

// Calls `take` with each value of a mapping of a module's.
template <typename Take>
void each_of(const py::object& module, const py::object& name, Take take) {
  const py::object found = attribute(module, name);
  if (PyDict_Check(found.ptr())) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(found.ptr(), &at, &key, &value)) {
      take(py::reinterpret_borrow<py::object>(value));
    }
    return;
  }
  for (const auto& value : found.attr("values")()) {  // of a module of TorchScript
    take(py::reinterpret_borrow<py::object>(value));
  }
}

inline bool is_ordinary(const py::object& tensor) {
  const auto type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  return type == THPVariableClass || type == ParameterClass;
}

// Notes a parameter or buffer, with the bytes of its gradient; false if it is not ordinary, or its gradient is not.
inline bool notes(Tape& tape, const py::object& given, int64_t& gradient_bytes) {
  if (!is_ordinary(given)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
  if (!is_plain(tensor, tape.where())) {
    return false;
  }
  if (tensor.is_leaf() || tensor.retains_grad()) {  // torch warns of others
    const at::Tensor& grad = tensor.grad();
    if (grad.defined()) {
      if (!is_plain(grad, tape.where())) {
        return false;
      }
      gradient_bytes += static_cast<int64_t>(grad.storage().nbytes());
    }
  }
  tape.owns(tensor, tensor.dim() < 2 || reinterpret_cast<PyObject*>(Py_TYPE(given.ptr())) != ParameterClass);
  return true;
}

// Gives the bytes of the gradients, and the tensors that are left to Python.
inline py::tuple look_at(Tape& tape, const py::object& model) {
  tape.owns_none();
  int64_t gradient_bytes = 0;
  py::list others;
  std::set<PyObject*> seen;
  std::vector<py::object> pending{model};
  const auto take = [&](const py::object& tensor) {
    if (!tensor.is_none()) {
      tape.own_ids.add(py::int_(reinterpret_cast<uintptr_t>(tensor.ptr())));
      if (!notes(tape, tensor, gradient_bytes)) {
        others.append(tensor);
      }
    }
  };
  while (!pending.empty()) {
    const py::object module = std::move(pending.back());
    pending.pop_back();
    if (seen.insert(module.ptr()).second) {
      each_of(module, names()._parameters, take);
      each_of(module, names()._buffers, take);
      each_of(module, names()._modules, [&](const py::object& child) {
        if (!child.is_none()) {
          pending.push_back(child);
        }
      });
    }
  }
  return py::make_tuple(gradient_bytes, others);
}

}  // namespace pooch
