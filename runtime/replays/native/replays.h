// Running recorded ops again, and bringing values back: the functions of these names in replay.py and recipes.py.

#pragma once

#include "recipes.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/LegacyVmapMode.h>
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/Exceptions.h>

namespace pooch {

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
    std::optional<Block> outside;
    if (at::functorch::functorchTLSAccessor() || at::impl::VmapMode::current_vmap_level() > 0) {  // it was used here
      outside.emplace(helpers().attr("outside_transforms")());
    }
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
      const IValue left_out = list.of->kind() == c10::TypeKind::TensorType ? IValue(at::Tensor()) : IValue();
      lists.emplace_back(list.argument, std::vector<IValue>(list.size, left_out));
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
    try {
      helpers().attr("set_state_of")(op.generator, op.state);
      const py::gil_scoped_release without_lock;
      op.handle.callBoxed(stack);
    } catch (...) {
      set_back(op.generator, now);
      throw;
    }
    set_back(op.generator, now);
  }

  // Tried twice: what raises there, or an interrupt, must not change what the step draws next.
  static void set_back(const py::object& generator, const py::object& state) {
    const py::object set_state_of = helpers().attr("set_state_of");
    try {
      set_state_of(generator, state);
    } catch (const py::error_already_set&) {
      set_state_of(generator, state);
      throw;
    }
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
  // `resident` gives the filled storage of a value.
  Replay(Tape& tape, const py::object& value, const std::function<c10::Storage(const py::object&)>& resident,
         bool from_copies)
      : where_(tape.where()), root_(value.attr("record").cast<RecordPtr>()), value_(value) {
    tape.sweep();
    closure_ = closure_of(root_, value.attr("generation").cast<int64_t>(), true);
    for (const auto& leaf : closure_.leaves) {
      const Need need{leaf.record.get(), leaf.generation};
      if (!leaf.value.is_none()) {
        there_.emplace(need, resident(leaf.value));
      } else if (leaf.copied) {
        if (!from_copies) {
          not_replayable(WRITTEN_SINCE, leaf.record);
        }
        there_.emplace(need, leaf.record->copies.at(leaf.generation).storage());
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

  // The values that come back, with what was rebuilt of each.
  std::vector<std::pair<py::object, c10::Storage>> rebuilt() {
    std::vector<std::pair<RecordPtr, py::object>> targets{{root_, value_}};
    targets.insert(targets.end(), closure_.targets.begin(), closure_.targets.end());
    std::set<Record*> keep;
    for (const auto& one : targets) {
      keep.insert(one.first.get());
    }
    auto built = Run(where_, closure_.ops, there_, std::move(keep)).run();
    std::vector<std::pair<py::object, c10::Storage>> back;
    for (const auto& [record, target] : targets) {
      back.emplace_back(target, built.at(record.get()));
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
