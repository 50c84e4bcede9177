// Seconds of the CPU's ops and of the nodes of a backward, by a clock that computes nothing (OpTimer in after_capture.py
// has the reference).
//
// Ops are seen below autograd, as the tape sees them; nodes as torch's own profilers see them.

#pragma once

#include "tape.h"

#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <chrono>

namespace pooch {

class OpClock {
 public:
  std::atomic<bool> is_on = false;
  py::object phase = py::none();  // of the ops from here on

  // `running`: paths of the modules that run, the innermost last.
  explicit OpClock(py::list running) : running_(std::move(running)) {}

  // The clock that the thread's ops reach. It stays when its step is over: then it is off.
  static OpClock*& here() {
    static thread_local OpClock* found = nullptr;
    return found;
  }

  // The same, if it sees the next op.
  static OpClock* watching() { return here() != nullptr && here()->is_on && !here()->is_paused_ ? here() : nullptr; }

  // Runs the op, and notes it unless it is a view.
  void run(const c10::OperatorHandle& handle, DispatchKeySet below, Stack* stack) {
    if (is_view(handle)) {
      handle.redispatchBoxed(below, stack);
      return;
    }
    const auto began = Clock::now();
    handle.redispatchBoxed(below, stack);
    const double seconds = seconds_since(began);
    noted([&] {
      const auto outputs = torch::jit::last(*stack, handle.schema().returns().size());
      const c10::OperatorName& name = handle.operator_name();
      const auto shapes = outputs.size() == 1 ? shapes_of(outputs[0]) : shapes_of(outputs);
      notes(name.name, py::str(name.overload_name), shapes, seconds);
    });
  }

  // The result of `run()`, a backward. Its nodes are noted, each with torch's work up to the next, such as adding
  // gradients.
  py::object observed(const py::function& run) {
    at::RecordFunctionCallback callback(&begins, &ends);
    const auto handle = at::addThreadLocalCallback(callback.scopes({at::RecordScope::BACKWARD_FUNCTION}));
    const auto over = c10::make_scope_exit([&, before = std::exchange(here(), this)] {
      at::removeCallback(handle);
      here() = before;
      stops();
      depth_ = 0;
    });
    return run();
  }

  bool is_paused() const { return is_paused_; }

  // In a pause no op is seen, and no time passes for the node.
  void pause(bool is_so) {
    if (is_so && !is_paused_) {
      goes_on_ = since_.has_value();
      stops();
    } else if (!is_so && is_paused_ && goes_on_) {
      since_ = Clock::now();
    }
    is_paused_ = is_so;
  }

  // What it has noted, in its order: (name, overload or None, layer, phase, shapes, seconds) of each op or node.
  py::list taken() {
    py::list found;
    for (const Timed& one : std::exchange(timed_, {})) {
      found.append(py::make_tuple(one.name, one.overload, one.layer, one.phase, one.shapes, one.seconds));
    }
    return found;
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Timed {
    std::string name;
    py::object overload, layer, phase, shapes;
    double seconds;
  };

  // A node within another is part of that.
  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& node) {
    if (here() != nullptr && here()->depth_++ == 0) {
      here()->stops();
      here()->noted([&] { here()->notes(node.name(), py::none(), py::tuple(), 0); });
      here()->since_ = Clock::now();
    }
    return nullptr;
  }

  static void ends(const at::RecordFunction&, at::ObserverContext*) {
    if (here() != nullptr) {
      here()->depth_ -= 1;
    }
  }

  // What follows belongs to no node.
  void stops() {
    if (since_ && !timed_.empty()) {
      timed_.back().seconds += seconds_since(*since_);
    }
    since_.reset();
  }

  // Calls `note` under the interpreter's lock. If that raises nothing more is seen: the step then has too few ops, and is
  // not used. A user's interrupt comes again.
  template <typename Note>
  void noted(Note note) {
    const py::gil_scoped_acquire lock;
    try {
      note();
    } catch (const py::error_already_set& error) {
      is_on = false;
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      }
    } catch (const std::exception&) {
      is_on = false;
    }
  }

  void notes(std::string name, py::object overload, py::object shapes, double seconds) {
    const size_t depth = running_.size();
    const py::object layer = depth != 0 ? py::object(running_[depth - 1]) : py::str("");
    timed_.push_back({std::move(name), std::move(overload), layer, phase, std::move(shapes), seconds});
  }

  bool is_view(const c10::OperatorHandle& handle) {
    bool found = true;
    noted([&] { found = Tape::traits_of(handle).pure_view; });
    return found;
  }

  static py::object shapes_of(const at::Tensor& tensor) {
    return tensor.defined() && !tensor.is_nested() ? py::tuple(py::cast(tensor.sizes().vec())) : py::tuple();
  }

  static py::object shapes_of(const IValue& one) {
    return one.isTensor() ? shapes_of(one.toTensor()) : one.isList() ? shapes_of(one.toListRef()) : py::tuple();
  }

  template <typename Several>
  static py::object shapes_of(const Several& several) {
    py::tuple found(several.size());
    for (size_t i = 0; i < several.size(); ++i) {
      found[i] = shapes_of(several[i]);
    }
    return found;
  }

  static double seconds_since(Clock::time_point began) {
    return std::chrono::duration<double>(Clock::now() - began).count();
  }

  const py::list running_;
  std::vector<Timed> timed_;
  int depth_ = 0;  // of the nodes that run, one within the other
  std::optional<Clock::time_point> since_;  // of the time that passes for the last node
  bool is_paused_ = false, goes_on_ = false;
};

}  // namespace pooch
