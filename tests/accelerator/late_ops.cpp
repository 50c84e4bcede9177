// The ops of the device "late": those of the CPU, in its own memory. See late_device.cpp.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "late_device.h"

namespace {

using late::catch_up, late::kLate, late::lock, late::Locked;

std::set<const void*> pinned;
int64_t most_pinned_bytes = INT64_MAX;

void unpin(void* memory) {
    Locked hold(lock);
    late::catch_up_all();
    pinned.erase(memory);
    std::free(memory);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        Locked hold(lock);
        TORCH_CHECK(int64_t(bytes) <= most_pinned_bytes, "late: host memory could not be pinned");
        void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
        if (memory) pinned.insert(memory);
        return {memory, memory, &unpin, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

// -- random numbers --------------------------------------------------------------------------------------------------

struct Random final : at::CPUGeneratorImpl {
    Random() {
        device_ = c10::Device(kLate, 0);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

at::Generator& own_random() {
    static auto one = at::make_generator<Random>();
    return one;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void* data) const override {
        Locked hold(lock);
        return pinned.count(data) > 0;
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    at::Device getDeviceFromPtr(void*) const override { return {kLate, 0}; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return own_random(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Random>(); }
} hooks;

// -- ops -------------------------------------------------------------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(size, &late::memory(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(size, stride, &late::memory(), keys, c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& one) {  // the same memory
    if (one.is_cpu()) return one;
    return at::from_blob(one.data_ptr(), one.sizes(), one.strides(), one.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    bool is_plain = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() && from.sizes() == to.sizes();
    bool is_pinned = from.is_cpu() ? hooks.isPinnedPtr(from.storage().data()) : hooks.isPinnedPtr(to.storage().data());
    if (non_blocking && is_plain && is_pinned && from.device() != to.device()) {
        late::queue_on(late::now(), [to = to.data_ptr(), from = from.data_ptr(), bytes = from.nbytes()] {
            std::memcpy(to, from, bytes);
        });
        return to;
    }
    catch_up(late::now());
    auto target = on_host(to);
    at::native::copy_(target, on_host(from), false);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    at::native::resize_(to, from.sizes(), std::nullopt);
    return copy_from(from, to, false);
}

// Ops that draw numbers draw them from the device's generator, in the place of the CPU's.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    catch_up(late::now());
    auto random = own_random();
    bool draws = false;
    for (auto tag : op.getTags()) draws = draws || tag == at::Tag::nondeterministic_seeded;
    if (!draws) return at::native::cpu_fallback(op, stack);
    for (auto& one : torch::jit::last(*stack, op.schema().arguments().size()))
        if (one.isGenerator()) random = one.toGenerator(), const_cast<c10::IValue&>(one) = c10::IValue();
    auto host = at::detail::getDefaultCPUGenerator();
    auto before = host.get_state();
    host.set_state(random.get_state());
    at::native::cpu_fallback(op, stack);
    random.set_state(host.get_state());
    host.set_state(before);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("as_strided", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                            std::optional<c10::SymInt> offset) {
        return at::cpu::as_strided_symint(self, size, stride, offset);
    });
    m.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
    m.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
        return at::native::_reshape_alias(self, size, stride);
    });
    m.impl("resize_", [](const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format)
                          -> const at::Tensor& { return at::native::resize_(self, size, format); });
    m.impl("set_.source_Storage_storage_offset",
           [](at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride)
               -> at::Tensor& { return at::cpu::set_(self, storage, offset, size, stride); });
    m.impl("set_.source_Storage",
           [](at::Tensor& self, at::Storage storage) -> at::Tensor& { return at::native::set_(self, storage); });
    m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
        return at::native::set_tensor_(self, source);
    });
    m.impl("_local_scalar_dense", [](const at::Tensor& self) {
        catch_up(late::now());
        return at::native::_local_scalar_dense_cpu(self);
    });
    m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
        late::memory().recordStream(self.storage().data_ptr(), stream);
    });
    m.impl("is_pinned", [](const at::Tensor&, std::optional<c10::Device>) { return false; });
}

TORCH_LIBRARY(late, m) {
    m.def("rng_state() -> Tensor", [] { return own_random().get_state(); });
    m.def("set_rng_state(Tensor state) -> ()", [](const at::Tensor& state) { own_random().set_state(state); });
    m.def("keep_statistics(bool is_on) -> ()", [](bool is_on) { late::keeps_statistics = is_on; });
    m.def("limit_pinned(int size_bytes) -> ()", [](int64_t size_bytes) { most_pinned_bytes = size_bytes; });
}

const bool is_registered = [] {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
}();

}  // namespace
