"""Live device bytes over the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from poochplan.formats.occupancy import live_bytes
from poochplan.formats.profile import Profile


@dataclass(frozen=True)
class MemoryCurve:
    """A step function: from ``times_s[i]`` to ``times_s[i + 1]`` there are ``size_bytes[i]`` live bytes.

    ``times_s`` has one entry more than ``size_bytes`` and starts at 0.
    """

    times_s: npt.NDArray[np.float64]
    size_bytes: npt.NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        return int(self.size_bytes.max(initial=0))

    @property
    def peak_s(self) -> float:
        """Middle of the first stretch at which the peak is reached."""
        if not self.size_bytes.size:
            return 0.0
        index = int(self.size_bytes.argmax())
        return float(self.times_s[index] + self.times_s[index + 1]) / 2


def in_core_curve(profile: Profile) -> MemoryCurve:
    """The in-core step's memory over time: ops one after another, as long as they take by PyTorch alone."""
    live = live_bytes(profile)
    ticks = np.asarray(profile.op_ticks, dtype=np.int64)
    durations_s = profile.plain_scale * np.asarray([op.duration_s for op in profile.ops], dtype=np.float64)
    return MemoryCurve(times_s=np.concatenate([[0.0], np.cumsum(durations_s)]), size_bytes=live[ticks])
