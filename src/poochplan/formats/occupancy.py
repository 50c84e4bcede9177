"""Bytes live over ticks: of any spans, and of the in-core step. StepTrace: what each stream does in one step, op by op,
and live bytes over its time; predicted, or measured. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .profile_data import ProfileData
from .profile_parts import Kind, Value

Ints: TypeAlias = npt.NDArray[np.int64]
"""Ticks, bytes, values."""
Floats: TypeAlias = npt.NDArray[np.float64]
"""Seconds, and numbers of solvers."""
Codes: TypeAlias = npt.NDArray[np.int8]
"""Codes of decisions."""
STEP, COMPUTE, OUT_LINK, IN_LINK, THREAD = "step", "compute", "out-link", "in-link", "launching thread"
TRACKS = (STEP, COMPUTE, OUT_LINK, IN_LINK, THREAD)


def occupancy(ticks: int, *spans: tuple[Ints, Ints, Ints]) -> Ints:
    """Bytes live at each of ``ticks`` ticks, numbered from 0; int64, (ticks,).

    The caller defines ticks: those of a step (``profile_parts``), the ops of a replay, the times of an arena. Spans are
    arrays (first tick, last tick, bytes) of equal length. The bytes are live from the first tick to the last, both
    included. Spans may last beyond the last tick. A span that begins beyond it, or ends before it begins, is never
    live.
    """
    change = np.zeros(ticks + 1, dtype=np.int64)
    for first, last, size_bytes in spans:
        start = np.minimum(first, ticks)
        np.add.at(change, start, size_bytes)
        np.subtract.at(change, np.minimum(np.maximum(last + 1, start), ticks), size_bytes)
    live: Ints = np.cumsum(change[:-1])
    return live


def live_bytes(profile: ProfileData, values: Sequence[int] | None = None, *, workspace: bool = True) -> Ints:
    """Bytes live at each tick of the in-core step, rounded up as the allocator does; int64, (tick_count,).

    At an op's tick they include its outputs and, with ``workspace``, its workspace. With ``values``, only these values
    count besides workspace.
    """
    counted = range(len(profile.values)) if values is None else values
    freed = ints(profile.values[value].freed for value in counted)
    size_bytes = ints(profile.rounded_bytes(profile.values[value].size_bytes) for value in counted)
    workspace_bytes = ints(profile.rounded_bytes(op.workspace_bytes) * workspace for op in profile.ops)
    op_ticks = ints(profile.op_ticks)
    return occupancy(
        profile.tick_count, (born_ticks(profile, counted), freed, size_bytes), (op_ticks, op_ticks, workspace_bytes)
    )


def born_ticks(profile: ProfileData, values: Iterable[int]) -> Ints:
    """The tick at which each of these values is created; 0 for those from before the step."""
    wanted = (profile.values[value] for value in values)
    by_op = (*profile.op_ticks, 0)  # the last one for values that no op creates, whose ``born`` is -1
    return ints(by_op[one.born] if one.born_tick is None else one.born_tick for one in wanted)


def ints(numbers: Iterable[int]) -> Ints:
    """The numbers as an array for :func:`occupancy`."""
    return np.fromiter(numbers, dtype=np.int64)


def static_bytes(profile: ProfileData) -> dict[str, int]:
    """Bytes that live through the whole step, by kind; gradients only if they live through forward."""
    return {
        kind: size_bytes
        for kind, size_bytes in profile.static_bytes.items()
        if size_bytes and (kind != Kind.GRADIENT or profile.gradients_live_through_forward)
    }


def held_until(
    name: str,
    size_bytes: int,
    last_tick: int,
    born: int | None = None,
    born_tick: int | None = None,
    layer: str = "",
    before: Kind = Kind.INPUT,
) -> Value:
    """A block that no tensor shows, as a value up to that tick. If ``born`` names no op, it is from before the step,
    and of the kind ``before``. No decision changes it.
    """
    return Value(
        name=name,
        layer=layer,
        kind=before if born is None else Kind.TEMPORARY,
        size_bytes=size_bytes,
        dtype="uint8",
        shape=(size_bytes,),
        born=-1 if born is None else born,
        born_tick=born_tick,
        forward_death=last_tick,
        freed=last_tick,
    )


@dataclass(frozen=True)
class Bar:
    """A span of time on a track of a trace, or on a row of a picture."""

    row: str
    what: str
    start_s: float
    end_s: float
    label: str = ""
    """The values that are moved, waited for or recomputed; for an op its layer."""


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
        """Middle of the first span in which the peak is reached."""
        if not self.size_bytes.size:
            return 0.0
        index = int(self.size_bytes.argmax())
        return float(self.times_s[index] + self.times_s[index + 1]) / 2


@dataclass(frozen=True)
class StepTrace:
    """Bars lie on ``TRACKS``; on one track they follow each other or lie inside of each other."""

    workload: str
    source: Literal["predicted", "measured"]
    budget_bytes: int
    step_s: float
    bars: tuple[Bar, ...]
    memory: MemoryCurve
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """Other facts: peaks, overhead."""
