// What the two halves of the device "late" share: its streams, and its memory.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <functional>
#include <mutex>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
extern std::recursive_mutex lock;
extern bool keeps_statistics;
using Locked = std::lock_guard<std::recursive_mutex>;

c10::StreamId now();                                          // the calling thread's stream
void catch_up(c10::StreamId stream);                          // runs all that is queued on it
void catch_up_all();                                          // and on every other
void queue_on(c10::StreamId stream, std::function<void()> work);
c10::DeviceAllocator& memory();

}  // namespace late
