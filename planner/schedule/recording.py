"""When the runtime must record ops so that every planned replay finds its ops recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.planner.problem.arrays import Ints
from poochplan.planner.problem.problem import Problem

MERGE_GAP_OPS = 4
"""Two windows with fewer ops between them are one: switching costs about as much as recording these."""


@dataclass(frozen=True)
class Recording:
    """Windows in which ops are recorded."""

    from_start: bool
    switches: dict[int, Literal["on", "off"]]
    """Save point (saved value) -> what happens there."""


NOTHING_RECORDED = Recording(from_start=False, switches={})


def recording_for(needed_ops: Iterable[int], save_ops: Sequence[int]) -> Recording:
    """Windows that hold every op of ``needed_ops``; ``save_ops`` are the ops completed before each save point.

    A pack happens inside an op, so a switch at a save point takes effect from the op after the next one: for op ``j``
    the last save point with ``save_ops < j`` switches on, and the first one with ``save_ops > j`` switches off.
    """
    return _windows(np.array(sorted(set(needed_ops)), dtype=np.int64), np.array(save_ops, dtype=np.int64))


def recording_of(problem: Problem, decisions: Sequence[Decision]) -> Recording:
    """Windows that hold all that replays of the recomputed values need recorded."""
    recompute, replays = Decision.RECOMPUTE, problem.replay.replays
    chosen = [value for value, decision in enumerate(decisions) if decision is recompute and replays[value] is not None]
    return _windows(problem.replay.recorded_for(chosen), problem.save_op_array) if chosen else NOTHING_RECORDED


def _windows(ops: Ints, save_ops: Ints) -> Recording:
    """Windows around ``ops``, which ascend; two with fewer than ``MERGE_GAP_OPS`` ops between them are one."""
    if not len(ops):
        return NOTHING_RECORDED
    count = len(save_ops)
    on = np.searchsorted(save_ops, ops, side="left") - 1
    off = np.searchsorted(save_ops, ops, side="right")
    ends = np.append(save_ops, save_ops[-1] + ops[-1] + 1)  # a window that never closes leaves no gap behind it
    begins = np.ones(len(ops), dtype=bool)
    begins[1:] = (on[1:] >= 0) & (save_ops[on[1:]] - ends[off[:-1]] >= MERGE_GAP_OPS)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(ops)) - 1
    switches: dict[int, Literal["on", "off"]] = {}
    for begin, end in zip(on[first].tolist(), off[last].tolist(), strict=True):
        if begin >= 0:
            switches[begin] = "on"
        if end < count:
            switches[end] = "off"
    return Recording(from_start=int(on[0]) < 0, switches=switches)
