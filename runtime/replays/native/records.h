// What recording knows: ops, storages and contents, as the classes of these names in replay.py.

#pragma once

#include "host_copy.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Scalar.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <sys/mman.h>

#include <array>
#include <map>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <vector>

namespace pooch {

namespace py = pybind11;

// What is asked of Python, by the names in compiled_tape.py.
inline py::object& helpers() {
  static auto& found = *new py::object();  // no destructor at exit
  return found;
}

inline py::object as_python(c10::Storage storage) {
  return py::reinterpret_steal<py::object>(torch::createPyObject(storage));
}

// Memory of what stays for a step, apart from the C library's heap: there it would lie between tensors, and split the
// gaps that they leave. It is taken and given back under the interpreter's lock.
class Pages : public std::pmr::memory_resource {
  void* do_allocate(size_t size, size_t) override {
    void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
      throw std::bad_alloc();
    }
    return found;
  }
  void do_deallocate(void* at, size_t size, size_t) override { munmap(at, size); }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
};

inline std::pmr::memory_resource& pool() {
  static auto& pages = *new Pages();
  static auto& found = *new std::pmr::unsynchronized_pool_resource({64, 1 << 14}, &pages);
  return found;
}

template <typename T>
struct Pooled {
  using value_type = T;
  Pooled() = default;
  template <typename U>
  Pooled(const Pooled<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(pool().allocate(count * sizeof(T), alignof(T))); }
  void deallocate(T* at, size_t count) { pool().deallocate(at, count * sizeof(T), alignof(T)); }
  template <typename U>
  bool operator==(const Pooled<U>&) const {
    return true;
  }
};

template <typename T>
using Vector = std::vector<T, Pooled<T>>;

template <typename T, typename... Given>
std::shared_ptr<T> pooled(Given&&... given) {
  return std::allocate_shared<T>(Pooled<T>(), std::forward<Given>(given)...);
}

struct Op;
struct Record;
struct Recipe;
using RecordPtr = std::shared_ptr<Record>;
using OpPtr = std::shared_ptr<Op>;
using Sizes = c10::SmallVector<int64_t, 5>;

// A version counter, and the version that was read.
struct Probe {
  c10::VariableVersion counter;
  int64_t version;

  explicit Probe(const at::Tensor& tensor)
      : counter(tensor.unsafeGetTensorImpl()->version_counter()), version(counter.current_version()) {}
  Probe(c10::VariableVersion of, int64_t at) : counter(std::move(of)), version(at) {}
  bool unwritten() const { return static_cast<int64_t>(counter.current_version()) == version; }
};

inline int64_t version_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

struct Geometry {
  c10::ScalarType dtype;
  Sizes sizes, strides;
  int64_t offset;

  explicit Geometry(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        sizes(tensor.sizes().begin(), tensor.sizes().end()),
        strides(tensor.strides().begin(), tensor.strides().end()),
        offset(tensor.storage_offset()) {}

  Geometry(c10::ScalarType of, Sizes shape, Sizes stride, int64_t first)
      : dtype(of), sizes(std::move(shape)), strides(std::move(stride)), offset(first) {}

  // Bytes of a storage.
  Geometry(int64_t begin, int64_t end) : dtype(at::kByte), sizes{end - begin}, strides{1}, offset(begin) {}

  at::Tensor on(const c10::Storage& storage) const {
    c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, at::kStrided, storage.device()));
    at::Tensor tensor =
        at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
  }
};

// Where a tensor is among an op's arguments: `element` of a list, or -1.
struct Slot {
  int32_t argument, element;
};

struct View {
  Slot slot;
  RecordPtr record;
  int64_t generation;
  Geometry geometry;
  std::optional<Probe> probe, source;
};

// Stands for running statistics: a replay gives the op a temporary tensor in their place.
struct Scratch {
  Slot slot;
  Sizes sizes;
  c10::ScalarType dtype;
  c10::Device device;
};

struct Number {
  Slot slot;
  c10::Scalar value;
};

// An argument that is a list with tensors.
struct List {
  int32_t argument, size;
  c10::TypePtr of;
};

struct Birth {
  int32_t position;
  RecordPtr record;
};

// torch's switches that decide which kernel an op runs.
using Switches = std::array<int64_t, 28>;

struct Op {
  int64_t order;
  c10::OperatorHandle handle;
  bool grad_enabled, usable, widening;
  bool uninitialised = false;
  Vector<c10::IValue> arguments;  // a tensor or a list with tensors is none
  Vector<List> lists;
  Vector<at::Tensor> constants;  // numbers of the host, copied
  Vector<Slot> constant_slots;
  Vector<Number> numbers;
  Vector<View> reads;
  Vector<Scratch> scratches;
  Vector<Birth> births;
  Vector<RecordPtr> writes;
  Record* overwrites = nullptr;
  py::object generator, state;  // of Python; null if it is not random
  const Switches* switches = nullptr;

  explicit Op(c10::OperatorHandle of) : handle(std::move(of)) {}
};

struct Record {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t version;
  bool was_there = false, broken = false, packed = false, may_copy = false;
  OpPtr birth;
  Vector<OpPtr> writes;  // null for one that was not recorded
  int64_t seen_in = 0;
  py::object value;  // a weak reference to the saved value, or null
  int64_t value_generation = 0;
  std::optional<Probe> value_probe;
  std::optional<int64_t> save_point;
  int64_t kept = -1;  // the generation that recipes keep in place, because what it was made of is gone
  std::map<int64_t, HostCopy> copies;
  Vector<std::weak_ptr<Recipe>> waiting;

  Record(const c10::Storage& of, int64_t at)
      : storage(of.getWeakStorageImpl()), version(at) {}

  int64_t generation() const { return static_cast<int64_t>(writes.size()); }

  void meet(int64_t found, int64_t window) {
    if (found < version && !found) {
      return;
    }
    const bool unbroken = packed || (window && window == seen_in);
    if (found > version || (found < version && !unbroken)) {
      was_written(nullptr);
      version = found;
    }
    seen_in = window;
  }

  void was_written(const OpPtr& op) {
    writes.push_back(op);
    broken = broken || !op || !op->usable;
  }

  bool overwritten(int64_t upto) const {
    return upto >= 1 && !writes.empty() && writes[0] && writes[0]->overwrites == this;
  }

  bool is_known() const {
    return birth && birth->usable && !broken && (!birth->uninitialised || overwritten(generation()));
  }

  // The ops that make this content from nothing; false if one was not recorded or cannot be run again.
  bool writers_up_to(int64_t upto, std::vector<OpPtr>& found) const {
    if (!birth || !birth->usable || (birth->uninitialised && !overwritten(upto))) {
      return false;
    }
    found.assign(1, birth);
    for (int64_t i = 0; i < upto && i < generation(); ++i) {
      if (!writes[i] || !writes[i]->usable) {
        return false;
      }
      found.push_back(writes[i]);
    }
    return true;
  }

  bool is_awaited() const {
    for (const auto& one : waiting) {
      if (!one.expired()) {
        return true;
      }
    }
    return false;
  }

  void wait_for_value(const std::shared_ptr<Recipe>& recipe) {
    for (const auto& one : waiting) {
      if (one.lock() == recipe) {
        return;
      }
    }
    waiting.push_back(recipe);
  }

  // The saved value, if it still exists and has exactly this content; else None.
  py::object value_at(int64_t wanted) const {
    if (!value || value_generation != wanted || !value_probe || !value_probe->unwritten()) {
      return py::none();
    }
    return value();
  }

  // Whether nobody has the storage or its saved value. What refers to it keeps a block in the C library's heap.
  bool is_gone() const { return storage.expired() && (!value || value().is_none()); }

  // Null if it is gone.
  c10::intrusive_ptr<c10::StorageImpl> held() const { return storage.lock(); }

  // Its present content stays available, as this generation.
  void keep_copy(int64_t of) {
    auto there = held();
    if (there && !copies.count(of)) {
      copies.emplace(of, c10::Storage(std::move(there)));
    }
  }
};

}  // namespace pooch
