// The compiled tape as a module of Python: recording below autograd, recipes and replays.

#include "copies.h"
#include "hooks.h"
#include "op_clock.h"
#include "own.h"

#include <torch/library.h>

namespace pooch {

// The tape of this thread. It stays when its session is over: then it is off.
static thread_local Tape* here = nullptr;

// Records the op, unless it is a view. What of ours raises here ends recording: the user's op runs in any case.
static Running begin(Tape& tape, const c10::OperatorHandle& handle, const Stack& stack) {
  const py::gil_scoped_acquire lock;
  try {
    const Traits& facts = tape.traits_of(handle);
    if (!facts.pure_view) {
      const auto given = torch::jit::last(stack, handle.schema().arguments().size());
      if (!tape.within_op || !tape.is_of_that_op(facts, given)) {
        return tape.before(handle, facts, given);
      }
      tape.pass_over(facts, given);
    }
  } catch (const py::error_already_set& error) {
    tape.fails(error.matches(PyExc_KeyboardInterrupt) ? INTERRUPTED : error.what());
  } catch (const std::exception& error) {
    tape.fails(error.what());
  }
  return {};
}

// Drops what has begun under the lock, also when the op has raised.
class End {
 public:
  explicit End(Running running) : running_(std::move(running)) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    if (running_.op) {
      const py::gil_scoped_acquire lock;
      running_ = {};
    }
  }
  void ran(Tape* tape, const c10::OperatorHandle& handle, const Stack& stack) {
    if (!running_.op) {
      return;
    }
    const py::gil_scoped_acquire lock;
    try {
      tape->after(running_, torch::jit::last(stack, handle.schema().returns().size()));
    } catch (const std::exception& error) {
      tape->fails(error.what());
    }
    running_ = {};
  }

 private:
  Running running_;
};

static void fallback(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY);
  Tape* tape = here != nullptr && here->is_on && !paused() ? here : nullptr;
  OpClock* clock = OpClock::watching();
  if (tape == nullptr && clock == nullptr) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard unseen(KEY);  // what the op calls, and what is called here
  End end(tape != nullptr ? begin(*tape, handle, *stack) : Running());
  if (clock != nullptr) {
    clock->run(handle, below, stack);
  } else {
    handle.redispatchBoxed(below, stack);
  }
  end.ran(tape, handle, *stack);
}

// Takes the key, once for a process. `of` is what is asked of Python.
static void install(py::object of) {
  helpers() = std::move(of);
  static auto& library = *new torch::Library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The tape or clock of this thread is that one, or none.
template <typename Sees>
static void place(Sees*& of_thread, Sees* one) {
  of_thread = one;
  c10::impl::tls_set_dispatch_key_included(KEY, here != nullptr || OpClock::here() != nullptr);
}

template <typename Sees>
static bool is_placed(const Sees* of_thread, const Sees* one) {
  return of_thread == one && c10::impl::tls_is_dispatch_key_included(KEY);
}

static void come(Tape* tape) {
  place(here, tape);
  if (tape->within_op) {
    c10::impl::tls_set_dispatch_key_included(DispatchKey::PythonTLSSnapshot, true);
  }
}

static void go(Tape* tape) {
  place<Tape>(here, nullptr);
  if (tape->within_op) {
    Tape::leave_snapshot();
  }
}

static py::object source(const RecordPtr& record) {
  const View* view = source_of(*record);
  if (view == nullptr) {
    return py::none();
  }
  at::Tensor probe = at::empty({0}, at::TensorOptions(view->geometry.dtype).device(view->record->held()->device()));
  probe.unsafeGetTensorImpl()->set_version_counter(view->source->counter);
  const Geometry& at = view->geometry;
  const std::vector<int64_t> sizes(at.sizes.begin(), at.sizes.end()), strides(at.strides.begin(), at.strides.end());
  const py::tuple geometry = py::make_tuple(
      py::cast(at.dtype), py::tuple(py::cast(sizes)), py::tuple(py::cast(strides)), at.offset);
  return helpers().attr("source")(view->record, view->generation, geometry, probe, view->source->version);
}

static const c10::StorageImpl* impl_of(const py::object& storage) {
  return torch::createStorage(storage.ptr()).unsafeGetStorageImpl();
}

}  // namespace pooch

PYBIND11_MODULE(tape, m) {
  using namespace pooch;
  m.def("install", &install);
  py::class_<Record, RecordPtr>(m, "Record")
      .def("storage", [](const Record& one) -> py::object {
        auto held = one.held();
        return held ? as_python(c10::Storage(std::move(held))) : py::object(py::none());
      })
      .def("attach", [](Record& one, const py::object& value) {
        const auto probe = value.attr("probe").cast<at::Tensor>();
        const auto& counter = probe.unsafeGetTensorImpl()->version_counter();
        attach(one, value, value.attr("generation").cast<int64_t>(), {counter, value.attr("version").cast<int64_t>()});
      })
      .def("source", &source)
      .def("made_again", [](const RecordPtr& one) { return translated([&] { return made_again(one); }); })
      .def_property_readonly("value", [](const Record& one) -> py::object {
        return one.value ? one.value : py::object(py::none());
      })
      .def_property_readonly("generation", &Record::generation)
      .def_property_readonly("is_born", [](const Record& one) { return one.birth != nullptr; })
      .def_property_readonly("broken", [](const Record& one) { return one.broken; })
      .def_property_readonly("was_there", [](const Record& one) { return one.was_there; })
      .def_property_readonly("writes", [](const Record& one) {
        py::list found;
        for (const auto& write : one.writes) {
          found.append(write ? py::object(py::str(c10::toString(write->handle.operator_name()))) : py::none());
        }
        return found;
      })
      .def_readwrite("packed", &Record::packed)
      .def_readwrite("save_point", &Record::save_point);
  py::class_<Recipe, std::shared_ptr<Recipe>>(m, "Recipe")
      .def_property_readonly("values", [](const Recipe& one) { return py::tuple(py::cast(one.values)); });
  py::class_<Replay>(m, "Replay")
      .def(py::init([](Tape& tape, const py::object& value, const py::function& resident, bool from_copies) {
        const auto storage_of = [&](const py::object& one) { return torch::createStorage(resident(one).ptr()); };
        return translated([&] { return std::make_unique<Replay>(tape, value, storage_of, from_copies); });
      }))
      .def("parts", &Replay::parts)
      .def("run", [](Replay& one) {
        py::list back;
        for (const auto& [value, storage] : translated([&] { return one.rebuilt(); })) {
          value.attr("came_back")(as_python(storage));
          back.append(value);
        }
        return back;
      });
  py::class_<OpClock, std::unique_ptr<OpClock, py::nodelete>>(m, "OpClock")
      .def(py::init<py::list>())
      .def_property("is_on", [](const OpClock& clock) { return clock.is_on.load(); },
                    [](OpClock& clock, bool is_on) { clock.is_on = is_on; })
      .def_property("is_paused", &OpClock::is_paused, &OpClock::pause)
      .def_readwrite("phase", &OpClock::phase)
      .def("come", [](OpClock& clock) { place(OpClock::here(), &clock); })
      .def("go", [](OpClock&) { place<OpClock>(OpClock::here(), nullptr); })
      .def("is_here", [](const OpClock& clock) { return is_placed<OpClock>(OpClock::here(), &clock); })
      .def("observed", &OpClock::observed)
      .def("taken", &OpClock::taken);
  py::class_<Tape, std::unique_ptr<Tape, py::nodelete>>(m, "Tape")
      .def(py::init<std::string>())
      .def_readonly("device_type", &Tape::device_type)
      .def_readonly("static", &Tape::statics)
      .def_readonly("buffers", &Tape::buffers)
      .def_readonly("own_ids", &Tape::own_ids)
      .def("look_at", &look_at)
      .def_readonly("window", &Tape::window)
      .def_readonly("count", &Tape::count)
      .def("check", &check)
      .def_readwrite("listener", &Tape::listener)
      .def_property("is_on", [](const Tape& tape) { return tape.is_on.load(); },
                    [](Tape& tape, bool is_on) { tape.is_on = is_on; })
      .def_property("is_paused", [](const Tape&) { return paused(); }, [](Tape&, bool is_so) { paused() = is_so; })
      .def("begin_window", &Tape::begin_window)
      .def("come", &come)
      .def("go", &go)
      .def("is_here", [](const Tape& tape) { return is_placed<Tape>(here, &tape); })
      .def("known", [](const Tape& tape, const py::object& storage) { return tape.known(impl_of(storage)); })
      .def("record_of", &Tape::record_of)
      .def("met", [](Tape& tape, const at::Tensor& tensor, const py::handle&, int64_t window) {
        return tape.met(tensor, window);
      })
      .def("settle", &Tape::settle)
      .def("forget", &Tape::forget)
      .def("clear", &Tape::clear)
      .def("is_given", &Tape::is_given)
      .def("earlier_values", &Tape::earlier_values)
      .def("registered", &Tape::registered)
      .def("recipe", &recipe_of);
  py::class_<QueuedCopy>(m, "QueuedCopy")
      .def_property_readonly("error", [](const QueuedCopy&) { return py::none(); })
      .def_property_readonly("storage", [](const QueuedCopy& one) { return one.storage; })
      .def("done", [](const QueuedCopy& one) { return translated([&] { return one.done(); }); })
      .def("wait", [](QueuedCopy& one) { return translated([&] { return one.wait(); }); });
  py::class_<Copies>(m, "Copies")
      .def(py::init<py::object, py::object, uintptr_t>())
      .def("out", [](Copies& one, const py::object& storage, int64_t offset) {
        return translated([&] { return one.out(storage, offset, one.compute()); });
      })
      .def("back", [](Copies& one, int64_t size_bytes, int64_t offset) {
        return translated([&] { return one.back(size_bytes, offset, one.compute()); });
      });
  py::class_<PlannedPoints, std::shared_ptr<PlannedPoints>>(m, "PlannedPoints")
      .def(py::init<>())
      .def_readwrite("handles", &PlannedPoints::handles)
      .def("add_save", &PlannedPoints::add_save)
      .def("add_use", &PlannedPoints::add_use);
  py::class_<PlannedHooks>(m, "PlannedHooks")
      .def(py::init<Tape*, py::tuple, py::object, py::object, py::object, py::object, int64_t, py::object, py::object,
                    py::object>(),
           py::keep_alive<1, 2>())
      .def("engine_runs", &PlannedHooks::engine_runs)
      .def_readwrite("is_off", &PlannedHooks::is_off)
      .def_property_readonly("follows", &PlannedHooks::follows)
      .def("follow", &PlannedHooks::follow)
      .def("leave", &PlannedHooks::leave)
      .def("close", &PlannedHooks::close)
      .def("take_seconds", &PlannedHooks::take_seconds)
      .def("pack", &PlannedHooks::pack)
      .def("unpack", &PlannedHooks::unpack)
      .def("hook", &hook_of);
}
