// Problem: a problem as flat arrays, which an evaluation reads. `evaluator.py` fills them, with a column for each field
// in the order of this file.
#pragma once

#include <cstdint>

namespace pooch {

enum Decision : int8_t { kKeep, kSwap, kRecompute };
enum Style { kLate, kLateOutOfOrder, kEarly, kOnDemand };
// Kinds of launching thread: unknown, the compute stream itself, ahead of the device.
enum Kind { kNoThread, kComputing, kAhead };
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
  // order of these ticks; the value at the place of this row; a random number: sums of these identify sets of values.
  int64_t early_point, frees_tick, rank, by_rank, key;
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
  double duplex, interference[2], out_s, fetch_s, record_s, replay_s, step_s;
};

// The thread's kind, the end of recording, and the values with a replay that backward never uses, a value after those
// that it holds.
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
  Rows<const OpSeconds> op_s; // one row more than ops: the last is for the time after them
  Rows<const int64_t> lists;
  Rows<const int64_t> value_bytes; // per value of the profile
  Rows<const Rates> rates;
  Rows<const Facts> facts;

  Rows<const int64_t> listed(Range range) const { return {lists.first + range.first, range.after - range.first}; }
};

} // namespace pooch
