// What autograd calls in place of a session's hooks: PlannedHooks, and the hook itself for what that leaves to it. It is
// a type of its own, since a call by pybind takes several times as long.

#pragma once

#include "planned_hooks.h"

namespace pooch {

struct Hook {
  PyObject_HEAD
  PyObject* planned;  // the `PlannedHooks`, which are `values` too
  PyObject* hook;  // the session's
  PyObject* takes;  // says whether an error is ours, and the session stands aside
  PyObject* tracer;  // gives the compiler's callback; None if the compiler is not there
  PyObject* saving;  // the tensors whose attributes are to come back, by identity: a dictionary
  PlannedHooks* values;
  bool packs;
};

// Whether it is the hook's from the beginning: where the compiler traces, from which the hook hides itself; for a tensor
// with attributes; and behind the session's block.
inline bool is_hooks_own(const Hook& one, PyObject* given) {
  if (one.tracer != Py_None) {
    const auto callback = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(one.tracer));
    if (!callback.is_none()) {
      return true;
    }
  }
  if (!one.packs) {
    return false;
  }
  if (PyDict_GET_SIZE(one.saving) > 0) {
    const py::int_ key(reinterpret_cast<uintptr_t>(given));
    return one.values->is_off || PyDict_Contains(one.saving, key.ptr()) != 0;
  }
  return one.values->is_off;
}

// Whether the error that is set is ours: then it is gone.
inline bool is_taken(const Hook& one) {
  py::error_already_set error;
  PyException_SetTraceback(error.value().ptr(), error.trace() ? error.trace().ptr() : Py_None);
  const auto taken = py::reinterpret_steal<py::object>(PyObject_CallOneArg(one.takes, error.value().ptr()));
  if (!taken) {
    return false;
  }
  if (taken.is(py::bool_(true))) {
    return true;
  }
  error.restore();
  return false;
}

// Null if an error is set.
inline PyObject* found_at_once(const Hook& one, PyObject* given) {
  try {
    return (one.packs ? one.values->pack(given) : one.values->unpack(given)).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyObject* call_hook(PyObject* self, PyObject* arguments, PyObject*) {
  const Hook& one = *reinterpret_cast<Hook*>(self);
  PyObject* given = PyTuple_GET_ITEM(arguments, 0);
  if (!is_hooks_own(one, given)) {
    PyObject* found = found_at_once(one, given);
    if (found == nullptr ? !is_taken(one) : found != Py_None) {
      return found;
    }
    Py_XDECREF(found);
    one.values->was_asked = true;
  }
  return PyObject_CallOneArg(one.hook, given);
}

inline int visit_hook(PyObject* self, visitproc visit, void* arg) {
  const Hook& one = *reinterpret_cast<Hook*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(one.planned);
  Py_VISIT(one.hook);
  Py_VISIT(one.takes);
  Py_VISIT(one.tracer);
  Py_VISIT(one.saving);
  return 0;
}

inline int clear_hook(PyObject* self) {
  Hook& one = *reinterpret_cast<Hook*>(self);
  Py_CLEAR(one.planned);
  Py_CLEAR(one.hook);
  Py_CLEAR(one.takes);
  Py_CLEAR(one.tracer);
  Py_CLEAR(one.saving);
  return 0;
}

inline void free_hook(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_hook(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

inline PyTypeObject* hook_type() {
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(&call_hook)},
      {Py_tp_traverse, reinterpret_cast<void*>(&visit_hook)},
      {Py_tp_clear, reinterpret_cast<void*>(&clear_hook)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&free_hook)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"tape.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

inline py::object hook_of(const py::object& planned, bool packs, const py::object& hook, const py::object& takes,
                          const py::object& tracer, const py::dict& saving) {
  Hook* made = PyObject_GC_New(Hook, hook_type());
  if (made == nullptr) {
    throw py::error_already_set();
  }
  made->planned = planned.inc_ref().ptr();
  made->hook = hook.inc_ref().ptr();
  made->takes = takes.inc_ref().ptr();
  made->tracer = tracer.inc_ref().ptr();
  made->saving = saving.inc_ref().ptr();
  made->values = planned.cast<PlannedHooks*>();
  made->packs = packs;
  PyObject_GC_Track(made);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace pooch
