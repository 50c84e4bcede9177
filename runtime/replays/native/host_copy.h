// HostCopy: the contents of a storage on the host, as that of host_copies.py.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace pooch {

using c10::DispatchKey;
using c10::DispatchKeySet;
constexpr DispatchKey KEY = DispatchKey::Fake;  // the tape's
static_assert(static_cast<int>(KEY) < static_cast<int>(DispatchKey::Python), "users' modes must come first");

// A block whose ops nobody sees: neither modes, nor autograd, nor a tape.
class Aside {
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard unseen_{DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, KEY})};
};

// Bytes of a storage, as a tensor on it.
inline at::Tensor bytes_of(const c10::Storage& storage, int64_t begin, int64_t end) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(at::kByte, at::kStrided, storage.device()));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(at::kByte));
  const std::array<int64_t, 1> size{end - begin}, stride{1};
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, begin);
  return tensor;
}

// The present contents of a storage, on the host. On the CPU it lies in the C library's memory, as far from a multiple
// of ALIGNED as the storage does; else in pinned memory, if there is any.
class HostCopy {
 public:
  explicit HostCopy(const c10::Storage& storage) : where_(storage.device()) {
    const auto size_bytes = static_cast<int64_t>(storage.nbytes());
    if (where_.is_cpu()) {
      void* begin = std::malloc(size_bytes + ALIGNED);
      if (begin == nullptr) {
        throw std::bad_alloc();
      }
      const auto address = reinterpret_cast<uintptr_t>(storage.data());
      void* at = static_cast<char*>(begin) + (address - reinterpret_cast<uintptr_t>(begin)) % ALIGNED;
      bytes_ = at::from_blob(at, {size_bytes}, [begin](void*) { std::free(begin); }, at::kByte);
      if (size_bytes > 0) {
        std::memcpy(at, storage.data(), size_bytes);
      }
      return;
    }
    const Aside aside;
    bytes_ = on_host(size_bytes).copy_(bytes_of(storage, 0, size_bytes), true);
  }

  // A storage on the device with these contents; on the CPU the copy itself.
  c10::Storage storage() const {
    if (where_.is_cpu()) {
      return bytes_.storage();
    }
    const Aside aside;
    return at::empty(bytes_.sizes(), bytes_.options().device(where_).pinned_memory(false)).copy_(bytes_, true).storage();
  }

 private:
  static constexpr int64_t ALIGNED = 64;  // as in host_copies.py

  static at::Tensor on_host(int64_t size_bytes) {
    for (const bool pinned : {true, false}) {
      try {
        return at::detail::empty_cpu(
            {size_bytes}, at::kByte, at::kStrided, c10::Device(at::kCPU), pinned, std::nullopt);
      } catch (const c10::Error&) {  // pinning is refused
        if (!pinned) {
          throw;
        }
      }
    }
    return {};
  }

  c10::Device where_;
  at::Tensor bytes_;
};

}  // namespace pooch
