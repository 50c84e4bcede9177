// Problem: a problem as flat arrays, which an evaluation reads. `evaluator.py` fills them, with a column for each field
// in the order of this file. And the memory that an evaluation writes to, made once for each thread, so that evaluations
// rarely allocate.
//
// A call with a vector names its namespace: without it, std is searched too, and a newer library may have that name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pooch {

enum Decision : int8_t { kKeep, kSwap, kRecompute };
enum Style { kLate, kLateOutOfOrder, kEarly, kOnDemand };
enum Queue { kOut, kIn };

// An array of Python.
template <class Row>
struct Rows {
  Row* first;
  int64_t count;

  Row& operator[](int64_t at) const { return first[at]; }
  Row* operator->() const { return first; }
  Row* begin() const { return first; }
  Row* end() const { return first + count; }
};

// The position of a list in `Problem::lists`.
struct Range {
  int64_t first, after;
};

struct Value {
  // Bytes are rounded up to the allocation unit, except for those that a copy moves. `first_use` is a point.
  int64_t size_bytes, moved_bytes, born, death, freed, save_point, first_use, profile_value;
  // The point of its earliest release; the first tick at which its bytes could be released; the value's place in the
  // order of these ticks; the value at the place of this row; a random number: sums of these identify sets of values;
  // whether it is a source, which nothing but replays needs after its forward death.
  int64_t early_point, frees_tick, rank, by_rank, key, is_source;
  // Ops and inputs of its replay, and the ops that must be recorded for it, if recording takes time.
  Range ops, inputs, recorded;
};

// Seconds alone on the link, by queue.
struct CopySeconds {
  double of[2];
};

// Its tick, the ops completed before it, the value whose first use it is (-1: none), its index among the use points
// (-1: a save point), the save points before it.
struct Point {
  int64_t tick, op, first_use_of, use, saves_before;
};

struct Use {
  int64_t point, tick;
};

// Bytes that no decision moves, and by how much they are fewer in the first step.
struct Tick {
  int64_t base_bytes, less_bytes;
};

// `on` and `off` are the save points that switch recording on and off around it (-1: the beginning).
struct Op {
  int64_t workspace_bytes;
  Range outputs, temporaries;
  int64_t on, off;
};

// `before_s` is the launching thread's and `work_s` the compute stream's, before the op.
struct OpSeconds {
  double duration_s, launch_s, before_s, work_s;
};

// Rates of the link, costs of the launching thread (`LaunchCost`), and the step that keeps everything.
struct Rates {
  double duplex, interference[2], out_s, fetch_s, record_s, drop_s, replay_s, step_s;
};

// Whether the launching thread is ahead of the device, or the compute stream itself; the end of recording; the values
// with a replay that backward never uses, a value after those that it holds.
struct Facts {
  int64_t is_ahead, last_save_op;
  Range never;
};

struct Problem {
  Rows<const Value> values;
  Rows<const CopySeconds> copy_s;
  Rows<const Point> points;
  Rows<const Use> uses;
  Rows<const Tick> ticks;
  Rows<const Op> ops;
  Rows<const OpSeconds> op_s; // one row more than ops: the last is for the time after them
  Rows<const int64_t> lists;
  Rows<const int64_t> value_bytes; // per value of the profile
  Rows<const Rates> rates;
  Rows<const Facts> facts;

  Rows<const int64_t> listed(Range range) const { return {lists.first + range.first, range.after - range.first}; }
};

using Ints = std::vector<int64_t>;

inline void clear(Ints& numbers) { std::fill(numbers.begin(), numbers.end(), 0); }

// The choices and results for a value. All are -1 for none.
struct Chosen {
  // The point at which a replay brings it back; the last tick at which a replay needs it, and at which anything does;
  // its first and last entry in `Scratch::needs`.
  int64_t replayed_at, claim, end, first_need, final_need;
  // Its release, the next point that needs it, its copy back; whether the queue has it, and the save point that its
  // copy must not pass.
  int64_t release, back, prefetch, wanted, due_at;
};

// They ascend by point.
struct Need {
  int64_t point, later, value;
};

// A replay of this step: its point, its number in the store, the bytes of its targets.
struct Run {
  int64_t point, merged, target_bytes;
};

struct Queued {
  int64_t value, point;
};

// The costs of a replay. Its targets are in the pool from `begin` on, then its inputs, then, for a thread ahead of the
// device, its ops. `late_s` is the thread's largest delay at one of them.
struct Merged {
  int64_t key, begin, targets, sources, ops, peak_bytes;
  double ops_s, launches_s, late_s;
};

// Merged replays by their sets of targets; open addressing, cleared when full.
struct Store {
  static constexpr size_t kSlots = size_t{1} << 16;

  Ints slots; // number + 1; 0 for none
  std::vector<Merged> merged;
  Ints pool;
  size_t most_pooled;
  int64_t mark = 0;
  Ints value_marks, profile_marks, op_marks; // the last mark of each
  Ints ops, last_touch, change;              // of the current replay

  Store(const Problem& problem, int64_t pooled)
      : most_pooled(pooled), value_marks(problem.values.count), profile_marks(problem.value_bytes.count),
        op_marks(problem.ops.count), last_touch(problem.value_bytes.count), change(problem.ops.count + 1) {
    size_t count = kSlots;
    while (count < 4 * value_marks.size()) count *= 2;
    slots.resize(count);
  }

  // Clears it if one evaluation could fill it.
  void make_room() {
    if (pool.size() <= most_pooled && merged.size() <= slots.size() / 4) return;
    slots.assign(slots.size(), 0);
    merged.clear();
    pool.clear();
  }

  Rows<const int64_t> sources_of(const Merged& one) const {
    return {pool.data() + one.begin + one.targets, one.sources};
  }
  Rows<const int64_t> ops_of(const Merged& one) const {
    return {pool.data() + one.begin + one.targets + one.sources, one.ops};
  }
};

// The clock's state of a value: whether its copies are done, or one back is under way; when it left and came back.
struct Moved {
  bool is_done[2], is_arriving;
  int64_t release_tick, back_tick;
};

// One direction of the link: the running copy (-1: none), its remaining seconds alone on the link, those that wait.
struct Copying {
  int64_t now;
  double left_s;
  size_t head;
  Ints values;
};

// Work before the op, including recording if the thread computes; the seconds by which a thread ahead of the device
// reaches the op later than a device that never waits.
struct OpClock {
  double computed_s, behind_s;
};

// The compute stream, both queues and the launching thread. `taken_s` are the thread's seconds at points.
struct Clock {
  double now_s, stall_s, interference_s, runtime_s, taken_s, done_s;
  int64_t thread_op;
  Copying copying[2];
  std::vector<Moved> values;
  Ints recorded; // per op and after the last: ops recorded before it
  std::vector<OpClock> ops;
};

struct Scratch {
  static constexpr int64_t kBlock = 32;

  std::vector<int8_t> decisions; // finally the resulting ones: a swap that needs no release is kept
  std::vector<Chosen> values;
  std::vector<Need> needs;
  std::vector<Run> runs;
  Ints targets, released, fetched, waiting, tried, due, pending, by_release, by_prefetch; // values in an order
  std::vector<Queued> queue;
  Ints due_start, release_start, prefetch_start;      // beginnings for each save point, or point
  Ints curve, moves;                                  // bytes at each tick; their changes there
  Ints segment, block_most, block_raised;             // the most bytes between two use points, and in a block of these
  Store store;
  Clock clock;

  Scratch(const Problem& problem, int64_t pooled)
      : decisions(problem.values.count), values(problem.values.count), pending(problem.values.count),
        curve(problem.ticks.count + 1), moves(problem.ticks.count + 1), segment(problem.uses.count + 1),
        block_most(problem.uses.count / kBlock + 1), block_raised(problem.uses.count / kBlock + 1),
        store(problem, pooled) {
    clock.values.resize(problem.values.count);
    clock.recorded.resize(problem.op_s.count);
    clock.ops.resize(problem.op_s.count);
  }
};

} // namespace pooch
