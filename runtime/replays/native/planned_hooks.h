// Saves and uses that are as planned: one call each. Where the plan acts, the engine is called for the actions alone.
//
// It does what Engine.pack, Follow and Engine.unpack do there. Whatever is not exactly as planned is theirs: then the
// result is None, and nothing has been changed.

#pragma once

#include "acts.h"

#include <ATen/TracerMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace pooch {

// A saved value of a plan, and what the plan does where it is saved. Without a decision that save is the engine's.
struct PlannedSave {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  Sizes sizes;
  int64_t size_bytes = 0, last_handle = -1;
  py::str name;
  py::object decision;
  std::optional<PlannedActs> acts;
};

// The handle that is used, and what the plan does there.
struct PlannedUse {
  int64_t handle;
  std::optional<PlannedActs> acts;
};

// What a plan expects: saves, the save of each handle, and uses.
struct PlannedPoints {
  std::vector<PlannedSave> saves;
  std::vector<int64_t> handles;
  std::vector<PlannedUse> uses;

  void add_save(const py::object& dtype, const std::vector<int64_t>& shape, int64_t size_bytes, int64_t last_handle,
                py::str name, py::object decision, const py::object& acts) {
    PlannedSave& one = saves.emplace_back();
    one.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    one.sizes.assign(shape.begin(), shape.end());
    one.size_bytes = size_bytes;
    one.last_handle = last_handle;
    one.name = std::move(name);
    one.decision = std::move(decision);
    one.acts = PlannedActs::of(acts);
  }

  void add_use(int64_t handle, const py::object& acts) { uses.push_back({handle, PlannedActs::of(acts)}); }
};

// A segment that follows a plan: its values by save, those that expect another handle, and what it does not count yet.
struct Followed {
  py::object segment;
  std::shared_ptr<PlannedPoints> points;
  py::dict values, to_come;
  int64_t saved_values = 0, saved_bytes = 0;
};

// State: the segment that is followed, if one is. What is called here may end it, so each call holds its own reference.
class PlannedHooks {
 public:
  bool was_asked = false;  // the call that comes next is one that has just been answered with None
  bool is_off = false;  // autograd's calls go to the session's own hooks

  // `classes` are those of values, handles and geometries, and the members of Decision and ValueState; `engine` is a
  // weak reference. For `copies`, `releases` and `together` see acts.h.
  PlannedHooks(Tape* tape, py::tuple classes, py::object engine, py::object audit, py::object point, py::object device,
               int64_t index, py::object copies, py::object releases, py::object together)
      : tape_(tape),
        value_class_(classes[0]),
        handle_class_(classes[1]),
        geometry_class_(classes[2]),
        shared_{tape, std::move(audit), std::move(copies), std::move(releases), std::move(together), classes[3], classes[4]},
        keep_(shared_.decisions[0]),
        engine_(std::move(engine)),
        point_(std::move(point)),
        device_(std::move(device)),
        index_(index) {}

  void follow(py::object segment, std::shared_ptr<PlannedPoints> points, py::dict values, py::dict to_come) {
    followed_ = std::make_shared<Followed>(
        Followed{std::move(segment), std::move(points), std::move(values), std::move(to_come)});
  }

  void leave() {
    if (const auto of = std::exchange(followed_, nullptr)) {
      const Names& name = names();
      set_number(of->segment, name.saved_values, number_of(of->segment, name.saved_values) + of->saved_values);
      set_number(of->segment, name.saved_bytes, number_of(of->segment, name.saved_bytes) + of->saved_bytes);
    }
    compute_ = py::object();
  }

  // Nothing of the session's is held any more.
  void close() {
    leave();
    engine_ = point_ = device_ = shared_.audit = shared_.copies = shared_.releases = py::none();
  }

  // A hook of Python's begins or ends, perhaps on another thread.
  void engine_runs(bool begins) { busy_ += begins ? 1 : -1; }

  bool follows() const { return followed_ != nullptr; }

  double take_seconds() { return std::exchange(seconds_, 0.0); }

  py::object pack(const py::handle& given) {
    const auto type = reinterpret_cast<PyObject*>(Py_TYPE(given.ptr()));
    const auto of = followed_;
    if (std::exchange(was_asked, false) || !of || busy_ > 0 || (type != THPVariableClass && type != ParameterClass) ||
        torch::autograd::get_current_graph_task_id() != -1 || at::tracer::impl::is_dispatch_enabled() ||
        c10::impl::TorchDispatchModeTLS::any_modes_set(false)) {
      return py::none();
    }
    const Clock clock(seconds_);
    const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
    if (!is_plain(tensor, tape_->where()) || tensor.get_device() != index_) {
      return py::none();
    }
    const Names& name = names();
    const py::object& segment = of->segment;
    if (attribute(segment, name.used).is(py::bool_(true)) || attribute(segment, name.raised).is(py::bool_(true))) {
      return py::none();
    }
    const py::int_ key(reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()));
    if (tape_->statics.contains(key)) {
      PyObject_SetAttr(shared_.audit.ptr(), name.owner.ptr(), key.ptr());
      const auto held = py::reinterpret_borrow<py::object>(given);
      return handle(tensor.grad_fn() ? wrapped(alias(tensor)) : held, version_of(tensor));
    }
    if (type != THPVariableClass) {
      return py::none();
    }
    return packed(*of, tensor);
  }

  py::object unpack(const py::handle& given) {
    const Names& name = names();
    if (std::exchange(was_asked, false) || reinterpret_cast<PyObject*>(Py_TYPE(given.ptr())) != handle_class_.ptr() ||
        busy_ > 0 || tape_->is_on || c10::impl::TorchDispatchModeTLS::any_modes_set(false)) {
      return py::none();
    }
    const Clock clock(seconds_);
    const py::object found = attribute(given, name.tensor);
    const at::Tensor& held = THPVariable_Unpack(found.ptr());
    if (held.is_inference() || version_of(held) != number_of(given, name.version) ||
        !attribute(given, name.shell).is_none()) {
      return py::none();
    }
    const py::object value = attribute(given, name.value), geometry = attribute(given, name.geometry);
    if (!value.is_none() && !attribute(given, name.used).is(py::bool_(true)) && !is_used(given, held.device())) {
      return py::none();
    }
    return geometry.is_none() ? found : wrapped(counted(held, on(resident(value, held.device()), geometry)));
  }

 private:
  class Clock {
   public:
    explicit Clock(double& seconds) : seconds_(seconds) {}
    Clock(const Clock&) = delete;
    Clock& operator=(const Clock&) = delete;
    ~Clock() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

   private:
    double& seconds_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  };

  // As `detach`, without the dispatcher: it shares the version counter.
  static at::Tensor alias(const at::Tensor& tensor) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
  }

  static py::object wrapped(at::Tensor tensor) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
  }

  py::object handle(const py::object& tensor, int64_t version) const {
    return called(handle_class_, tensor, py::int_(version));
  }

  py::object packed(Followed& of, const at::Tensor& tensor) {
    const Names& name = names();
    const PlannedPoints& points = *of.points;
    const int64_t ordinal = number_of(of.segment, name.packs);
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (ordinal >= static_cast<int64_t>(points.handles.size())) {
      return py::none();
    }
    const int64_t wanted = points.handles[ordinal];
    const py::object reference = attribute(of.segment, name.lease);
    const py::object lease = reference.is_none() ? reference : called(reference);
    if (lease.is_none()) {
      return lease;
    }
    const RecordPtr record = tape_->met(tensor, tape_->is_on ? tape_->window : 0);
    if (record->packed || record->value) {
      return another(of, tensor, *record, wanted, ordinal, lease);
    }
    const int64_t index = number_of(of.segment, name.saves);
    if (index != wanted || index >= static_cast<int64_t>(points.saves.size())) {
      return py::none();
    }
    const PlannedSave& planned = points.saves[index];
    if (planned.decision.is_none() || planned.dtype != tensor.scalar_type() || planned.sizes != tensor.sizes() ||
        planned.size_bytes != static_cast<int64_t>(storage->nbytes())) {
      return py::none();
    }
    const bool stays = planned.decision.is(keep_);
    if (!stays && called(shared_.audit.attr("is_kept"), py::int_(index), wrapped(tensor)).is(py::bool_(true))) {
      return py::none();
    }
    set_number(of.segment, name.saves, index + 1);
    set_number(of.segment, name.packs, ordinal + 1);
    of.saved_values += 1;
    of.saved_bytes += planned.size_bytes;
    record->save_point = index;
    comes_to(index + 1, index + 1);
    const at::Tensor held = stays ? alias(tensor) : probe_of(tensor);
    const py::object probe = wrapped(held), version = py::int_(version_of(tensor));
    const py::object none = py::none(), place = py::int_(index), geometry = stays ? none : geometry_of(tensor);
    const py::object value = called(
        value_class_, planned.decision, stays ? none : py::cast(record), py::int_(record->generation()), probe, version,
        geometry, py::int_(planned.size_bytes), as_python(tensor.storage()), compute(tensor.device()), place,
        planned.name);
    attach(*record, value, record->generation(), Probe(held));
    record->packed = true;
    of.values[place] = record->value;
    lets_come(of, ordinal);
    if (planned.last_handle >= 0) {
      of.to_come[py::int_(planned.last_handle)] = value;
    }
    const py::object made = called(
        handle_class_, probe, version, geometry, value, lease, attribute(of.segment, name.number), py::int_(ordinal));
    const bool is_recomputed = !stays && planned.decision.is(shared_.decisions[RECOMPUTE]);
    if (is_recomputed || planned.acts) {
      acts(&of, tensor.device(), name.acts_at_save, value, [&](Acts& here) {
        if (is_recomputed && !here.forgets(value)) {
          return false;
        }
        if (planned.acts) {
          here.carry_out(*planned.acts);
        }
        return true;
      });
    }
    return made;
  }

  // A handle of a value that has been saved before, by the same or another tensor of its storage.
  py::object another(Followed& of, const at::Tensor& tensor, const Record& record, int64_t wanted, int64_t ordinal,
                     const py::object& lease) {
    const Names& name = names();
    const py::object value = record.value ? record.value() : py::object(py::none());
    if (value.is_none() || record.save_point != wanted || !record.value_probe->unwritten() ||
        attribute(value, name.index).is_none()) {
      return py::none();
    }
    const bool stays = attribute(value, name.decision).is(keep_);
    if (!stays) {
      const Busy busy(*this);
      called(shared_.audit.attr("saved_again"), value, wrapped(tensor));
    }
    set_number(of.segment, name.packs, ordinal + 1);
    lets_come(of, ordinal);
    return called(
        handle_class_, wrapped(stays ? alias(tensor) : probe_of(tensor)), py::int_(version_of(tensor)),
        stays ? py::object(py::none()) : geometry_of(tensor), value, lease, attribute(of.segment, name.number),
        py::int_(ordinal));
  }

  // Acts in a segment that is followed, or if that cannot be has the engine do it. Ops of either are not the step's.
  template <typename Act>
  py::object acts(Followed* of, c10::Device where, const py::object& what, const py::object& on, Act act) {
    const py::object engine = called(engine_);
    const Busy busy(*this);
    if (of != nullptr) {
      Acts here(shared_, engine, compute(where), of->values);
      if (here.may_act() && act(here)) {
        return py::none();
      }
    }
    return method(engine, what, on);
  }

  class Busy {
   public:
    explicit Busy(PlannedHooks& of) : of_(of), was_paused_(std::exchange(paused(), true)) { of_.engine_runs(true); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
    ~Busy() {
      of_.engine_runs(false);
      paused() = was_paused_;
    }

   private:
    PlannedHooks& of_;
    bool was_paused_;
  };

  // A tensor without memory, which shares the version counter.
  static at::Tensor probe_of(const at::Tensor& tensor) {
    const c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tensor.device()), nullptr, false);
    return counted(tensor, Geometry(tensor.scalar_type(), {0}, {1}, 0).on(none));
  }

  py::object geometry_of(const at::Tensor& tensor) const {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    py::tuple shape(sizes.size()), stride(strides.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      shape[i] = sizes[i];
      stride[i] = strides[i];
    }
    return called(
        geometry_class_, py::cast(tensor.scalar_type()), shape, stride, py::int_(tensor.storage_offset()));
  }

  static at::Tensor on(const c10::Storage& storage, const py::object& geometry) {
    const Names& name = names();
    const auto type = reinterpret_cast<THPDtype*>(attribute(geometry, name.dtype).ptr())->scalar_type;
    return Geometry(type, sizes_of(attribute(geometry, name.shape)), sizes_of(attribute(geometry, name.stride)),
                    number_of(geometry, name.offset)).on(storage);
  }

  static Sizes sizes_of(const py::tuple& numbers) {
    Sizes found;
    for (const auto& one : numbers) {
      found.push_back(PyLong_AsLongLong(one.ptr()));
    }
    return found;
  }

  // The tensor with the version counter of the other.
  static at::Tensor counted(const at::Tensor& other, at::Tensor tensor) {
    tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
    return tensor;
  }

  // The value's device storage, filled: at once where nothing is to be waited for, fetched or compared.
  c10::Storage resident(const py::object& value, c10::Device where) {
    const Names& name = names();
    const py::object state = attribute(value, name.state), home = attribute(value, name.home);
    const bool is_there = state.is(shared_.states[0]) || state.is(shared_.states[1]);
    if (is_there && attribute(value, name.beside).is_none() && (home.is_none() || home.is(compute(where)))) {
      return torch::createStorage(attribute(value, name.storage).ptr());
    }
    const auto followed = followed_;
    py::object found;
    const py::object by_engine = acts(followed.get(), where, name.resident, value, [&](Acts& here) {
      found = here.resident(value);
      return true;
    });
    return torch::createStorage((found ? found : by_engine).ptr());
  }

  static void lets_come(Followed& of, int64_t ordinal) {
    if (!of.to_come.empty()) {
      const py::int_ key(ordinal);
      if (of.to_come.contains(key)) {
        PyDict_DelItem(of.to_come.ptr(), key.ptr());
      }
    }
  }

  // The step passes one more point.
  void comes_to(int64_t saves, int64_t points) {
    if (!point_.is_none()) {
      called(point_, py::int_(points));
    }
    const Names& name = names();
    if (PyList_GET_SIZE(attribute(shared_.audit, name.watched).ptr()) > 0) {
      called(shared_.audit.attr("point"), py::int_(saves));
    } else {
      set_number(shared_.audit, name.saves, saves);
    }
  }

  // The device's compute stream. A GPU's is asked for where the thread's is another than before.
  const py::object& compute(c10::Device where) {
    const auto now = c10::impl::VirtualGuardImpl(where.type()).getStream(where);
    if (!compute_ || where.is_cpu() || now != stream_) {
      compute_ = attribute(device_, names().compute);
      stream_ = now;
    }
    return compute_;
  }

  // Whether the handle's first use is the planned one. It is counted, and what the plan does there is done.
  bool is_used(const py::handle& given, c10::Device where) {
    const Names& name = names();
    const auto of = followed_;
    if (!of || !of->to_come.empty() || !attribute(of->segment, name.used).is(py::bool_(true)) ||
        number_of(given, name.segment) != number_of(of->segment, name.number) ||
        number_of(of->segment, name.saves) < static_cast<int64_t>(of->points->saves.size())) {
      return false;
    }
    const int64_t use = number_of(of->segment, name.uses);
    const auto& uses = of->points->uses;
    if (use >= static_cast<int64_t>(uses.size()) || uses[use].handle != number_of(given, name.ordinal)) {
      return false;
    }
    PyObject_SetAttr(given.ptr(), name.used.ptr(), Py_True);
    set_number(of->segment, name.uses, use + 1);
    if (!point_.is_none()) {
      called(point_, py::int_(number_of(of->segment, name.saves) + use + 1));
    }
    if (const auto& planned = uses[use].acts) {
      acts(of.get(), where, name.acts_at_use, py::int_(use), [&](Acts& here) {
        here.carry_out(*planned);
        return true;
      });
    }
    return true;
  }

  Tape* tape_;
  static constexpr size_t RECOMPUTE = 2;  // of Decision's members
  py::object value_class_, handle_class_, geometry_class_;
  Acts::Shared shared_;
  py::object keep_, engine_, point_, device_, compute_;
  c10::Stream stream_{c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU)};
  int64_t index_;
  std::shared_ptr<Followed> followed_;
  int busy_ = 0;  // hooks of Python's that run
  double seconds_ = 0.0;
};

}  // namespace pooch
