// The device "late": an accelerator whose memory is host memory and whose ops are the CPU's.
//
// It is what torch asks of a backend of its own (PrivateUse1): allocator with statistics, pinned memory, streams,
// events, generator. A stream runs what was queued on it as late as its order allows: when somebody waits for it. So a
// wait that is left out shows in the bits. An op runs when it is called, once its own stream has caught up. Memory that
// is given back is overwritten once the stream it belongs to, and those that were recorded for it, have caught up.

#include "late_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>

namespace late {

bool keeps_statistics = true;
constexpr size_t kMemoryBytes = size_t{4} << 30;
constexpr unsigned char kGarbage = 0xab;
std::recursive_mutex lock;

// -- streams and events ----------------------------------------------------------------------------------------------

struct Mark {  // one recording of an event
    c10::StreamId stream;
    bool passed = false;
    double at_ms = 0;
};

std::map<c10::StreamId, std::deque<std::function<void()>>> queues;
c10::StreamId last_stream = 0;
thread_local c10::StreamId current_stream = 0;

double now_ms() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(since).count();
}

void catch_up(c10::StreamId id, const Mark* until) {
    Locked hold(lock);
    auto& queue = queues[id];
    while (!queue.empty() && !(until && until->passed)) {
        auto next = std::move(queue.front());
        queue.pop_front();
        next();
    }
}

void catch_up(c10::StreamId id) { catch_up(id, nullptr); }

c10::StreamId now() { return current_stream; }

void catch_up_all() {
    Locked hold(lock);
    for (c10::StreamId id = 0; id <= last_stream; ++id) catch_up(id);
}

void queue_on(c10::StreamId id, std::function<void()> work) {
    Locked hold(lock);
    queues[id].push_back(std::move(work));
}

using Event = std::shared_ptr<Mark>;

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, 0), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr auto static_type = kLate;
    Guard() = default;
    explicit Guard(c10::DeviceType) {}
    c10::DeviceType type() const override { return kLate; }
    c10::Device exchangeDevice(c10::Device) const override { return {kLate, 0}; }
    c10::Device getDevice() const override { return {kLate, 0}; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }

    c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where, 0); }
    c10::Stream getNewStream(c10::Device, int) const override {
        Locked hold(lock);
        return stream_of(++last_stream);
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        return stream_of(std::exchange(current_stream, next.id()));
    }
    bool queryStream(const c10::Stream& stream) const override {
        Locked hold(lock);
        bool is_done = queues[stream.id()].empty();
        catch_up(stream.id());
        return is_done;
    }
    void synchronizeStream(const c10::Stream& stream) const override { catch_up(stream.id()); }
    void synchronizeDevice(c10::DeviceIndex) const override { catch_up_all(); }

    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        Locked hold(lock);
        if (!*event) *event = new Event;
        auto mark = std::make_shared<Mark>(Mark{stream.id()});
        auto pass = [mark] { mark->passed = true, mark->at_ms = now_ms(); };
        *static_cast<Event*>(*event) = mark;
        if (queues[stream.id()].empty())
            pass();
        else
            queue_on(stream.id(), pass);
    }
    void block(void* event, const c10::Stream& stream) const override {
        Locked hold(lock);
        if (!event) return;
        auto mark = *static_cast<Event*>(event);
        if (!mark->passed) queue_on(stream.id(), [mark] { catch_up(mark->stream, mark.get()); });
    }
    bool queryEvent(void* event) const override {  // it gets further each time somebody asks
        Locked hold(lock);
        if (!event) return true;
        auto mark = *static_cast<Event*>(event);
        bool is_done = mark->passed;
        catch_up(mark->stream, mark.get());
        return is_done;
    }
    void synchronizeEvent(void* event) const override {
        if (event) queryEvent(event);
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
        synchronizeEvent(first), synchronizeEvent(second);
        return (*static_cast<Event*>(second))->at_ms - (*static_cast<Event*>(first))->at_ms;
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- memory ----------------------------------------------------------------------------------------------------------

struct Block {
    size_t bytes;
    std::set<c10::StreamId> streams;
};

std::unordered_map<void*, Block> blocks;
std::multimap<size_t, void*> cached;
std::array<c10::CachingAllocator::Stat, 2> stats;  // allocated, reserved

size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

void give_back(void* memory) {
    Locked hold(lock);
    auto found = blocks.find(memory);
    if (found == blocks.end()) return;
    for (auto id : found->second.streams) catch_up(id);
    std::memset(memory, kGarbage, found->second.bytes);
    stats[0].decrease(found->second.bytes);
    cached.emplace(found->second.bytes, memory);
    blocks.erase(found);
}

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t asked) override {
        Locked hold(lock);
        void* memory = nullptr;
        if (auto bytes = rounded(asked)) {
            if (auto found = cached.find(bytes); found != cached.end()) {
                memory = found->second;
                cached.erase(found);
            } else {
                TORCH_CHECK_WITH(
                    OutOfMemoryError, stats[1].current + int64_t(bytes) <= int64_t(kMemoryBytes), "late: out of memory");
                memory = std::aligned_alloc(512, bytes);
                std::memset(memory, kGarbage, bytes);
                stats[1].increase(bytes);
            }
            stats[0].increase(bytes);
            blocks[memory] = {bytes, {current_stream}};
        }
        return {memory, memory, &give_back, c10::Device(kLate, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
        catch_up(current_stream);
        std::memcpy(to, from, bytes);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {
        Locked hold(lock);
        catch_up_all();
        for (auto& [bytes, memory] : cached) std::free(memory), stats[1].decrease(bytes);
        cached.clear();
    }
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        Locked hold(lock);
        if (auto found = blocks.find(data.get()); found != blocks.end()) found->second.streams.insert(stream.id());
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        Locked hold(lock);
        TORCH_CHECK(keeps_statistics, "late: no statistics");
        c10::CachingDeviceAllocator::DeviceStats found;
        found.allocated_bytes[0] = found.active_bytes[0] = found.requested_bytes[0] = stats[0];
        found.reserved_bytes[0] = stats[1];
        return found;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {
        Locked hold(lock);
        for (auto& one : stats) one.reset_peak();
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
        Locked hold(lock);
        return {kMemoryBytes - stats[1].current, kMemoryBytes};
    }
} device_memory;

c10::DeviceAllocator& memory() { return device_memory; }

const bool is_registered = [] {
    c10::SetAllocator(kLate, &device_memory);
    return true;
}();

}  // namespace late
