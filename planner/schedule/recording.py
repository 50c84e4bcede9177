"""When the runtime must record ops so that every planned replay finds its ops recorded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MERGE_GAP_OPS = 4
"""Two windows with fewer ops between them are one: switching costs about as much as recording these."""


@dataclass(frozen=True)
class Recording:
    """Windows in which ops are recorded."""

    from_start: bool
    switches: dict[int, Literal["on", "off"]]
    """Save point (saved value) -> what happens there."""


def recording_for(needed_ops: Iterable[int], save_ops: tuple[int, ...]) -> Recording:
    """Windows that hold every op of ``needed_ops``; ``save_ops`` are the ops completed before each save point.

    A pack happens inside an op, so a switch at a save point takes effect from the op after the next one: for op ``j``
    the last save point with ``save_ops < j`` switches on, and the first one with ``save_ops > j`` switches off.
    """
    windows: list[tuple[int, int]] = []
    for op in sorted(set(needed_ops)):
        on = bisect_left(save_ops, op) - 1
        off = bisect_right(save_ops, op)
        if windows and (on < 0 or _gap(save_ops, windows[-1][1], on) < MERGE_GAP_OPS):
            windows[-1] = (windows[-1][0], max(off, windows[-1][1]))
        else:
            windows.append((on, off))
    switches: dict[int, Literal["on", "off"]] = {}
    for on, off in windows:
        if on >= 0:
            switches[on] = "on"
        if off < len(save_ops):
            switches[off] = "off"
    return Recording(from_start=bool(windows) and windows[0][0] < 0, switches=switches)


def _gap(save_ops: tuple[int, ...], off: int, on: int) -> int:
    return save_ops[on] - save_ops[off] if off < len(save_ops) else -1
