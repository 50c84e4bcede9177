// What a replay needs: the classes and functions of these names in recipes.py.

#pragma once

#include "tape.h"

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
  Vector<py::object> values;
  Vector<c10::Storage> storages;

  Recipe(RecordPtr root, int64_t at) : record(std::move(root)), generation(at) {}

  void refresh() {
    Closure closure = closure_of(record, generation, false);
    while (keeps_instead(closure)) {
      closure = closure_of(record, generation, false);
    }
    Vector<py::object> found;
    Vector<c10::Storage> in_place;
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

// Raises what has ended recording, once: of our own code, or a user's interrupt amid that.
inline void check(Tape* tape) {
  const std::string failure = tape->take_failure();
  if (!failure.empty()) {
    const bool is_interrupt = failure == INTERRUPTED;
    PyErr_SetString(is_interrupt ? PyExc_KeyboardInterrupt : PyExc_RuntimeError, is_interrupt ? "" : failure.c_str());
    throw py::error_already_set();
  }
}

inline std::shared_ptr<Recipe> recipe_of(Tape* tape, const RecordPtr& record, int64_t generation) {
  check(tape);
  auto recipe = pooled<Recipe>(record, generation);
  recipe->refresh();
  return recipe;
}

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

}  // namespace pooch
