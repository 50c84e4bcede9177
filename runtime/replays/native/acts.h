// What a plan does at a point, by one call: what acts_at_save, acts_at_use and resident of engine.py do, and Mechanism.
// What is not as ever is left to these, value by value: they find each value as they would have left it.

#pragma once

#include "copies.h"
#include "names.h"
#include "replays.h"

#include <chrono>

namespace pooch {

inline int64_t number_of(const py::handle& of, const py::object& name) {
  return PyLong_AsLongLong(attribute(of, name).ptr());
}

inline void set(const py::handle& of, const py::object& name, const py::handle& value) {
  if (PyObject_SetAttr(of.ptr(), name.ptr(), value.ptr()) < 0) {
    throw py::error_already_set();
  }
}

inline void set_number(const py::handle& of, const py::object& name, int64_t number) {
  set(of, name, py::reinterpret_steal<py::object>(PyLong_FromLongLong(number)));
}

template <typename... Given>
py::object called(const py::object& what, const Given&... given) {
  const std::array<PyObject*, sizeof...(given)> arguments{given.ptr()...};
  PyObject* found = PyObject_Vectorcall(what.ptr(), arguments.data(), sizeof...(given), nullptr);
  if (found == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

template <typename... Given>
py::object method(const py::object& of, const py::object& name, const Given&... given) {
  const std::array<PyObject*, 1 + sizeof...(given)> arguments{of.ptr(), given.ptr()...};
  PyObject* found = PyObject_VectorcallMethod(name.ptr(), arguments.data(), arguments.size(), nullptr);
  if (found == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

// PointActions of a plan.
struct PlannedActs {
  std::vector<int64_t> swap_out, release, prefetch, replay;
  std::string record;

  static std::optional<PlannedActs> of(const py::object& actions) {
    if (actions.is_none()) {
      return std::nullopt;
    }
    const auto numbers = [&](const char* name) { return actions.attr(name).cast<std::vector<int64_t>>(); };
    return PlannedActs{numbers("swap_out"), numbers("release"), numbers("prefetch"), numbers("replay"),
                       actions.attr("record").cast<std::string>()};
  }
};

// The acts at one point of a step.
class Acts {
 public:
  // What all points of a session share. `copies` queues copies, or is None where a device does it by other means;
  // `releases` is told of storages, or is None; `together` is what a mechanism runs replays by if all is as ever;
  // `decisions` and `states` are the members of these enumerations.
  struct Shared {
    Tape* tape;
    py::object audit, copies, releases, together;
    py::tuple decisions, states;
  };

  Acts(const Shared& shared, const py::object& engine, py::object compute, const py::dict& values)
      : of_(shared),
        engine_(engine),
        mechanism_(attribute(engine, names().mechanism)),
        compute_(std::move(compute)),
        values_(values),
        lock_(attribute(engine, names().lock)) {
    method(lock_, names().acquire);
  }
  Acts(const Acts&) = delete;
  Acts& operator=(const Acts&) = delete;
  ~Acts() {
    py::error_scope kept;  // of what may be raised here
    Py_XDECREF(PyObject_CallMethodNoArgs(lock_.ptr(), names().release.ptr()));
  }

  // Whether nobody times what is done, or looks at each replay.
  bool may_act() const {
    return attribute(mechanism_, names().timed).is(py::bool_(false)) &&
        attribute(mechanism_, names().rebuild).is(of_.together);
  }

  // A value that was just saved has its recipe from here on; false if that could not be made.
  bool forgets(const py::object& value) {
    py::object recipe;
    try {
      const auto record = attribute(value, names().record).cast<RecordPtr>();
      recipe = py::cast(recipe_of(of_.tape, record, number_of(value, names().generation)));
    } catch (py::error_already_set& error) {
      if (!error.matches(helpers().attr("NotReplayable"))) {
        throw;
      }
      return false;
    }
    lets_go(value);
    set(value, names().recipe, recipe);
    enter(value, TO_REPLAY);
    set(value, names().storage, py::none());
    return true;
  }

  void carry_out(const PlannedActs& acts) {
    each(acts.swap_out, &Acts::swap_out);
    each(acts.release, &Acts::release);
    each(acts.prefetch, &Acts::prefetch);
    each(acts.replay, &Acts::replay);
    if (!acts.record.empty()) {
      method(attribute(engine_, names().recorder), acts.record == "on" ? names().switch_on : names().switch_off);
    }
  }

  // The value's device storage, filled.
  py::object resident(const py::object& value) {
    if (is(value, TO_REPLAY)) {
      replay(value);
    } else if (is(value, ON_HOST)) {
      prefetch(value);
    }
    const bool arrives = is(value, ARRIVING);
    if (arrives && is_over(attribute(value, names().in_copy))) {
      enter(value, COPIED);
      set(value, names().in_copy, py::none());
    }
    const py::object home = attribute(value, names().home);
    const bool is_there = attribute(value, names().beside).is_none() && (home.is_none() || home.is(compute_));
    if (is_there && (is(value, ON_DEVICE) || is(value, COPIED))) {
      return attribute(value, names().storage);
    }
    return method(mechanism_, names().resident, value);
  }

 private:
  enum State { ON_DEVICE, COPIED, ON_HOST, ARRIVING, TO_REPLAY };  // in the order of ValueState

  bool is(const py::object& value, State state) const {
    return attribute(value, names().state).is(of_.states[state]);
  }

  void enter(const py::object& value, State state) const { set(value, names().state, of_.states[state]); }

  void each(const std::vector<int64_t>& indices, void (Acts::*act)(const py::object&)) {
    for (const int64_t index : indices) {
      const py::int_ key(index);
      PyObject* reference = PyDict_GetItemWithError(values_.ptr(), key.ptr());
      const py::object value = reference == nullptr ? py::none() : called(py::reinterpret_borrow<py::object>(reference));
      if (!value.is_none()) {  // else it has died, or was kept
        (this->*act)(value);
      }
    }
  }

  // The compute stream waits for the copy; whether it has succeeded.
  bool is_over(const py::object& copy) {
    if (py::isinstance<QueuedCopy>(copy)) {
      translated([&] { return copy.cast<QueuedCopy&>().wait(); });
      return true;
    }
    adds(names().stall_s, method(copy, names().wait).cast<double>());
    return attribute(copy, names().error).is_none();
  }

  void swap_out(const py::object& value) {
    if (!is(value, ON_DEVICE) || !attribute(value, names().decision).is(of_.decisions[SWAP])) {
      return;
    }
    const py::object storage = attribute(value, names().storage);
    const py::object offset = method(attribute(engine_, names().host), names().place, value);
    py::object copy = py::none();
    if (!of_.copies.is_none()) {
      auto& copies = of_.copies.cast<Copies&>();
      copy = translated([&] { return copies.out(storage, PyLong_AsLongLong(offset.ptr()), compute_); });
    }
    if (copy.is_none()) {
      copy = method(attribute(mechanism_, names().transfers), names().out, storage, offset);
    }
    set(value, names().host_offset, offset);
    set(value, names().out_copy, copy);
    enter(value, COPIED);
    adds(names().out_bytes, number_of(value, names().size_bytes));
  }

  void release(const py::object& value) {
    if (!is(value, COPIED) && !is(value, ARRIVING)) {
      return;
    }
    if (!is_over(attribute(value, names().out_copy))) {
      method(mechanism_, names().release, value);
      return;
    }
    lets_go(value);
    enter(value, ON_HOST);
    set(value, names().in_copy, py::none());  // a copy that goes waits
    set(value, names().storage, py::none());
  }

  void lets_go(const py::object& value) {
    if (!of_.releases.is_none()) {
      method(mechanism_, names().lets_go, value);
      return;
    }
    method(of_.audit, names().leaves, value);
  }

  void prefetch(const py::object& value) {
    if (!is(value, ON_HOST)) {
      return;
    }
    if (number_of(value, names().note) != 0) {
      method(mechanism_, names().prefetch, value);
      return;
    }
    const py::object size_bytes = attribute(value, names().size_bytes), offset = attribute(value, names().host_offset);
    const int64_t size = PyLong_AsLongLong(size_bytes.ptr());
    py::object found = py::none();
    if (!of_.copies.is_none()) {
      auto& copies = of_.copies.cast<Copies&>();
      found = translated([&] { return copies.back(size, PyLong_AsLongLong(offset.ptr()), compute_); });
    }
    if (found.is_none()) {
      found = method(attribute(mechanism_, names().transfers), names().back, size_bytes, offset);
    }
    set(value, names().home, compute_);
    set(value, names().in_copy, py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(found.ptr(), 1)));
    set(value, names().storage, py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(found.ptr(), 0)));
    enter(value, ARRIVING);
    adds(names().in_bytes, size);
  }

  void replay(const py::object& value) {
    if (!is(value, TO_REPLAY)) {
      return;
    }
    if (!of_.releases.is_none() || !is_one_stream()) {  // released storages may be found again; streams wait for others
      method(mechanism_, names().replay, value);
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    std::optional<Replay> run;
    try {
      run.emplace(*of_.tape, value, [&](const py::object& one) { return torch::createStorage(resident(one).ptr()); },
                  true);
    } catch (py::error_already_set& error) {
      if (!error.matches(helpers().attr("NotReplayable"))) {
        throw;
      }
      method(mechanism_, names().replay, value);  // which tells why
      return;
    }
    const auto back = translated([&] { return run->rebuilt(); });
    for (const auto& [target, storage] : back) {
      comes_back(target, storage);
    }
    adds(names().replayed_values, static_cast<int64_t>(back.size()));
    if (of_.tape->where() == c10::DeviceType::CPU) {
      adds(names().replay_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  }

  void comes_back(const py::object& value, const c10::Storage& storage) const {
    if (static_cast<int64_t>(storage.nbytes()) != number_of(value, names().size_bytes)) {
      value.attr("came_back")(as_python(storage));  // which raises
    }
    set(value, names().storage, as_python(storage));
    enter(value, ON_DEVICE);
    set(value, names().recipe, py::none());
    set(value, names().home, compute_);
  }

  // To what the step reports.
  template <typename Number>
  void adds(const py::object& name, Number more) const {
    const py::object report = attribute(mechanism_, names().report);
    set(report, name, py::cast(attribute(report, name).template cast<Number>() + more));
  }

  // Whether no other of the user's streams may have made what a replay reads. Only an accelerator has several.
  bool is_one_stream() const {
    return of_.tape->where() == c10::DeviceType::CPU || PyObject_Size(attribute(compute_, names().seen).ptr()) <= 1;
  }

  static constexpr size_t SWAP = 1;  // of Decision's members
  const Shared& of_;
  const py::object &engine_, mechanism_, compute_;
  const py::dict& values_;
  const py::object lock_;
};

}  // namespace pooch
