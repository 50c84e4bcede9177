"""Live bytes over the ticks of the in-core step. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .profile_parts import ProfileData


def live_bytes(profile: ProfileData) -> npt.NDArray[np.int64]:
    """Bytes live at each tick of the in-core step, rounded up as the allocator does; int64, (tick_count,).

    At an op's tick its outputs and its workspace are part of them.
    """
    ticks = profile.op_ticks
    change = np.zeros(profile.tick_count + 1, dtype=np.int64)
    for value in profile.values:
        size_bytes = profile.rounded_bytes(value.size_bytes)
        change[ticks[value.born] if value.born >= 0 else 0] += size_bytes
        change[value.freed + 1] -= size_bytes
    live = np.cumsum(change[:-1])
    for op, tick in zip(profile.ops, ticks, strict=True):
        live[tick] += profile.rounded_bytes(op.workspace_bytes)
    return live
