// What autograd calls in place of a session's hooks: PlannedHooks, and the hook itself for what that leaves to it. It is
// a type of its own, since a call by pybind takes several times as long.

#pragma once

#include "planned_hooks.h"

namespace pooch {

struct Hook {
  enum Held { PLANNED, HOOK, TAKES, TRACER, SAVING, COUNT };
  PyObject_HEAD
  // The PlannedHooks; the session's hook; what says whether an error is ours, so that the session stands aside; what
  // gives the compiler's callback, or None; the tensors whose attributes are to come back, by identity.
  PyObject* held[COUNT];
  PlannedHooks* planned;
  bool packs;
};

// Whether it is the hook's from the beginning: where others look at each save and use, or the session's block is over;
// where the compiler traces, from which the hook hides itself; and for a tensor with attributes.
inline bool is_hooks_own(const Hook& one, PyObject* given) {
  if (one.planned->is_off) {
    return true;
  }
  if (one.held[Hook::TRACER] != Py_None) {
    const auto callback = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(one.held[Hook::TRACER]));
    if (!callback.is_none()) {
      return true;
    }
  }
  if (!one.packs || PyDict_GET_SIZE(one.held[Hook::SAVING]) == 0) {
    return false;
  }
  const py::int_ key(reinterpret_cast<uintptr_t>(given));
  return PyDict_Contains(one.held[Hook::SAVING], key.ptr()) != 0;
}

// Whether the error that is set is ours: then it is gone.
inline bool is_taken(const Hook& one) {
  py::error_already_set error;
  PyException_SetTraceback(error.value().ptr(), error.trace() ? error.trace().ptr() : Py_None);
  const auto taken = py::reinterpret_steal<py::object>(PyObject_CallOneArg(one.held[Hook::TAKES], error.value().ptr()));
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
    return (one.packs ? one.planned->pack(given) : one.planned->unpack(given)).release().ptr();
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
    one.planned->was_asked = true;
  }
  return PyObject_CallOneArg(one.held[Hook::HOOK], given);
}

inline int visit_hook(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject* one : reinterpret_cast<Hook*>(self)->held) {
    Py_VISIT(one);
  }
  return 0;
}

inline int clear_hook(PyObject* self) {
  for (PyObject*& one : reinterpret_cast<Hook*>(self)->held) {
    Py_CLEAR(one);
  }
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
  const std::array<py::handle, Hook::COUNT> held{planned, hook, takes, tracer, saving};
  for (int i = 0; i < Hook::COUNT; ++i) {
    made->held[i] = held[i].inc_ref().ptr();
  }
  made->planned = planned.cast<PlannedHooks*>();
  made->packs = packs;
  PyObject_GC_Track(made);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace pooch
