"""The policy for sequence-to-sequence networks: by time steps, and of these attention first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from poochplan.formats.plan import Decision
from poochplan.planner.judge.candidate import ON_DEMAND, Candidate, try_style
from poochplan.planner.schedule.style import Tuning

from .registry import FITTING_STYLES, PolicyInput, policy
from .time_steps import Loop, loops_of


class Group(NamedTuple):
    """Saved values about which one decision is made."""

    values: tuple[int, ...]
    begin: int
    """First op of the time step; the producer of a value outside of steps."""
    is_attention: bool = False


@policy(
    "seq2seq",
    "by time steps, earliest first: gives up what attention saves of each, then swaps the steps' other values",
    "Meng et al., Training Deeper Models by GPU Memory Optimization on TensorFlow, 2017, section on Seq2Seq",
)
def run_seq2seq(given: PolicyInput) -> Candidate:
    """Takes the groups of :func:`groups_of` in order, as few as fit: attention's are dropped, all others swapped.

    Read of the paper: its abstract, the begin of a summary, and the captions of its figures. It swaps over the dataflow
    graph in general, and has a memory-efficient attention layer for Seq2Seq, drawn as a change of that op's gradient.
    Reconstructed: that this layer's values go first; that steps are taken in the order of time; that what all steps
    read stays longest, as the weights do, which they share too. Whether the layer computes its values again or swaps
    them could not be read: both are tried, and the faster is the policy's plan.

    A network without time steps is left with the paper's general rule: values are swapped as they are produced.
    """
    groups = groups_of(given)
    if not any(group.is_attention for group in groups):
        return _fewest(given, groups, Decision.SWAP)
    return min((_fewest(given, groups, dropped) for dropped in (Decision.RECOMPUTE, Decision.SWAP)), key=given.rank)


def groups_of(given: PolicyInput) -> tuple[Group, ...]:
    """The values that may move, in the order in which they are given up.

    First what attention saves, a group for each time step that has any; then all else that a step makes, a group a
    step; then, one by one, what is made outside of steps; last what all steps of a loop read.
    """
    loops = loops_of(given.profile)
    attention: dict[tuple[int, int], list[int]] = {}
    others: dict[tuple[int, int], list[int]] = {}
    spanning = [_spanning(given, loop) for loop in loops]
    outside = []
    for value in given.movable:
        place = _place(loops, given.producers[value])
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


def _place(loops: Sequence[Loop], op: int) -> tuple[int, int] | None:
    """Loop and step of an op; None where it is in none."""
    for number, loop in enumerate(loops):
        step = loop.step_of(op)
        if step >= 0:
            return number, step
    return None


def _spanning(given: PolicyInput, loop: Loop) -> frozenset[int]:
    """Values of a loop's steps that hold something for each position of what all steps read: those of attention.

    Such a value is computed from a shared value, or from another such value, and is no smaller than the shared one.
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
    """The plan that gives up the fewest groups and fits, in the order of the groups; attention's are ``dropped``."""

    def wish(count: int) -> tuple[Decision, ...]:
        swap: list[int] = []
        recompute: list[int] = []
        for group in groups[:count]:
            for value in group.values:
                is_dropped = group.is_attention and dropped is Decision.RECOMPUTE and value in given.replayable
                (recompute if is_dropped else swap).append(value)
        return given.wish(swap=swap, recompute=recompute)

    def on_demand(count: int) -> Candidate:
        return try_style(given.problem, "", wish(count), 0, ON_DEMAND)

    count, _ = given.first_that_fits(len(groups) + 1, on_demand)
    return _in_time(given, wish(count), groups)


def _in_time(given: PolicyInput, wish: Sequence[Decision], groups: Sequence[Group]) -> Candidate:
    """These decisions in the style that suits them best; the queue outwards has the steps in the order of time."""
    order = [value for group in sorted(groups, key=lambda group: group.begin) for value in group.values]
    tuning = Tuning(out_order=tuple(order))
    tried = [try_style(given.problem, "", wish, given.budget_bytes, style, tuning) for style in FITTING_STYLES]
    return min(tried, key=given.rank)
