// The tape: ops as they run, and the storages that they create, read and write (tape.py has the reference).
//
// A boxed fallback on a dispatch key below autograd that torch does not use sees each op of a thread that has the key.
// Everything here happens under the interpreter's lock, which the fallback takes around its own work: another thread may
// run hooks of the same session.

#pragma once

#include "switches.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <set>
#include <unordered_map>

namespace pooch {

using c10::IValue;
using Stack = torch::jit::Stack;

// Facts about an operator, from operators.py.
struct Traits {
  std::string name;
  bool pure_view, random, uninitialised, overwriting, trusted, may_write, makes_alike, convolves, widening, cudnn_rnn;
  std::vector<int32_t> written, statistics;
};

struct CounterBefore {
  RecordPtr record;
  Probe probe;
};

// An op that runs, and the counters that it is about to move.
struct Running {
  OpPtr op;
  std::vector<CounterBefore> written;
};

inline bool is_plain(const at::Tensor& tensor, c10::DeviceType where) {
  static const DispatchKeySet others(
      {DispatchKey::Python, DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
       DispatchKey::Functionalize, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::Batched, DispatchKey::Quantized, DispatchKey::NestedTensor, KEY});
  return tensor.device().type() == where && tensor.layout() == at::kStrided &&
      !tensor.key_set().has_any(others) && !tensor.is_inference() && tensor.has_storage() &&
      tensor.storage().nbytes() > 0;
}

// Whether this thread runs a hook of a session, whose ops are not the step's.
inline bool& paused() {
  static thread_local bool found = false;
  return found;
}

constexpr const char* INTERRUPTED = "KeyboardInterrupt";

class Tape {
 public:
  py::dict statics;  // storage keys of parameters and buffers, with their versions
  py::set buffers, own_ids;  // storage keys of the small ones; the identities of all, as tensors of Python
  int64_t window = 0, count = 0;
  std::atomic<bool> is_on = false;
  bool within_op = false;
  std::string failure;
  py::object listener;  // is called with the name of each op that is recorded, unless it is null

  explicit Tape(std::string kind)
      : device_type(std::move(kind)),
        where_(device_type == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU) {}

  const std::string device_type;

  // -- what the engine asks ------------------------------------------------------------------------------------

  RecordPtr known(const c10::StorageImpl* storage) const {
    const auto found = registry_.find(storage);
    return found == registry_.end() ? nullptr : found->second;
  }

  RecordPtr record_of(const at::Tensor& tensor) {
    auto found = known(tensor.storage().unsafeGetStorageImpl());
    return found ? found : new_record(tensor);
  }

  RecordPtr met(const at::Tensor& tensor, int64_t in_window) {
    if (!unsettled_.empty()) {
      settle();
    }
    RecordPtr record = record_of(tensor);
    record->meet(version_of(tensor), in_window);
    return record;
  }

  void settle() {
    if (unsettled_.empty()) {
      return;
    }
    const auto counters = std::move(unsettled_);
    unsettled_.clear();
    std::map<Record*, std::pair<int64_t, int64_t>> moved;  // the most, and the number of tensors
    for (const auto& one : counters) {
      auto& found = moved[one.record.get()];
      const int64_t by = static_cast<int64_t>(one.probe.counter.current_version()) - one.probe.version;
      found = {std::max(found.second ? found.first : by, by), found.second + 1};
    }
    for (const auto& [record, by] : moved) {
      record->version += std::min(by.first, by.second);
    }
  }

  void forget(const py::object& is_held) {
    earlier_ = std::move(registry_);
    registry_.clear();
    fresh_.clear();
    std::erase_if(earlier_, [](const auto& one) { return one.second->is_gone(); });
    kept_.emplace_back(is_held, std::move(recorded_));
    recorded_.clear();
    std::vector<std::pair<py::object, Vector<RecordPtr>>> kept;
    for (auto& one : kept_) {
      if (!one.first.is_none() && one.first().cast<bool>()) {
        kept.push_back(std::move(one));
      } else {
        break_circles(one.second);
      }
    }
    kept_ = std::move(kept);
  }

  // Lets go of storages that are gone. Their addresses can come again from here on.
  void sweep() {
    since_sweep_ = 0;
    std::erase_if(fresh_, [this](const RecordPtr& record) {
      if (!record->is_gone()) {
        return false;
      }
      registry_.erase(record->storage._unsafe_get_target());
      record->storage.reset();
      return true;
    });
  }

  void clear() {
    is_on = false;
    unsettled_.clear();
    forget(py::none());
    for (auto& one : kept_) {
      break_circles(one.second);
    }
    kept_.clear();
    earlier_.clear();
    owns_none();
  }

  void is_given(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      if (is_plain(tensor, where_) && tensor.nbytes() < tensor.storage().nbytes()) {
        earlier_[tensor.storage().unsafeGetStorageImpl()] =
            pooled<Record>(tensor.storage(), version_of(tensor));
      }
    }
  }

  py::list earlier_values() const {
    py::list found;
    for (const auto& one : earlier_) {
      if (one.second->value) {
        found.append(one.second->value());
      }
    }
    return found;
  }

  py::list registered() const {
    py::list found;
    for (const auto& one : registry_) {
      found.append(one.second);
    }
    return found;
  }

  void owns_none() {
    statics.clear();
    buffers.clear();
    own_ids.clear();
    own_.clear();
  }

  // A parameter or buffer. No other storage gets its address while it is known here.
  void owns(const at::Tensor& tensor, bool is_buffer) {
    const py::int_ key(reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()));
    const int64_t version = version_of(tensor);
    if (is_buffer) {
      buffers.add(key);
    }
    statics[key] = statics.contains(key) ? std::max(version, statics[key].cast<int64_t>()) : version;
    own_.push_back(tensor.storage().getWeakStorageImpl());
  }

  // Something of ours has raised, or was interrupted: recording ends, and Python is told where it asks next.
  void fails(const char* what) {
    is_on = false;
    failure = std::string(what).substr(0, std::string(what).find('\n'));
  }

  std::string take_failure() { return std::exchange(failure, std::string()); }

  void begin_window(bool is_within) {
    window += 1;
    within_op = is_within;
  }

  // -- an op ---------------------------------------------------------------------------------------------------

  static const Traits& traits_of(const c10::OperatorHandle& handle) {
    static auto& traits = *new std::unordered_map<const void*, Traits>();  // of all tapes; no destructor at exit
    const c10::OperatorName& name = handle.operator_name();
    const void* key = &handle.schema();
    const auto known = traits.find(key);
    if (known != traits.end() && known->second.trusted && known->second.name == name.name) {
      return known->second;
    }
    const py::tuple facts = helpers().attr("facts")(name.name, name.overload_name);
    std::vector<bool> is;
    for (const auto& one : facts[0]) {
      is.push_back(one.cast<bool>());
    }
    const auto written = facts[1].cast<std::vector<int32_t>>(), statistics = facts[2].cast<std::vector<int32_t>>();
    traits[key] = {name.name, is[0], is[1], is[2], is[3], is[4], is[5], is[6], is[7], is[8], is[9], written, statistics};
    return traits[key];
  }

  // Whether the call belongs to the op in which recording was switched on, which the first that does not ends.
  bool is_of_that_op(const Traits& facts, c10::ArrayRef<IValue> arguments) {
    if (facts.makes_alike || !has_tensors(arguments)) {
      return false;
    }
    bool below = false;
    try {
      const at::impl::RestorePythonTLSSnapshot as_on_entry;
      below = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::ADInplaceOrView);
    } catch (const c10::Error&) {  // a mode has come and gone
    }
    within_op = below;
    if (!below) {
      leave_snapshot();
    }
    return below;
  }

  static void leave_snapshot() {
    if (!c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      c10::impl::tls_set_dispatch_key_included(DispatchKey::PythonTLSSnapshot, false);
    }
  }

  void pass_over(const Traits& facts, c10::ArrayRef<IValue> arguments) {
    std::vector<int32_t> scratch;
    bool is_foreign = false;
    for (const auto& tensor : written_by(facts, arguments, scratch, is_foreign)) {
      if (is_plain(tensor, where_)) {
        if (auto record = known(tensor.storage().unsafeGetStorageImpl())) {
          record->was_written(nullptr);
        }
      }
    }
  }

  Running before(const c10::OperatorHandle& handle, const Traits& facts, c10::ArrayRef<IValue> given) {
    auto op = pooled<Op>(handle);
    op->usable = facts.trusted && !(facts.convolves && is_cuda() && at::globalContext().benchmarkCuDNN());
    op->uninitialised = facts.uninitialised;
    op->widening = facts.widening;
    op->grad_enabled = c10::GradMode::is_enabled();
    op->order = ++count;
    if (++since_sweep_ == OPS_BETWEEN_SWEEPS) {
      sweep();
    }
    if (listener) {
      listener(facts.name, handle.operator_name().overload_name);
    }
    op->arguments.resize(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      take(*op, given[i], static_cast<int32_t>(i));
    }
    op->switches = switches();
    if (facts.random) {
      take_generator(*op, given);
    }
    return {op, facts.may_write ? take_writes(op, facts, given) : std::vector<CounterBefore>()};
  }

  void after(Running& running, c10::ArrayRef<IValue> outputs) {
    const OpPtr& op = running.op;
    if (op->uninitialised && outputs.size() == 1 && outputs[0].isTensor() && running.written.empty()) {
      makes_empty(*op, outputs[0].toTensor());
    }
    if (!running.written.empty()) {
      unsettled_ = std::move(running.written);
      for (const auto& one : unsettled_) {
        if (std::find(op->writes.begin(), op->writes.end(), one.record) == op->writes.end()) {
          op->writes.push_back(one.record);
          one.record->was_written(op);
          recorded_.push_back(one.record);
        }
      }
    }
    int32_t position = 0;
    for (const auto& output : outputs) {
      if (output.isTensor()) {
        was_born(op, position++, output.toTensor());
      } else if (output.isList()) {
        for (const IValue& one : output.toListRef()) {
          if (one.isTensor()) {
            was_born(op, position, one.toTensor());
          }
          ++position;
        }
      } else {
        ++position;
      }
    }
  }

  c10::DeviceType where() const { return where_; }

  bool is_cuda() const { return where_ == c10::DeviceType::CUDA; }

  const Switches* switches() {
    const Switches now = switches_now(is_cuda());
    if (last_switches_ == nullptr || now != *last_switches_) {
      auto found = switch_states().find(now);
      if (found == switch_states().end()) {
        found = switch_states().emplace(now, helpers().attr("switch_state")(device_type)).first;
      }
      last_switches_ = &found->first;
    }
    return last_switches_;
  }

 private:
  static bool has_tensors(c10::ArrayRef<IValue> arguments) {
    return std::any_of(arguments.begin(), arguments.end(), [](const IValue& one) {
      return one.isTensor() ? one.toTensor().defined() : has_tensors_inside(one);
    });
  }

  static bool has_tensors_inside(const IValue& one) {
    if (!one.isList()) {
      return false;
    }
    const auto items = one.toListRef();
    return std::any_of(items.begin(), items.end(), [](const IValue& item) { return item.isTensor(); });
  }

  RecordPtr new_record(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    const auto* key = storage.unsafeGetStorageImpl();
    const auto before = earlier_.find(key);
    const bool was_there = before != earlier_.end();
    const py::int_ number(reinterpret_cast<uintptr_t>(key));
    const bool is_static = statics.contains(number);  // it may be one of `.data`, which has its own counter
    auto record =
        pooled<Record>(storage, is_static ? statics[number].cast<int64_t>() : version_of(tensor));
    record->was_there = was_there;
    const int64_t most = buffers.contains(number) ? MOST_BYTES : was_there && !is_static ? MOST_OTHERS_BYTES : 0;
    record->may_copy = static_cast<int64_t>(storage.nbytes()) <= most;
    registry_[key] = record;
    fresh_.push_back(record);
    return record;
  }

  void was_born(const OpPtr& op, int32_t position, const at::Tensor& output) {
    if (!output.defined() || !is_plain(output, where_)) {
      return;
    }
    const auto* key = output.storage().unsafeGetStorageImpl();
    auto& place = registry_[key];
    if (place) {
      return;
    }
    place = pooled<Record>(output.storage(), version_of(output));
    place->birth = op;
    place->seen_in = window;
    recorded_.push_back(place);
    fresh_.push_back(place);
    op->births.push_back({position, place});
  }

  // Takes an argument: a tensor by reference, anything else as it is.
  void take(Op& op, const IValue& given, int32_t argument) {
    if (given.isTensor()) {
      take_tensor(op, given.toTensor(), {argument, -1});
    } else if (has_tensors_inside(given)) {
      const auto items = given.toListRef();
      op.lists.push_back({argument, static_cast<int32_t>(items.size()), given.toList().elementType()});
      for (size_t i = 0; i < items.size(); ++i) {
        if (items[i].isTensor()) {
          take_tensor(op, items[i].toTensor(), {argument, static_cast<int32_t>(i)});
        }
      }
    } else if (is_value(given)) {
      op.arguments[argument] = given;
    } else {
      op.usable = false;
    }
  }

  static bool is_value(const IValue& given) {
    if (given.isList()) {
      const auto items = given.toListRef();
      return std::all_of(items.begin(), items.end(), is_value);
    }
    return given.isNone() || given.isScalar() || given.isDevice() || given.isString() || given.isGenerator() ||
        given.isIntList() || given.isDoubleList() || given.isBoolList();
  }

  void take_tensor(Op& op, const at::Tensor& tensor, Slot slot) {
    if (!tensor.defined()) {  // an optional argument, or an index that is left out
      return;
    }
    const bool is_number = tensor.dim() == 0 && is_plain(tensor, c10::DeviceType::CPU);
    if (is_number && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      op.numbers.push_back({slot, number_of(tensor)});
    } else if (is_plain(tensor, where_)) {
      RecordPtr record = met(tensor, window);
      std::optional<Probe> probe, source;
      if (!record->is_known()) {
        probe.emplace(tensor);
      }
      if (op.widening) {
        source.emplace(tensor);
      }
      const int64_t generation = record->generation();
      op.reads.push_back(
          {slot, std::move(record), generation, Geometry(tensor), std::move(probe), std::move(source)});
    } else if (is_number && is_cuda()) {  // it may change before a replay reads it
      op.constants.push_back(tensor.detach().clone());
      op.constant_slots.push_back(slot);
    } else {
      op.usable = false;
    }
  }

  static c10::Scalar number_of(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      case at::kLong:
        return *tensor.const_data_ptr<int64_t>();
      case at::kBool:
        return *tensor.const_data_ptr<bool>();
      default:
        return tensor.item();
    }
  }

  void take_generator(Op& op, c10::ArrayRef<IValue> given) {
    py::object generator = py::none();
    int64_t index = -1;
    for (const auto& one : given) {
      if (one.isGenerator()) {
        generator = py::cast(one.toGenerator());
        break;
      }
      const auto place = one.isTensor() && one.toTensor().defined() ? one.toTensor().device()
          : one.isDevice()                                         ? one.toDevice()
                                                                    : c10::Device(c10::kCPU);
      if (index < 0 && place.is_cuda() && place.has_index()) {
        index = place.index();
      }
    }
    op.generator = helpers().attr("generator")(generator, device_type, index);
    op.state = helpers().attr("state_of")(op.generator);
  }

  // The arguments whose contents a call changes, also when it runs again. Running statistics have their positions in
  // `scratch`; they are written if they are not the model's, which is `foreign`.
  std::vector<at::Tensor> written_by(
      const Traits& facts, c10::ArrayRef<IValue> given, std::vector<int32_t>& scratch, bool& foreign) const {
    std::vector<at::Tensor> found;
    const bool by_batch = !(given.size() > 5 && given[5].isBool() && !given[5].toBool());
    for (const int32_t position : facts.statistics) {
      if (!by_batch || !given[position].isTensor() || !given[position].toTensor().defined()) {
        continue;
      }
      scratch.push_back(position);
      const at::Tensor& tensor = given[position].toTensor();
      if (!statics.contains(py::int_(reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl())))) {
        found.push_back(tensor);
        foreign = true;
      }
    }
    if (facts.cudnn_rnn) {  // it does not declare that dropout between its layers advances a generator
      if (given[11].toDouble() > 0 && given[12].toBool() && given.back().isTensor()) {
        found.push_back(given.back().toTensor());
      }
      return found;
    }
    for (const int32_t position : facts.written) {
      const IValue& one = given[position];
      if (one.isTensor() && one.toTensor().defined()) {
        const auto* impl = one.toTensor().unsafeGetTensorImpl();
        const bool is_scratch = std::any_of(scratch.begin(), scratch.end(), [&](int32_t at) {
          return given[at].toTensor().unsafeGetTensorImpl() == impl;
        });
        if (!is_scratch) {
          found.push_back(one.toTensor());
        }
      } else if (one.isList()) {
        for (const IValue& item : one.toListRef()) {
          if (item.isTensor() && item.toTensor().defined()) {
            found.push_back(item.toTensor());
          }
        }
      }
    }
    return found;
  }

  std::vector<CounterBefore> take_writes(const OpPtr& op, const Traits& facts, c10::ArrayRef<IValue> given) {
    std::vector<CounterBefore> counters;
    std::vector<int32_t> scratch;
    bool is_foreign = false;
    const auto written = written_by(facts, given, scratch, is_foreign);
    op->usable = op->usable && !is_foreign;
    for (const int32_t position : scratch) {
      const at::Tensor& tensor = given[position].toTensor();
      std::erase_if(op->reads, [&](const View& view) { return view.slot.argument == position; });
      op->scratches.push_back(
          {{position, -1}, Sizes(tensor.sizes().begin(), tensor.sizes().end()), tensor.scalar_type(), tensor.device()});
    }
    if (facts.overwriting && given[0].isTensor() && covers_storage(given[0].toTensor())) {
      op->overwrites = record_of(given[0].toTensor()).get();
    }
    for (const auto& tensor : written) {
      if (is_plain(tensor, where_)) {
        counters.push_back({record_of(tensor), Probe(tensor)});
      }
    }
    for (const auto& one : counters) {
      if (!one.record->birth && one.record->is_awaited()) {
        one.record->keep_copy(one.record->generation());
      }
    }
    return counters;
  }

  bool covers_storage(const at::Tensor& tensor) const {
    return tensor.defined() && is_plain(tensor, where_) &&
        static_cast<size_t>(tensor.nbytes()) == tensor.storage().nbytes() &&
        at::has_internal_overlap(tensor) == at::MemOverlap::No;
  }

  // An allocation of the same geometry reads no tensor, unlike `empty_like`.
  void makes_empty(Op& op, const at::Tensor& made) {
    static const auto empty = c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty_strided", "");
    op.handle = empty;
    op.reads.clear();
    op.lists.clear();
    op.numbers.clear();
    op.constants.clear();
    op.constant_slots.clear();
    op.arguments = {
        made.sizes().vec(), made.strides().vec(), made.scalar_type(), IValue(), made.device(), IValue()};
  }

  static void break_circles(Vector<RecordPtr>& records) {
    for (auto& record : records) {
      record->birth.reset();
      record->writes.clear();
    }
    records.clear();
  }

  static constexpr int64_t MOST_BYTES = 1 << 24, MOST_OTHERS_BYTES = 1 << 20;  // as in host_copies.py
  c10::DeviceType where_;
  template <typename K, typename V>
  using Map = std::unordered_map<K, V, std::hash<K>, std::equal_to<K>, Pooled<std::pair<const K, V>>>;
  Map<const c10::StorageImpl*, RecordPtr> registry_, earlier_;
  static constexpr int OPS_BETWEEN_SWEEPS = 32;
  int since_sweep_ = 0;
  Vector<RecordPtr> recorded_, fresh_;  // those of this step; of these the ones that were not gone
  std::vector<std::pair<py::object, Vector<RecordPtr>>> kept_;
  std::vector<CounterBefore> unsettled_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> own_;
  const Switches* last_switches_ = nullptr;
};

}  // namespace pooch
