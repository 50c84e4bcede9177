// Problem: a problem as flat arrays, all that an evaluation reads. `problem.py` fills them, with a column for each field,
// in the order in which they stand here.
#pragma once

#include <cstdint>

namespace pooch {

enum Decision : int8_t { kKeep, kSwap, kRecompute };
enum Style { kLate, kLateOutOfOrder, kEarly, kOnDemand };
// Kinds of launching thread: none known, one that is the compute stream, one that works ahead of the device.
enum Kind { kNoThread, kComputing, kAhead };
enum Queue { kOut, kIn };

// An array of Python's.
template <class Row>
struct Rows {
  Row* first;
  int64_t count;

  Row& operator[](int64_t at) const { return first[at]; }
  Row* operator->() const { return first; }
  Row* begin() const { return first; }
  Row* end() const { return first + count; }
};

// Where a ragged thing lies in `Problem::lists`.
struct Range {
  int64_t first, after;
};

struct Value {
  // Bytes are rounded up to the allocation unit, but for those that a copy moves. `first_use` is a point.
  int64_t size_bytes, moved_bytes, born, death, freed, save_point, first_use, profile_value;
  // Where a release is as early as it can be; the first tick at which the bytes could be given up; the value's place in
  // the order of these ticks; the value at the place of this row; a random number, of which sums tell sets apart.
  int64_t early_point, frees_tick, rank, by_rank, key;
  // Of the value's replay, and the ops that it needs recorded, where recording takes time.
  Range ops, inputs, recorded;
};

// Alone on the link, by queue.
struct CopySeconds {
  double of[2];
};

// Ops completed before it, the value that it uses for the first time (-1: none), its index among the use points (-1: a
// save point), save points before it.
struct Point {
  int64_t tick, op, first_use_of, use, saves_before;
};

struct Use {
  int64_t point, tick;
};

// Bytes that no decision moves, and how many fewer there are in the first step.
struct Tick {
  int64_t base_bytes, less_bytes;
};

// `on` and `off` are the save points that switch recording on and off around it (-1: the begin).
struct Op {
  int64_t workspace_bytes;
  Range outputs, temporaries;
  int64_t on, off;
};

// `before_s` is the launching thread's and `work_s` the compute stream's, before the op.
struct OpSeconds {
  double duration_s, launch_s, before_s, work_s;
};

// The link's, then the launching thread's (`LaunchCost`), then the step that keeps everything.
struct Rates {
  double duplex, interference[2], out_s, fetch_s, record_s, replay_s, step_s;
};

// The thread's kind, where recording ends, and the values with a replay that backward never uses, what holds another
// after it.
struct Facts {
  int64_t kind, last_save_op;
  Range never;
};

struct Problem {
  Rows<const Value> values;
  Rows<const CopySeconds> copy_s;
  Rows<const Point> points;
  Rows<const Use> uses;
  Rows<const Tick> ticks;
  Rows<const Op> ops;
  Rows<const OpSeconds> op_s; // one row more than ops: the last holds for what comes behind them
  Rows<const int64_t> lists;
  Rows<const int64_t> value_bytes; // per value of the profile
  Rows<const Rates> rates;
  Rows<const Facts> facts;

  Rows<const int64_t> listed(Range range) const { return {lists.first + range.first, range.after - range.first}; }
};

} // namespace pooch
