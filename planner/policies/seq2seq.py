"""The policy for sequence-to-sequence networks: it gives up values by time steps, those of attention first."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind, Phase, Profile
from poochplan.planner.policies.registry import PolicyInput, policy
from poochplan.planner.simulator.evaluator import STYLE_OF
from poochplan.planner.simulator.schedule import Tuning
from poochplan.planner.simulator.simulate import Candidate, try_style

LEAST_STEPS = 3
"""Fewest repetitions of a loop: two towers that share weights are no loop."""
MOST_PERIODS = 32
"""Most repetitions of an op that are tried as the beginning of the next step."""


@dataclass(frozen=True)
class TimeLoop:
    """One loop over time in the forward pass, unrolled into ops."""

    starts: tuple[int, ...]
    """First op of each step, in order of time."""
    end: int
    """The first op after the last step."""
    shared: frozenset[int]
    """Values that every step reads and that forward made before the first step, such as the states of an encoder."""

    def step_of(self, op: int) -> int:
        """The step that has this op; -1 if none has."""
        return bisect_right(self.starts, op) - 1 if op < self.end else -1

    def ops_of(self, step: int) -> range:
        ends = (*self.starts[1:], self.end)
        return range(self.starts[step], ends[step])


class _Repeat(NamedTuple):
    """A part of a sequence that repeats one pattern."""

    first: int
    period: int
    repeats: int


def loops_of(profile: Profile) -> tuple[TimeLoop, ...]:
    """The loops over time of the profile's forward pass, in order.

    A loop repeats one sequence of (operator, parameters read) at least :data:`LEAST_STEPS` times. Only ops that read
    parameters count. Its steps then also get the ops before these, as far as they are the same in all steps.
    """
    forward, marks = 0, list[tuple[int, tuple[str, tuple[int, ...]]]]()
    for index, op in enumerate(profile.ops):
        if op.phase is Phase.FORWARD:
            forward = index + 1
            parameters = tuple(value for value in op.inputs if profile.values[value].kind is Kind.PARAMETER)
            marks += [(index, (op.name, parameters))] if parameters else []
    loops = []
    for first, period, repeats in _runs([key for _, key in marks]):
        loops.append(_loop(profile, [marks[first + step * period][0] for step in range(repeats)], forward))
    return tuple(loops)


def _runs(keys: Sequence[tuple[str, tuple[int, ...]]]) -> list[_Repeat]:
    """The repeats in a sequence, without overlaps: from left to right, at each place the longest one."""
    places: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    found: list[_Repeat] = []
    first = 0
    while first < len(keys):
        later = places[keys[first]]
        begin = bisect_right(later, first)
        tried = [_run_at(keys, first, place - first) for place in later[begin : begin + MOST_PERIODS]]
        best = max(tried, key=lambda run: (run.period * run.repeats, run.repeats), default=_Repeat(first, 1, 1))
        if best.repeats >= LEAST_STEPS:
            found.append(best)
            first += best.period * best.repeats
        else:
            first += 1
    return found


def _run_at(keys: Sequence[object], first: int, period: int) -> _Repeat:
    """The pattern of this length at this place, with the number of its consecutive repetitions."""
    place = first + period
    while place < len(keys) and keys[place] == keys[place - period]:
        place += 1
    return _Repeat(first, period, (place - first) // period)


def _loop(profile: Profile, starts: Sequence[int], forward_end: int) -> TimeLoop:
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
    return TimeLoop(begins, end, _shared(profile, TimeLoop(begins, end, frozenset())))


def _shared(profile: Profile, loop: TimeLoop) -> frozenset[int]:
    """Values that every step reads and that an op of forward made before the loop."""
    steps = (loop.ops_of(step) for step in range(len(loop.starts)))
    read = set.intersection(*({value for op in ops for value in profile.ops[op].inputs} for ops in steps))
    return frozenset(value for value in read if 0 <= profile.values[value].born < loop.starts[0])


class Group(NamedTuple):
    """Saved values that get one decision."""

    values: tuple[int, ...]
    begin: int
    """First op of the time step; the producer of a value outside of steps."""
    is_attention: bool = False


@policy("seq2seq")
def run_seq2seq(given: PolicyInput) -> Candidate:
    """Gives up the groups of :func:`groups_of` in order, as few as fit: drops those of attention, swaps the others
    (Meng et al., Training Deeper Models by GPU Memory Optimization on TensorFlow, 2017, section on Seq2Seq).

    Known of the paper: its abstract, the beginning of a summary, and the captions of its figures. It swaps over the
    dataflow graph in general, and has a memory-efficient attention layer for Seq2Seq, drawn as a change of that op's
    gradient. Reconstructed: this layer's values go first, steps go in order of time, and values that all steps read
    stay longest, like the weights. Whether the layer recomputes or swaps its values is unknown: both are tried, and
    the faster plan is returned.

    A network without time steps follows the paper's general rule: values are swapped in order of production.
    """
    groups = groups_of(given)
    if not any(group.is_attention for group in groups):
        return _fewest(given, groups, Decision.SWAP)
    return min((_fewest(given, groups, dropped) for dropped in (Decision.RECOMPUTE, Decision.SWAP)), key=given.rank)


def groups_of(given: PolicyInput) -> tuple[Group, ...]:
    """The values that may move, in the order in which they are given up.

    First the values that attention saves, one group for each time step; then the other values of each step; then, one
    by one, values made outside of steps; last the values that all steps of a loop read.
    """
    loops = loops_of(given.profile)
    attention: dict[tuple[int, int], list[int]] = {}
    others: dict[tuple[int, int], list[int]] = {}
    spanning = [_spanning(given, loop) for loop in loops]
    outside = []
    for value in given.movable:
        steps = enumerate(loop.step_of(given.producers[value]) for loop in loops)
        place = next(((loop, step) for loop, step in steps if step >= 0), None)
        if place is None:
            outside.append(value)
            continue
        is_attention = given.problem.replay.value_of[value] in spanning[place[0]]
        (attention if is_attention else others).setdefault(place, []).append(value)
    shared = frozenset[int]().union(*(loop.shared for loop in loops))
    outside.sort(key=lambda value: (given.problem.replay.value_of[value] in shared, given.problem.born[value], value))
    return (
        *(Group(tuple(attention[loop, step]), loops[loop].starts[step], True) for loop, step in sorted(attention)),
        *(Group(tuple(others[loop, step]), loops[loop].starts[step]) for loop, step in sorted(others)),
        *(Group((value,), given.producers[value]) for value in outside),
    )


def _spanning(given: PolicyInput, loop: TimeLoop) -> frozenset[int]:
    """The values of attention in a loop's steps: each has something for every position of a shared value.

    Such a value is computed from a shared value, or from another such value, and is at least as large.
    """
    values = given.profile.values
    least_bytes = {value: values[value].size_bytes for value in loop.shared}
    for index in range(loop.starts[0], loop.end):
        op = given.profile.ops[index]
        sources = [least_bytes[value] for value in (*op.inputs, *op.writes) if value in least_bytes]
        for made in op.outputs if sources else ():
            if values[made].size_bytes >= min(sources):
                least_bytes[made] = min(sources)
    return frozenset(least_bytes) - loop.shared


def _fewest(given: PolicyInput, groups: Sequence[Group], dropped: Decision) -> Candidate:
    """The plan that fits and gives up the fewest groups, in order. ``dropped`` is the decision for attention's. The
    outward queue has the steps in order of time.
    """

    def wish(count: int) -> tuple[Decision, ...]:
        swap: list[int] = []
        recompute: list[int] = []
        for group in groups[:count]:
            for value in group.values:
                is_dropped = group.is_attention and dropped is Decision.RECOMPUTE and value in given.replayable
                (recompute if is_dropped else swap).append(value)
        return given.wish(swap=swap, recompute=recompute)

    fewest = given.fewest_that_fit(len(groups) + 1, wish)
    in_time = [value for group in sorted(groups, key=lambda group: group.begin) for value in group.values]
    tuning = Tuning(out_order=tuple(in_time))
    tried = [try_style(given.problem, "", fewest, given.budget_bytes, style, tuning) for style in STYLE_OF]
    return min(tried, key=given.rank)
