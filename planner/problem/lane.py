"""The launching thread's seconds: when each op is launched, and what the runtime takes (``docs/semantics.md``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from poochplan.formats.profile import PointKind, Profile

from .arrays import Floats


@dataclass(frozen=True, eq=False)
class HostLane:
    """What the launching thread takes in a step, whatever is decided, and what each decision adds to it."""

    is_compute: bool
    """Whether the thread is the compute stream itself, as on the CPU; else the device works behind it."""
    out_s: float
    """For each copy out, the release of its value included."""
    fetch_s: float
    """For each copy back."""
    record_s: float
    """For each recorded op, beside the op itself."""
    replay_s: float
    """For each replayed op, beside the op itself."""
    handles_s: Floats
    """Per op: packs and unpacks since the op before; one entry more than ops, for those behind the last."""
    launch_s: Floats
    """Per op: seconds of its launch in-core; 0 where the thread is the compute stream."""
    last_save_op: int
    """Ops completed at the last save point, where recording ends."""
    _replays: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def before_op_s(self) -> Floats:
        """Per op: what the thread has done before its points and its launch; one entry more than ops.

        An op's own launch is not in it: the clock starts when the first one is launched.
        """
        launched: Floats = np.concatenate(([0.0], np.cumsum(self.launch_s)))
        return launched + np.cumsum(self.handles_s)

    def keep_all_s(self, work_before_op_s: Floats) -> float:
        """Seconds of the step that keeps everything."""
        step_s = float(work_before_op_s[-1])
        if self.is_compute or not len(self.launch_s):
            return step_s
        lead_s = float((self.before_op_s[:-1] - work_before_op_s[:-1]).max())
        return max(step_s + max(0.0, lead_s), float(self.before_op_s[-1]))

    def replay_of(
        self, targets: tuple[int, ...], ops: tuple[int, ...], op_seconds: tuple[float, ...]
    ) -> tuple[float, float]:
        """Seconds in which the thread launches the ``ops`` that bring ``targets`` back, and the most by which it comes
        to one of them later than a device would that never waits.
        """
        found = self._replays.get(targets)
        if found is None:
            launches = [float(self.launch_s[op]) for op in ops]
            before = [0.0, *accumulate(launches)]
            work = [0.0, *accumulate(op_seconds[op] for op in ops)]
            own = [self.replay_s * (position + 1) for position in range(len(ops))]
            behind = max((before[i] + own[i] - work[i] for i in range(len(ops))), default=0.0)
            found = self._replays[targets] = before[-1] + self.replay_s * len(ops), behind
        return found


def build_lane(profile: Profile) -> HostLane | None:
    """The lane of a profile; None where it does not say what the thread takes."""
    cost = profile.runtime
    if cost is None:
        return None
    is_compute = profile.device.kind == "cpu"
    durations = np.array([op.duration_s for op in profile.ops])
    saves = [point.op for point in profile.points if point.kind is PointKind.SAVE]
    return HostLane(
        is_compute=is_compute,
        out_s=cost.swap_s - cost.fetch_s,
        fetch_s=cost.fetch_s,
        record_s=cost.record_s,
        replay_s=cost.replay_s,
        handles_s=_handle_seconds(profile, cost.handle_s - cost.unpack_s, cost.unpack_s),
        launch_s=np.zeros(len(durations)) if is_compute else np.minimum(durations, cost.launch_s),
        last_save_op=max(saves, default=0),
    )


def _handle_seconds(profile: Profile, pack_s: float, unpack_s: float) -> Floats:
    """Per op: the packs of all handles of the values that are saved before it, and the unpacks of those used there."""
    handles_of: dict[int, int] = {}
    for handle in profile.handles:
        handles_of[handle.value] = handles_of.get(handle.value, 0) + 1
    seconds = np.zeros(len(profile.ops) + 1)
    for point in profile.points:
        is_save = point.kind is PointKind.SAVE
        seconds[point.op] += pack_s * handles_of[profile.handles[point.handle].value] if is_save else unpack_s
    return seconds
