// What a replay needs, and running it: the functions of these names in replay.py and running.py.

#pragma once

#include "tape.h"

#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/Exceptions.h>

namespace pooch {

using Need = std::pair<Record*, int64_t>;
constexpr const char* WRITTEN_SINCE = "an input of the replay was written in place since it was read";

// Raises NotReplayable, of Python.
[[noreturn]] inline void not_replayable(const char* reason, const RecordPtr& record = nullptr) {
  const py::object kind = helpers().attr("NotReplayable");
  PyErr_SetObject(kind.ptr(), kind(reason, record).ptr());
  throw py::error_already_set();
}

struct Leaf {
  RecordPtr record;
  int64_t generation;
  py::object value;  // None for a storage found in place
  bool copied = false;
};

struct Closure {
  std::map<int64_t, OpPtr> ops;
  std::vector<Leaf> leaves;
  std::map<Need, size_t> places;
  std::vector<RecordPtr> rebuilt;
  std::set<Record*> owned;
  std::vector<std::pair<RecordPtr, py::object>> targets;

  void take_copy(Leaf& leaf) {
    if (!leaf.record->copies.count(leaf.generation)) {
      not_replayable(WRITTEN_SINCE, leaf.record);
    }
    leaf.copied = true;
  }

  void check() {
    for (const auto& [order, op] : ops) {
      for (const auto& written : op->writes) {
        if (!owned.count(written.get())) {
          not_replayable("running it again would overwrite another tensor");
        }
      }
    }
    for (const auto& [order, op] : ops) {
      for (const auto& view : op->reads) {
        const auto place = view.probe ? places.find({view.record.get(), view.generation}) : places.end();
        if (place != places.end() && !view.probe->unwritten()) {
          take_copy(leaves[place->second]);
        }
      }
    }
  }
};

inline Closure closure_of(const RecordPtr& root, int64_t generation, bool follow_recipes) {
  Closure closure;
  std::vector<std::pair<RecordPtr, int64_t>> pending{{root, generation}};
  std::set<Need> seen;
  std::vector<OpPtr> writers;
  while (!pending.empty()) {
    const auto [record, wanted] = pending.back();
    pending.pop_back();
    if (!seen.insert({record.get(), wanted}).second) {
      continue;
    }
    py::object value = record == root ? py::object(py::none()) : record->value_at(wanted);
    const auto add_leaf = [&, record = record, wanted = wanted](py::object of) {
      closure.places[{record.get(), wanted}] = closure.leaves.size();
      closure.leaves.push_back({record, wanted, std::move(of)});
    };
    if (!value.is_none()) {
      if (!(follow_recipes && value.attr("waits_for_replay").cast<bool>())) {
        add_leaf(value);
        continue;
      }
      closure.targets.emplace_back(record, value);
    }
    const bool is_kept = record->kept == wanted && value.is_none() && record != root;
    if (is_kept || !record->writers_up_to(wanted, writers)) {
      if (record == root || !value.is_none()) {
        not_replayable("an op that made it was not recorded, or cannot be run again");
      }
      add_leaf(py::none());
      if (wanted != record->generation()) {
        closure.take_copy(closure.leaves.back());
      }
      continue;
    }
    if (closure.owned.insert(record.get()).second) {
      closure.rebuilt.push_back(record);
    }
    for (const auto& op : writers) {
      closure.ops[op->order] = op;
      for (const auto& view : op->reads) {
        if (view.record != record) {
          pending.emplace_back(view.record, view.generation);
        }
      }
    }
  }
  closure.check();
  return closure;
}

inline c10::Storage storage_of(const RecordPtr& record) {
  auto storage = record->held();
  if (!storage) {
    not_replayable("a tensor that it needs is gone");
  }
  return c10::Storage(std::move(storage));
}

// Everything that the replay of one value needs to stay.
struct Recipe : std::enable_shared_from_this<Recipe> {
  RecordPtr record;
  int64_t generation;
  std::vector<py::object> values;
  std::vector<c10::Storage> storages;

  Recipe(RecordPtr root, int64_t at) : record(std::move(root)), generation(at) {}

  void refresh() {
    Closure closure = closure_of(record, generation, false);
    while (keeps_instead(closure)) {
      closure = closure_of(record, generation, false);
    }
    std::vector<py::object> found;
    std::vector<c10::Storage> in_place;
    for (const auto& leaf : closure.leaves) {
      if (!leaf.value.is_none()) {
        found.push_back(leaf.value);
        continue;
      }
      in_place.push_back(storage_of(leaf.record));
      leaf.record->wait_for_value(shared_from_this());
      if (leaf.record->may_copy) {
        leaf.record->keep_copy(leaf.generation);
      }
    }
    for (const auto& one : closure.rebuilt) {
      if (one != record) {
        one->wait_for_value(shared_from_this());
      }
    }
    values = std::move(found);
    storages = std::move(in_place);
  }

 private:
  // Whether what was made of inputs that are gone is from now on kept in their place, because it is still there.
  bool keeps_instead(const Closure& closure) const {
    std::set<Record*> gone;
    for (const auto& leaf : closure.leaves) {
      if (leaf.value.is_none() && !leaf.record->held()) {
        gone.insert(leaf.record.get());
      }
    }
    if (gone.empty()) {
      return false;
    }
    std::multimap<int64_t, std::pair<Op*, Record*>> made;
    for (const auto& one : closure.rebuilt) {
      made.emplace(one->birth->order, std::make_pair(one->birth.get(), one.get()));
      for (const auto& write : one->writes) {
        if (write) {
          made.emplace(write->order, std::make_pair(write.get(), one.get()));
        }
      }
    }
    bool is_new = false;
    for (const auto& [order, by] : made) {
      const auto& [op, one] = by;
      const bool reads_gone = std::any_of(
          op->reads.begin(), op->reads.end(), [&](const View& view) { return gone.count(view.record.get()) > 0; });
      if (one == record.get() || !closure.ops.count(order) || !reads_gone) {
        continue;
      }
      if (!one->held()) {
        gone.insert(one);
      } else if (one->kept != one->generation()) {
        one->kept = one->generation();
        is_new = true;
      }
    }
    return is_new;
  }
};

// The storage has become a saved value: recipes that read it now claim the value instead of what they held.
inline void attach(Record& record, const py::object& value, int64_t generation, Probe probe) {
  record.value = py::reinterpret_steal<py::object>(PyWeakref_NewRef(value.ptr(), nullptr));
  record.value_generation = generation;
  record.value_probe.emplace(std::move(probe));
  const auto waiting = std::move(record.waiting);
  record.waiting.clear();
  for (const auto& reference : waiting) {
    if (const auto recipe = reference.lock()) {
      try {
        recipe->refresh();
      } catch (py::error_already_set& error) {  // the replay reports what was written
        if (!error.matches(helpers().attr("NotReplayable"))) {
          throw;
        }
      }
    }
  }
}

// What a recorded cast or clone has read to make the storage; null if that was written since, or is gone.
inline const View* source_of(const Record& record) {
  const OpPtr& maker = record.birth;
  if (!maker || !record.writes.empty() || !maker->widening || maker->reads.size() != 1) {
    return nullptr;
  }
  const View& read = maker->reads[0];
  const bool is_there = read.source && read.record->held();
  return is_there && read.source->unwritten() && read.record->generation() == read.generation ? &read : nullptr;
}

// -- running -----------------------------------------------------------------------------------------------------

// A block of Python's.
class Block {
 public:
  explicit Block(py::object block) : block_(std::move(block)) { block_.attr("__enter__")(); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    try {
      block_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the end of a replay");
    }
  }
  const py::object* operator->() const { return &block_; }

 private:
  py::object block_;
};

// A block without autocast.
class NotCast {
 public:
  explicit NotCast(c10::DeviceType where) : where_(where), before_(at::autocast::is_autocast_enabled(where)) {
    at::autocast::set_autocast_enabled(where_, false);
  }
  NotCast(const NotCast&) = delete;
  NotCast& operator=(const NotCast&) = delete;
  ~NotCast() { at::autocast::set_autocast_enabled(where_, before_); }

 private:
  c10::DeviceType where_;
  bool before_;
};

using Ops = std::map<int64_t, OpPtr>;
using Contents = std::map<Need, c10::Storage>;

class Run {
 public:
  // Runs the ops in order, from the contents that are `there`. Gives the storages of the records to `keep`.
  Run(c10::DeviceType where, const Ops& ops, const Contents& there, std::set<Record*> keep)
      : where_(where), ops_(ops), there_(there), keep_(std::move(keep)) {}

  std::map<Record*, c10::Storage> run() {
    for (const auto& [order, op] : ops_) {
      for (const auto& view : op->reads) {
        last_use_[view.record.get()] = order;
      }
    }
    const Block outside(helpers().attr("outside_transforms")());
    const NotCast not_cast(where_);
    const c10::AutoGradMode with_gradients(c10::GradMode::is_enabled());  // behind the replay as before
    std::optional<Block> switches;
    for (const auto& [order, op] : ops_) {
      turn(switches, op->switches);
      run(*op);
    }
    return std::move(built_);
  }

 private:
  // Sets the switches that are not as they were.
  void turn(std::optional<Block>& block, const Switches* wanted) {
    if (wanted == now_) {
      return;
    }
    if (switches_now(where_ == at::kCUDA) != *wanted) {
      if (!block) {
        block.emplace(helpers().attr("SwitchesAsRecorded")());
      }
      (*block)->attr("turn")(switch_states().at(*wanted));
    }
    now_ = wanted;
  }

  void run(const Op& op) {
    c10::GradMode::set_enabled(op.grad_enabled);
    Stack stack = arguments(op);
    call(op, stack);
    for (const auto& birth : op.births) {
      Record* record = birth.record.get();
      const auto last = last_use_.find(record);
      if (keep_.count(record) || (last != last_use_.end() && last->second > op.order)) {
        built_[record] = output(stack, birth.position).storage();
      }
    }
    stack.clear();
    for (const auto& view : op.reads) {
      Record* record = view.record.get();
      if (last_use_[record] == op.order && !keep_.count(record)) {
        built_.erase(record);
      }
    }
  }

  Stack arguments(const Op& op) {
    Stack stack(op.arguments.begin(), op.arguments.end());
    std::vector<std::pair<int32_t, std::vector<IValue>>> lists;
    for (const auto& list : op.lists) {
      lists.emplace_back(list.argument, std::vector<IValue>(list.size));
    }
    const auto put = [&](Slot slot, at::Tensor tensor) {
      if (slot.element < 0) {
        stack[slot.argument] = std::move(tensor);
        return;
      }
      for (auto& [argument, items] : lists) {
        if (argument == slot.argument) {
          items[slot.element] = std::move(tensor);
        }
      }
    };
    for (const auto& view : op.reads) {
      put(view.slot, view.geometry.on(content(op, view)));
    }
    for (const auto& scratch : op.scratches) {
      put(scratch.slot, at::ones(scratch.sizes, at::TensorOptions(scratch.dtype).device(scratch.device)));
    }
    for (const auto& number : op.numbers) {
      put(number.slot, at::native::wrapped_scalar_tensor(number.value));
    }
    for (size_t i = 0; i < op.constants.size(); ++i) {
      put(op.constant_slots[i], op.constants[i]);
    }
    for (size_t i = 0; i < lists.size(); ++i) {
      c10::impl::GenericList list(op.lists[i].of);
      for (auto& item : lists[i].second) {
        list.push_back(std::move(item));
      }
      stack[lists[i].first] = std::move(list);
    }
    return stack;
  }

  const c10::Storage& content(const Op& op, const View& view) const {
    Record* record = view.record.get();
    // The op only writes the replay's own storages, never a saved value.
    const bool owned = std::find(op.writes.begin(), op.writes.end(), view.record) != op.writes.end();
    const auto found = owned ? there_.end() : there_.find({record, view.generation});
    return found == there_.end() ? built_.at(record) : found->second;
  }

  void call(const Op& op, Stack& stack) {
    if (!op.state) {
      const py::gil_scoped_release without_lock;
      op.handle.callBoxed(stack);
      return;
    }
    const py::object now = helpers().attr("state_of")(op.generator);
    helpers().attr("set_state_of")(op.generator, op.state);
    try {
      const py::gil_scoped_release without_lock;
      op.handle.callBoxed(stack);
    } catch (...) {
      helpers().attr("set_state_of")(op.generator, now);
      throw;
    }
    helpers().attr("set_state_of")(op.generator, now);
  }

  static at::Tensor output(const Stack& stack, int32_t position) {
    for (const IValue& one : stack) {
      if (one.isList()) {
        const auto items = one.toListRef();
        if (position < static_cast<int32_t>(items.size())) {
          return items[position].toTensor();
        }
        position -= static_cast<int32_t>(items.size());
      } else if (position-- == 0) {
        return one.toTensor();
      }
    }
    throw std::out_of_range("a replayed op has fewer results than when it was recorded");
  }

  c10::DeviceType where_;
  const Ops& ops_;
  const Contents& there_;
  std::set<Record*> keep_;
  std::map<Record*, int64_t> last_use_;
  std::map<Record*, c10::Storage> built_;
  const Switches* now_ = nullptr;
};

// The call, with torch's errors as those of Python.
template <typename Call>
auto translated(Call call) {
  try {
    return call();
  } catch (py::error_already_set&) {
    throw;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}

// Brings a value, and every saved value on the way that waits for a replay, back.
class Replay {
 public:
  Replay(const Tape& tape, const py::object& value, const py::function& resident, bool from_copies)
      : where_(tape.where()), root_(value.attr("record").cast<RecordPtr>()), value_(value) {
    closure_ = closure_of(root_, value.attr("generation").cast<int64_t>(), true);
    for (const auto& leaf : closure_.leaves) {
      const Need need{leaf.record.get(), leaf.generation};
      if (!leaf.value.is_none()) {
        there_.emplace(need, torch::createStorage(resident(leaf.value).ptr()));
      } else if (leaf.copied) {
        if (!from_copies) {
          not_replayable(WRITTEN_SINCE, leaf.record);
        }
        there_.emplace(need, torch::createStorage(leaf.record->copies.at(leaf.generation).attr("storage")().ptr()));
      } else {
        c10::Storage storage = storage_of(leaf.record);
        if (storage.nbytes() == 0) {
          not_replayable("a sharded weight that it needs is not gathered");
        }
        there_.emplace(need, std::move(storage));
      }
    }
  }

  // The bytes that the ops read of storages that the step has not made, each once: records, and tensors in place.
  py::list parts() const {
    std::vector<std::pair<RecordPtr, c10::Storage>> order;
    std::map<Record*, Pieces> extents;
    for (const auto& [number, op] : closure_.ops) {
      for (const auto& view : op->reads) {
        const auto place = there_.find({view.record.get(), view.generation});
        const bool is_written = std::find(op->writes.begin(), op->writes.end(), view.record) != op->writes.end();
        if (view.record->birth || place == there_.end() || is_written) {
          continue;
        }
        auto& pieces = extents[view.record.get()];
        if (pieces.empty()) {
          order.emplace_back(view.record, place->second);
        }
        pieces.insert(extent(view));
      }
    }
    py::list found;
    for (const auto& [record, storage] : order) {
      for (const auto& [begin, end] : merged(extents.at(record.get()))) {
        found.append(py::make_tuple(record, Geometry(begin, end).on(storage)));
      }
    }
    return found;
  }

  py::list run() {
    std::vector<std::pair<RecordPtr, py::object>> targets{{root_, value_}};
    targets.insert(targets.end(), closure_.targets.begin(), closure_.targets.end());
    std::set<Record*> keep;
    for (const auto& one : targets) {
      keep.insert(one.first.get());
    }
    auto built = Run(where_, closure_.ops, there_, std::move(keep)).run();
    py::list back;
    for (const auto& [record, target] : targets) {
      target.attr("came_back")(as_python(built.at(record.get())));
      back.append(target);
    }
    return back;
  }

 private:
  using Pieces = std::set<std::pair<int64_t, int64_t>>;

  // First byte on the storage, and the byte after the last.
  static std::pair<int64_t, int64_t> extent(const View& view) {
    const Geometry& at = view.geometry;
    const auto item_bytes = static_cast<int64_t>(c10::elementSize(at.dtype));
    int64_t count = 1;
    for (size_t i = 0; i < at.sizes.size(); ++i) {
      count += (at.sizes[i] - 1) * at.strides[i];
    }
    const bool is_empty = std::find(at.sizes.begin(), at.sizes.end(), 0) != at.sizes.end();
    return {at.offset * item_bytes, (at.offset + (is_empty ? 0 : count)) * item_bytes};
  }

  static std::vector<std::pair<int64_t, int64_t>> merged(const Pieces& pieces) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const auto& [begin, end] : pieces) {
      if (!found.empty() && begin < found.back().second) {
        found.back().second = std::max(end, found.back().second);
      } else {
        found.emplace_back(begin, end);
      }
    }
    return found;
  }

  c10::DeviceType where_;
  RecordPtr root_;
  py::object value_;
  Closure closure_;
  Contents there_;
};

// The storage that one cast or clone has made, made again from its source.
inline py::object made_again(const RecordPtr& record) {
  const View* read = source_of(*record);
  if (read == nullptr) {
    not_replayable("its source was written since, or is gone", record);
  }
  const Ops ops{{record->birth->order, record->birth}};
  const c10::Storage source = storage_of(read->record);
  const Contents there{{{read->record.get(), read->generation}, source}};
  return as_python(Run(source.device().type(), ops, there, {record.get()}).run().at(record.get()));
}

}  // namespace pooch
