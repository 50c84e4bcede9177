"""Time steps of a recurrent network, found in a profile: where the same ops with the same parameters come again.

Nothing is told by names of layers. A fused recurrent layer is one op, and has no time steps that a plan could use.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poochplan.formats.profile import Kind, Op, Phase, Profile

LEAST_STEPS = 3
"""Fewer repetitions are no loop: two towers that share their weights are none."""
MOST_PERIODS = 32
"""Of the places at which an op comes again, so many are looked at as the begin of the next step."""


@dataclass(frozen=True)
class Loop:
    """One loop over time in the forward pass, unrolled into ops."""

    starts: tuple[int, ...]
    """First op of each step, in order of time."""
    end: int
    """The op behind the last step."""
    shared: frozenset[int]
    """Values that every step reads and that forward made before the first one, such as the states of an encoder."""

    def step_of(self, op: int) -> int:
        """Which step an op is in; -1 for none."""
        return bisect_right(self.starts, op) - 1 if op < self.end else -1

    def ops_of(self, step: int) -> range:
        """The ops of a step."""
        ends = (*self.starts[1:], self.end)
        return range(self.starts[step], ends[step])


class _Run(NamedTuple):
    """A stretch of a sequence that is one pattern again and again."""

    first: int
    period: int
    repeats: int


def loops_of(profile: Profile) -> tuple[Loop, ...]:
    """The loops over time of the profile's forward pass, in order; empty where there are none.

    A loop is at least :data:`LEAST_STEPS` repetitions of the same sequence of (operator, parameters read), of the ops
    that read any. Its steps are then widened to the ops before these, as far as they are the same in all steps.
    """
    forward = [index for index, op in enumerate(profile.ops) if op.phase is Phase.FORWARD]
    marks = [(index, parameters) for index in forward if (parameters := _parameters(profile, profile.ops[index]))]
    found = _runs([(profile.ops[index].name, parameters) for index, parameters in marks])
    loops = []
    for run in found:
        starts = [marks[run.first + step * run.period][0] for step in range(run.repeats)]
        loops.append(_loop(profile, starts, forward[-1] + 1))
    return tuple(loops)


def _parameters(profile: Profile, op: Op) -> tuple[int, ...]:
    return tuple(value for value in op.inputs if profile.values[value].kind is Kind.PARAMETER)


def _runs(keys: Sequence[tuple[str, tuple[int, ...]]]) -> list[_Run]:
    """The runs of a sequence, none of which overlap: from left to right, at each place the one that covers the most."""
    places: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    found: list[_Run] = []
    first = 0
    while first < len(keys):
        later = places[keys[first]]
        begin = bisect_right(later, first)
        tried = [_run_at(keys, first, place - first) for place in later[begin : begin + MOST_PERIODS]]
        best = max(tried, key=lambda run: (run.period * run.repeats, run.repeats), default=_Run(first, 1, 1))
        if best.repeats >= LEAST_STEPS:
            found.append(best)
            first += best.period * best.repeats
        else:
            first += 1
    return found


def _run_at(keys: Sequence[object], first: int, period: int) -> _Run:
    """How often the pattern of this length at this place comes, one right after the other."""
    place = first + period
    while place < len(keys) and keys[place] == keys[place - period]:
        place += 1
    return _Run(first, period, (place - first) // period)


def _loop(profile: Profile, starts: Sequence[int], forward_end: int) -> Loop:
    """The loop whose steps have their first reader of a parameter at these ops."""
    names = [op.name for op in profile.ops[:forward_end]]
    shift, shortest = 0, min(later - start for start, later in itertools.pairwise(starts))
    while shift + 1 < shortest and starts[0] > shift:
        if len({names[start - shift - 1] for start in starts}) > 1:
            break
        shift += 1
    begins = tuple(start - shift for start in starts)
    length = begins[-1] - begins[-2]
    end = begins[-1]
    while end < forward_end and end - begins[-1] < length and names[end] == names[end - length]:
        end += 1
    return Loop(begins, end, _shared(profile, Loop(begins, end, frozenset())))


def _shared(profile: Profile, loop: Loop) -> frozenset[int]:
    """What every step reads and an op of forward made before the loop."""
    shared: frozenset[int] | None = None
    for step in range(len(loop.starts)):
        read = {value for op in loop.ops_of(step) for value in profile.ops[op].inputs}
        made_before = frozenset(value for value in read if 0 <= profile.values[value].born < loop.starts[0])
        shared = made_before if shared is None else shared & made_before
    return shared or frozenset()
