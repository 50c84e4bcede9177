#include "machine.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace null {

namespace {

constexpr long long GIB = 1LL << 30;
constexpr Nanoseconds SECOND = 1000000000;
/// A mapping is a page longer than asked for, so that no two are one range.
constexpr size_t GAP_BYTES = 4096;

long long integer(const char* name, long long by_default) {
    const char* given = getenv(name);
    return given ? atoll(given) : by_default;
}

double number(const char* name, double by_default) {
    const char* given = getenv(name);
    return given ? atof(given) : by_default;
}

struct Range {
    size_t bytes;
    Place place;
    bool is_mapped;  // by this machine, so that it is unmapped when it is given back
};

std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;
std::map<char*, Range> ranges;
size_t taken[MOST_DEVICES], pinned;
Stream defaults[MOST_DEVICES];
std::vector<Stream*> streams;
/// By the processor's clock: what this process did not really wait.
std::atomic<Nanoseconds> skipped;

std::map<char*, Range>::iterator range_of(const void* address) {
    char* at = static_cast<char*>(const_cast<void*>(address));
    auto found = ranges.upper_bound(at);
    if (found == ranges.begin()) return ranges.end();
    --found;
    return at < found->first + found->second.bytes ? found : ranges.end();
}

Nanoseconds read_clock(clockid_t clock) {
    timespec time;
    syscall(SYS_clock_gettime, clock, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

/// What is not another process's.
long long device_bytes() { return settings().device_bytes - settings().others_bytes; }

/// At ascending addresses, as the driver gives them: they decide between free blocks of one size.
void* mapped(size_t bytes) {
    constexpr size_t FIRST = size_t(1) << 44, ALIGNED_TO = 2 << 20;
    static std::atomic<size_t> next{FIRST};
    const size_t length = (bytes + ALIGNED_TO - 1) / ALIGNED_TO * ALIGNED_TO;
    constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* found = mmap(reinterpret_cast<void*>(next.fetch_add(length)), bytes, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
}

}  // namespace

const Settings& settings() {
    static const Settings found = {
        integer("NULLGPU_BYTES", 80 * GIB),      integer("NULLGPU_DEVICES", 1),
        integer("NULLGPU_PINNED_BYTES", 1LL << 42), integer("NULLGPU_COPIED_BYTES", 1LL << 40),
        integer("NULLGPU_RESIDENT_BYTES", 8 * GIB), integer("NULLGPU_OTHERS_BYTES", 0),
        integer("NULLGPU_LAUNCH_NS", 2500),      number("NULLGPU_SECONDS", 1.0),
        number("NULLGPU_LINK_GBPS", 25.0),       integer("NULLGPU_BY_PROCESSOR", 0) != 0,
        integer("NULLGPU_OVERLAPS", 1) != 0,
    };
    return found;
}

Nanoseconds now() {
    static const Nanoseconds begun = read_clock(CLOCK_MONOTONIC) - read_clock(CLOCK_PROCESS_CPUTIME_ID);
    if (!settings().by_processor) return read_clock(CLOCK_MONOTONIC);
    return begun + read_clock(CLOCK_PROCESS_CPUTIME_ID) + skipped;
}

void sleep_until(Nanoseconds moment) {
    if (settings().by_processor) {
        const Nanoseconds left = moment - now();
        if (left > 0) skipped += left;
        return;
    }
    constexpr Nanoseconds LEAST_SLEEP = 100000, WAKES_EARLY = 50000;
    for (Nanoseconds left; (left = moment - now()) > 0;) {
        if (left > LEAST_SLEEP) usleep((left - WAKES_EARLY) / 1000);
        else __builtin_ia32_pause();
    }
}

void spin(Nanoseconds length) {
    for (const Nanoseconds end = now() + length; now() < end;) __builtin_ia32_pause();
}

int& current_device() {
    static thread_local int device = 0;
    return device;
}

Stream& stream_of(cudaStream_t handle) {
    constexpr uintptr_t LAST_NAME_OF_DEFAULT = 2;  // cudaStreamLegacy is 1, cudaStreamPerThread 2
    if (reinterpret_cast<uintptr_t>(handle) > LAST_NAME_OF_DEFAULT && !settings().overlaps)
        return defaults[reinterpret_cast<Stream*>(handle)->device];
    if (reinterpret_cast<uintptr_t>(handle) > LAST_NAME_OF_DEFAULT) return *reinterpret_cast<Stream*>(handle);
    Stream& found = defaults[current_device()];
    found.device = current_device();
    return found;
}

Stream* new_stream(int priority) {
    Stream* made = new Stream;
    made->device = current_device();
    made->priority = priority;
    Locked locked(lock);
    streams.push_back(made);  // torch keeps its streams for the life of the process
    return made;
}

void queue(Stream& stream, double length_ns) {
    Nanoseconds oldest;
    {
        Locked locked(lock);
        const Nanoseconds begins = now();
        if (stream.ends < begins) stream.ends = begins;
        stream.ends += static_cast<Nanoseconds>(length_ns * settings().seconds_factor);
        Nanoseconds& place = stream.of_last[stream.queued++ % QUEUE_LENGTH];
        oldest = place;
        place = stream.ends;
    }
    sleep_until(oldest);
    spin(settings().launch_ns);
}

void hold_until(Stream& stream, Nanoseconds moment) {
    Locked locked(lock);
    stream.ends = std::max(stream.ends, moment);
}

Nanoseconds all_ends(int device) {
    Locked locked(lock);
    Nanoseconds last = defaults[device].ends;
    for (const Stream* one : streams)
        if (one->device == device && one->ends > last) last = one->ends;
    return last;
}

Place place_of(const void* address) {
    Locked locked(lock);
    auto found = range_of(address);
    return found == ranges.end() ? Place() : found->second.place;
}

void* take(size_t bytes, Kind kind) {
    guard_resident_bytes();
    Locked locked(lock);
    const bool is_device = kind == Kind::DEVICE;
    size_t& taken_there = is_device ? taken[current_device()] : pinned;
    if (bytes > (is_device ? device_bytes() : settings().pinned_bytes) - taken_there) return nullptr;
    void* found = mapped(bytes + GAP_BYTES);
    if (!found) return nullptr;
    taken_there += bytes;
    ranges[static_cast<char*>(found)] = {bytes, {kind, current_device()}, true};
    return found;
}

bool give_back(void* address) {
    Locked locked(lock);
    auto found = ranges.find(static_cast<char*>(address));
    if (found == ranges.end() || !found->second.is_mapped) return false;
    const Range range = found->second;
    (range.place.kind == Kind::DEVICE ? taken[range.place.device] : pinned) -= range.bytes;
    ranges.erase(found);
    munmap(address, range.bytes + GAP_BYTES);
    return true;
}

void* reserve_addresses(size_t bytes) {
    void* found = mapped(bytes);
    Locked locked(lock);
    if (found) ranges[static_cast<char*>(found)] = {bytes, {Kind::DEVICE, current_device()}, false};
    return found;
}

void forget_addresses(void* address, size_t bytes) {
    Locked locked(lock);
    ranges.erase(static_cast<char*>(address));
    munmap(address, bytes);
}

bool take_bytes(size_t bytes) {
    Locked locked(lock);
    if (bytes > device_bytes() - taken[current_device()]) return false;
    taken[current_device()] += bytes;
    return true;
}

void give_back_bytes(size_t bytes, int device) {
    Locked locked(lock);
    taken[device] -= bytes;
}

size_t taken_bytes(int device) {
    Locked locked(lock);
    return taken[device];
}

cudaError_t pin(void* address, size_t bytes) {
    Locked locked(lock);
    if (bytes > settings().pinned_bytes - pinned) return cudaErrorMemoryAllocation;
    if (range_of(address) != ranges.end()) return cudaErrorHostMemoryAlreadyRegistered;
    pinned += bytes;
    ranges[static_cast<char*>(address)] = {bytes, {Kind::HOST, current_device()}, false};
    return cudaSuccess;
}

cudaError_t unpin(void* address) {
    Locked locked(lock);
    auto found = ranges.find(static_cast<char*>(address));
    if (found == ranges.end() || found->second.is_mapped) return cudaErrorHostMemoryNotRegistered;
    pinned -= found->second.bytes;
    ranges.erase(found);
    return cudaSuccess;
}

void guard_resident_bytes() {
    constexpr unsigned ONE_IN = 16;
    static std::atomic<unsigned> calls;
    if (calls++ % ONE_IN) return;
    FILE* file = fopen("/proc/self/statm", "r");
    if (!file) return;
    long all_pages = 0, resident_pages = 0;
    const int read = fscanf(file, "%ld %ld", &all_pages, &resident_pages);
    fclose(file);
    const long long bytes = resident_pages * static_cast<long long>(sysconf(_SC_PAGESIZE));
    if (read != 2 || bytes <= settings().resident_bytes) return;
    fprintf(stderr, "null GPU: the process has %lld MiB of the host, more than NULLGPU_RESIDENT_BYTES\n", bytes >> 20);
    _exit(99);
}

}  // namespace null

/// Python's clock is the GPU's.
EXPORTED int clock_gettime(clockid_t clock, timespec* time) noexcept {
    if (clock != CLOCK_MONOTONIC || !null::settings().by_processor)
        return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
    const null::Nanoseconds moment = null::now();
    return *time = {moment / 1000000000, moment % 1000000000}, 0;
}
