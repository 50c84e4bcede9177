// The machine that the null GPU consists of: simulated time on streams, memory that is the host's, and settings.
//
// A stream is a moment: the time at which all that is queued on it will have ended. Work that is queued moves it on, an
// event is a copy of it, and whoever waits sleeps until it has come. Nothing is ever computed.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace null {

using Nanoseconds = long long;

/// What the environment sets; the names are in README.md.
struct Settings {
    long long device_bytes, devices, pinned_bytes, copied_bytes, resident_bytes, others_bytes;
    Nanoseconds launch_ns;
    double seconds_factor, link_bytes_per_ns;
    bool by_processor;  // whether time passes only while this process computes or waits for a GPU
    bool overlaps;
};
const Settings& settings();

Nanoseconds now();
void sleep_until(Nanoseconds moment);
/// Keeps the calling thread busy, as the driver does.
void spin(Nanoseconds length);

constexpr int MOST_DEVICES = 16;
/// Launches that a stream takes before the launching thread has to wait for the oldest.
constexpr unsigned QUEUE_LENGTH = 1024;

/// What the last kernel did; torch.equal reduces by "and".
enum class Last { KERNEL, REDUCED_BY_AND };

struct Stream {
    int device = 0, priority = 0;
    Nanoseconds ends = 0;
    Nanoseconds of_last[QUEUE_LENGTH] = {};
    unsigned queued = 0;
    Last last = Last::KERNEL;
};

struct Event {
    int device = 0;
    Nanoseconds moment = 0;
    bool is_recorded = false, has_time = true;
};

/// The device that is current on the calling thread.
int& current_device();
/// The stream of that handle; a device's default one for the handles that stand for it.
Stream& stream_of(cudaStream_t handle);
Stream* new_stream(int priority);
/// Queues work of that length: launching takes the calling thread's time, and a full queue blocks it.
void queue(Stream& stream, double length_ns);
/// The stream does nothing more before that moment.
void hold_until(Stream& stream, Nanoseconds moment);
/// When everything that is queued on the device will have ended.
Nanoseconds all_ends(int device);

enum class Kind { UNKNOWN, HOST, DEVICE };
struct Place {
    Kind kind = Kind::UNKNOWN;
    int device = -1;
};
Place place_of(const void* address);
/// Memory that takes no page before it is touched; null where it would be more than the device has, or may pin.
void* take(size_t bytes, Kind kind);
/// False if no memory begins there.
bool give_back(void* address);
/// Addresses without memory, and whether memory behind them may be taken; for the driver's calls.
void* reserve_addresses(size_t bytes);
void forget_addresses(void* address, size_t bytes);
bool take_bytes(size_t bytes);
void give_back_bytes(size_t bytes, int device);
size_t taken_bytes(int device);
/// Pins memory that is there; a refusal as the driver gives it.
cudaError_t pin(void* address, size_t bytes);
cudaError_t unpin(void* address);
/// Ends the process with a line if it has more of the host's memory than it may.
void guard_resident_bytes();

}  // namespace null
