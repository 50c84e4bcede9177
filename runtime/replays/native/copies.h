// Copies between an accelerator and the host, each queued with its waits by one call, as transfers.py does it.

#pragma once

#include "names.h"
#include "tape.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>

namespace pooch {

inline c10::Stream stream_of(const py::handle& given) {
  const auto* stream = reinterpret_cast<const THPStream*>(given.ptr());
  return c10::Stream::unpack3(
      stream->stream_id, static_cast<c10::DeviceIndex>(stream->device_index),
      static_cast<c10::DeviceType>(stream->device_type));
}

using SpareEvents = std::shared_ptr<std::vector<c10::Event>>;

// One queued copy, as Copy of transfers.py. `seen` are the user's streams; `storage` is None once they have waited.
class QueuedCopy {
 public:
  QueuedCopy(SpareEvents spare, c10::Event ended, py::object storage, py::dict seen)
      : storage(std::move(storage)), spare_(std::move(spare)), ended_(std::move(ended)), seen_(std::move(seen)) {}
  QueuedCopy(const QueuedCopy&) = delete;
  QueuedCopy& operator=(const QueuedCopy&) = delete;
  ~QueuedCopy() {
    try {
      if (!storage.is_none()) {
        wait();
      }
      spare_->push_back(std::move(ended_));
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      PyErr_WriteUnraisable(seen_.ptr());
    }
  }

  bool done() const { return ended_.query(); }

  double wait() {
    for (const auto& one : seen_) {
      ended_.block(stream_of(one.second));
    }
    storage = py::none();
    return 0.0;
  }

  py::object storage;

 private:
  SpareEvents spare_;
  c10::Event ended_;
  py::dict seen_;
};

// Queues copies of an AcceleratorDevice on its two streams.
class Copies {
 public:
  // `parts` are those of the device; `memcpy_async` is the address of `cudaMemcpyAsync`, or 0 where tensors are copied.
  Copies(py::object device, py::object parts, uintptr_t memcpy_async)
      : device_(std::move(device)),
        parts_(std::move(parts)),
        outward_(device_.attr("outward").attr("stream"), memcpy_async != 0),
        inward_(device_.attr("inward").attr("stream"), memcpy_async != 0),
        memcpy_async_(reinterpret_cast<MemcpyAsync>(memcpy_async)) {}

  // The device's compute stream, which `out` and `back` are given.
  py::object compute() const { return attribute(device_, names().compute); }

  // The copies are queued behind what the user's streams have queued so far. None where the host has no place for them.
  py::object out(const py::object& storage, int64_t offset, const py::object& compute) {
    const py::dict seen = attribute(compute, names().seen);
    return queued(storage, offset, seen, seen, outward_, true);
  }

  // A new storage of the current stream, and the copies into it, which are queued behind what that has queued so far.
  py::object back(int64_t size_bytes, int64_t offset, const py::object& compute) {
    py::dict first;
    first[names().stream] = attribute(compute, names().stream);
    const py::object storage = as_python(made(size_bytes));
    const py::object copy = queued(storage, offset, first, attribute(compute, names().seen), inward_, false);
    return copy.is_none() ? copy : py::make_tuple(storage, copy);
  }

 private:
  using MemcpyAsync = int (*)(void*, const void*, size_t, int, void*);

  struct Lane {
    c10::Stream stream;
    void* handle;  // CUDA's

    Lane(const py::object& of, bool is_cuda)
        : stream(stream_of(of)),
          handle(is_cuda ? reinterpret_cast<void*>(of.attr("cuda_stream").cast<uintptr_t>()) : nullptr) {}
  };

  py::object queued(const py::object& storage, int64_t offset, const py::dict& before, py::dict seen, const Lane& lane,
                    bool is_out) {
    const c10::Storage on_device = torch::createStorage(storage.ptr());
    py::object parts;
    try {
      parts = parts_(offset, on_device.nbytes());
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_OSError)) {
        throw;
      }
      return py::none();
    }
    c10::Event event = taken(lane.stream);
    for (const auto& one : before) {
      event.record(stream_of(one.second));
      event.block(lane.stream);
    }
    int64_t at = 0;
    for (const auto& part : parts) {
      const auto size_bytes = PyLong_AsLongLong(attribute(part, names().size_bytes).ptr());
      copy(bytes_of(on_device, at, at + size_bytes), on_host(part, size_bytes), lane, is_out);
      at += size_bytes;
    }
    event.record(lane.stream);
    return py::cast(std::make_unique<QueuedCopy>(spare_, std::move(event), storage, std::move(seen)));
  }

  void copy(const at::Tensor& here, const at::Tensor& there, const Lane& lane, bool is_out) const {
    const at::Tensor &to = is_out ? there : here, &from = is_out ? here : there;
    if (memcpy_async_ == nullptr) {
      const On on(lane.stream);
      to.copy_(from, true);
      return;
    }
    const int status = memcpy_async_(
        to.data_ptr(), from.data_ptr(), from.nbytes(), is_out ? TO_HOST : TO_DEVICE, lane.handle);
    TORCH_CHECK(status == 0, "CUDA error ", status, ": a copy between device and host could not be queued; an earlier ",
                "error may be the cause, which CUDA_LAUNCH_BLOCKING=1 shows");
  }

  static at::Tensor on_host(const py::handle& part, int64_t size_bytes) {
    const py::object tensor = attribute(attribute(part, names().memory), names().tensor);
    const at::Tensor& memory = THPVariable_Unpack(tensor.ptr());
    const int64_t begin = memory.storage_offset() + PyLong_AsLongLong(attribute(part, names().offset).ptr());
    return bytes_of(memory.storage(), begin, begin + size_bytes);
  }

  // With undefined contents, whatever torch fills new memory with.
  c10::Storage made(int64_t size_bytes) const {
    const c10::Device where = inward_.stream.device();
    const c10::OptionalDeviceGuard here(where);
    c10::Allocator* allocator = c10::GetAllocator(where.type());
    const auto bytes = static_cast<size_t>(size_bytes);
    return {c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true};
  }

  c10::Event taken(const c10::Stream& stream) {
    if (spare_->empty()) {
      return c10::Event(stream.device_type());
    }
    c10::Event found = std::move(spare_->back());
    spare_->pop_back();
    return found;
  }

  // A block on that stream, whose ops nobody sees.
  class On {
   public:
    explicit On(const c10::Stream& stream) : guard_(stream.device_type()), before_(guard_.exchangeStream(stream)) {}
    On(const On&) = delete;
    On& operator=(const On&) = delete;
    ~On() { guard_.exchangeStream(before_); }

   private:
    Aside aside_;
    c10::impl::VirtualGuardImpl guard_;
    c10::Stream before_;
  };

  static constexpr int TO_DEVICE = 1, TO_HOST = 2;  // as cudaMemcpyKind has them
  py::object device_, parts_;
  Lane outward_, inward_;
  MemcpyAsync memcpy_async_;
  SpareEvents spare_ = std::make_shared<std::vector<c10::Event>>();
};

}  // namespace pooch
