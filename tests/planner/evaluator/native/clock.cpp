// The evaluator's clock alone, for copies and work that hardly any schedule has beside each other.
#include "elapsed.h"

using namespace pooch;

enum What { kQueue, kCompute, kWait };

struct Command {
  int64_t what, value, queue;
  double work_s;
};

struct Seconds {
  double now_s, stall_s, interference_s;
};

extern "C" __attribute__((visibility("default"))) void run(const Problem* problem, const Command* commands,
                                                           int64_t count, Seconds* seconds) {
  Scratch scratch(*problem, 0);
  Clock& clock = scratch.clock;
  pooch::start_clock(*problem, scratch.decisions, clock);
  for (int64_t at = 0; at < count; ++at) {
    const Command& command = commands[at];
    const auto queue = static_cast<int>(command.queue);
    if (command.what == kQueue) queue_copy(*problem, clock, command.value, queue);
    if (command.what == kCompute) compute(*problem, clock, command.work_s);
    if (command.what == kWait) wait_for(*problem, clock, command.value, queue);
    seconds[at] = {clock.now_s, clock.stall_s, clock.interference_s};
  }
}
