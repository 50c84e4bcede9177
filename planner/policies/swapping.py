"""Policies that keep or swap, and never recompute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, PointKind
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.schedule import Schedule, Style, assemble, by_point, keep_all, points_of
from poochplan.planner.simulator.simulate import ON_DEMAND, Candidate, simulated, swap_all, swap_all_on_demand

from .registry import PolicyInput, policy

MIN_DIMENSIONS = 2
"""TFLMS keeps tensors with fewer dimensions."""
_RELEASES = (Style(prefetch="on_demand"), ON_DEMAND)


class _Trip(NamedTuple):
    """The points at which a value goes to the host and comes back."""

    value: int
    swap_out: int
    release: int
    prefetch: int


def _schedule(given: PolicyInput, trips: Sequence[_Trip]) -> Schedule:
    """The schedule of these trips, queued in this order; other values are kept."""
    by_use = sorted(trips, key=lambda trip: given.problem.first_use_point[trip.value])
    lists = by_point(
        swap_out=((trip.value, trip.swap_out) for trip in trips),
        release=((trip.value, trip.release) for trip in trips),
        prefetch=((trip.value, trip.prefetch) for trip in by_use),
    )
    return assemble(given.problem, given.wish(swap=[trip.value for trip in trips]), lists)


@policy("keep-all")
def run_keep_all(given: PolicyInput) -> Candidate:
    """Keeps everything: the in-core step."""
    return simulated(given.problem, "", keep_all(given.problem))


@policy("swap-all")
def run_swap_all(given: PolicyInput) -> Candidate:
    """Swaps every value that may be swapped. The schedule keeps values whose release the budget does not need."""
    return given.candidate(swap_all(given.problem))


@policy("swap-all-on-demand")
def run_swap_all_on_demand(given: PolicyInput) -> Candidate:
    """The plan with the least peak of all; see :func:`swap_all_on_demand`."""
    return swap_all_on_demand(given.problem)


@policy("earliest-first")
def run_earliest_first(given: PolicyInput) -> Candidate:
    """Swaps the first produced values, as few as fit (Alvaro and Kistijantoro, Improving TensorFlow's Memory Swapping
    by Prioritizing Earlier Tensors, 2019).
    """
    return _shortest_run(given, 1)


@policy("latest-first")
def run_latest_first(given: PolicyInput) -> Candidate:
    """Swaps the last produced values, as few as fit: their comparison for earliest-first."""
    return _shortest_run(given, -1)


def _shortest_run(given: PolicyInput, step: int) -> Candidate:
    """Swaps values in the order of their production (``step`` 1) or against it (-1), as few as fit.

    One more value never raises the peak of the schedule on demand, so bisection finds their number.
    """
    order = sorted(given.movable, key=lambda value: (int(given.problem.born[value]), value))[::step]
    return given.candidate(given.fewest_that_fit(len(order) + 1, lambda count: given.wish(swap=order[:count])))


@policy("vdnn")
def run_vdnn(given: PolicyInput) -> Candidate:
    """Swaps the inputs of convolutions (Rhu et al., vDNN, MICRO 2016, section III, vDNN_conv). The budget does not
    matter; without convolutions, every value is kept.

    A value that several convolutions read is swapped out at the last of them. The copy starts at the last save point
    before that convolution ends, and ends at the first point after it. So an input that backward uses at once is kept.
    The copy back starts when backward enters the convolution above it, or with backward if there is none. The paper
    waits for this copy at the end of that layer, and this runtime at the value's use.
    """
    first_use = given.problem.first_use_point
    entered = _backward_convolution_points(given)
    trips = []
    for value, convolution in _read_by_convolutions(given).items():
        swap_out, release = _vdnn_out(given, value, convolution)
        used = first_use[value]
        if given.problem.must_keep[value] or not 0 <= release < used:
            continue
        above = bisect_left(entered, used) - 1
        start = entered[above] if above >= 0 else given.problem.use_points[0]
        prefetch = start if release < start <= used else used
        trips.append(_Trip(value, swap_out, release, prefetch))
    trips.sort(key=lambda trip: (trip.swap_out, trip.value))
    return simulated(given.problem, "", _schedule(given, trips))


def _read_by_convolutions(given: PolicyInput) -> dict[int, int]:
    """By saved value: the last forward convolution whose input it is."""
    saved_of = {value: saved for saved, value in enumerate(given.problem.replay.value_of)}
    last: dict[int, int] = {}
    for index in given.forward_ops:
        inputs = given.profile.ops[index].inputs
        if "conv" in given.op_kinds[index] and inputs and inputs[0] in saved_of:
            last[saved_of[inputs[0]]] = index
    return last


def _vdnn_out(given: PolicyInput, value: int, convolution: int) -> tuple[int, int]:
    """Points at which the copy of a convolution's input starts and is waited for; -1 if there is none."""
    problem = given.problem
    own = problem.save_points[value]
    before = [point for point in problem.save_points[value:] if problem.point_ops[point] <= convolution]
    after = bisect_left(problem.point_ops, convolution + 1)
    return max([own, *before]), max(own, after) if after < len(problem.point_ops) else -1


def _backward_convolution_points(given: PolicyInput) -> list[int]:
    """The use points at which backward enters a convolution, in order."""
    entered: dict[int, int] = {}
    for index, point in enumerate(given.profile.points):
        if point.kind is PointKind.USE and point.op < len(given.profile.ops):
            is_backward = given.profile.ops[point.op].phase is Phase.BACKWARD
            if is_backward and "conv" in given.op_kinds[point.op]:
                entered.setdefault(point.op, index)
    return sorted(entered.values())


@policy("tflms")
def run_tflms(given: PolicyInput) -> Candidate:
    """Swaps a value of two or more dimensions that is used more than ``swapout_threshold`` levels after its production
    (Le et al., TFLMS, 2018, sections 4 and 5).

    The copy back starts ``swapin_ahead`` levels before that use. As in the autotune, no value is swapped if that fits.
    Otherwise the largest threshold that fits with ``swapin_ahead`` 1 is taken, and then the largest ``swapin_ahead``.
    ``swapin_groupby`` merges copies back of one value whose uses are close to each other. This runtime brings a value
    back once, so all uses are one group. TensorFlow's allocator waits for memory. So device memory is released only
    as needed, and a value whose release is not needed is kept.
    """
    in_core = simulated(given.problem, "", keep_all(given.problem))
    distances = level_distances(given)
    if given.fits(in_core) or not distances:
        return in_core
    thresholds = sorted({distance - 1 for distance in distances.values()}, reverse=True)

    def tuned(threshold: int, ahead: int) -> Candidate:
        return _led(given, [value for value, distance in distances.items() if distance > threshold], ahead)

    chosen, found = given.first_that_fits(len(thresholds), lambda n: tuned(thresholds[n], 1))
    if not given.fits(found):
        return found
    leads = range(max(distances.values()), 0, -1)
    return given.first_that_fits(len(leads), lambda n: tuned(thresholds[chosen], leads[n]))[1]


def level_distances(given: PolicyInput) -> dict[int, int]:
    """Levels between production and first backward use, for each value that TFLMS may swap."""
    distances = {}
    for value in given.movable:
        used, producer = given.problem.first_use_point[value], given.producers[value]
        dimensions = len(given.profile.values[given.problem.replay.value_of[value]].shape)
        if used >= 0 and producer >= 0 and dimensions >= MIN_DIMENSIONS:
            distances[value] = level_at(given, used) - given.levels[producer]
    return distances


def level_at(given: PolicyInput, point: int) -> int:
    """Level of the op after a point."""
    return given.levels[min(given.problem.point_ops[point], len(given.levels) - 1)]


def _led(given: PolicyInput, swapped: Sequence[int], ahead: int) -> Candidate:
    """The plan that swaps these values, and copies them back ``ahead`` levels early. Releases are late if that fits."""
    tried = []
    for style in _RELEASES:
        schedule = fit(given.problem, given.wish(swap=swapped), given.budget_bytes, style)
        tried.append(simulated(given.problem, "", _schedule(given, _lead(given, schedule, ahead))))
        if given.fits(tried[-1]):
            break
    return min(tried, key=given.rank)


def _lead(given: PolicyInput, schedule: Schedule, ahead: int) -> list[_Trip]:
    """The trips of a schedule. Each copy back starts ``ahead`` levels before its value's first use."""
    problem = given.problem
    out, gone = points_of(problem, schedule, "swap_out"), points_of(problem, schedule, "release")
    trips = []
    for value, decision in enumerate(schedule.decisions):
        if decision is Decision.SWAP:
            used = problem.first_use_point[value]
            level, points = level_at(given, used) - ahead, [p for p in problem.use_points if gone[value] < p <= used]
            prefetch = next((point for point in reversed(points) if level_at(given, point) <= level), points[0])
            trips.append(_Trip(value, out[value], gone[value], prefetch))
    return sorted(trips, key=lambda trip: (trip.swap_out, problem.forward_death[trip.value], trip.value))
