"""Makes a Problem from a Profile: everything that the planner needs to know about one step, as plain arrays.

Ticks are those of ``poochplan.formats.profile``; bytes are rounded up to the allocation unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, zip_longest

import numpy as np

from poochplan.errors import ModelMismatchError, PoochError
from poochplan.formats.occupancy import Floats, Ints, born_ticks, live_bytes
from poochplan.formats.plan import Plan, StateChunk
from poochplan.formats.profile import Kind, Link, Phase, PointKind, Profile, RuntimeCost
from poochplan.formats.queries import saved_values

from .optimizer_state import check_state, with_state
from .replays import MergedReplay, ReplayGraph, build_replay_graph
from .sources import is_source, with_sources
from .views import on_ranks, without_arena

HELD = "held by something other than autograd until it is used"
"""Why a value can only be kept whose forward death is no earlier than its first use."""


@dataclass(frozen=True, eq=False)
class LaunchCost:
    """The launching thread's cost in a step: the part that is the same for all decisions, and the part that each
    decision adds. All are 0 if the profile lacks them.
    """

    is_compute: bool
    """Whether the thread is the compute stream itself, as on the CPU; else it is ahead of the device."""
    out_s: float
    """For each copy out, including the release of its value."""
    fetch_s: float
    """For each copy back."""
    record_s: float
    """For each recorded op, in addition to the op itself."""
    drop_s: float
    """For each value that a replay will bring back, at its save point."""
    replay_s: float
    """For each replayed op, in addition to the op itself."""
    handles_s: Floats
    """Per op: packs and unpacks since the op before; the additional last entry is for those after the last op."""
    launch_s: Floats
    """Per op: seconds of its launch; 0 if the thread is the compute stream. In-core the thread reaches no op after it
    has begun, for the ops' seconds are those of a measured step."""
    last_save_op: int
    """Ops completed at the last save point, where recording ends."""
    _replays: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def before_op_s(self) -> Floats:
        """Per op: the thread's work before the op's points and launch; one entry more than ops.

        An op's own launch is not included: the clock starts when the first op is launched.
        """
        launched: Floats = np.concatenate(([0.0], np.cumsum(self.launch_s)))
        return launched + np.cumsum(self.handles_s)

    def replay_of(self, replay: MergedReplay, op_seconds: tuple[float, ...]) -> tuple[float, float]:
        """Seconds in which the thread launches the ops of a replay, and the largest delay with which it reaches one of
        them, compared with a device that never waits.
        """
        found = self._replays.get(replay.targets)
        if found is None:
            count = len(replay.ops)
            before = [0.0, *accumulate(float(self.launch_s[op]) for op in replay.ops)]
            work = [0.0, *accumulate(op_seconds[op] for op in replay.ops)]
            behind = max((before[i] + self.replay_s * (i + 1) - work[i] for i in range(count)), default=0.0)
            found = self._replays[replay.targets] = before[-1] + self.replay_s * count, behind
        return found


def launch_cost_of(profile: Profile) -> LaunchCost:
    """The launch cost of a profile."""
    measured = profile.runtime or RuntimeCost(handle_s=0.0, swap_s=0.0, record_s=0.0)
    is_compute = profile.runtime is None or profile.device.kind == "cpu"
    durations = np.array([op.duration_s for op in profile.ops])
    handles_of = Counter(handle.value for handle in profile.handles if not is_source(profile.values[handle.value]))
    saves, handles_s = [0], np.zeros(len(profile.ops) + 1)
    for point in profile.points:
        if point.kind is PointKind.SAVE:  # packs all handles of its value
            saves.append(point.op)
            count = handles_of[profile.handles[point.handle].value]
            handles_s[point.op] += (measured.handle_s - measured.unpack_s) * count
        else:
            handles_s[point.op] += measured.unpack_s
    return LaunchCost(
        is_compute=is_compute,
        out_s=measured.swap_s - measured.fetch_s,
        fetch_s=measured.fetch_s,
        record_s=measured.record_s,
        drop_s=measured.drop_s,
        replay_s=measured.replay_s,
        handles_s=handles_s,
        launch_s=np.zeros(len(durations)) if is_compute else _launches(profile, measured, durations),
        last_save_op=max(saves),
    )


def _launches(profile: Profile, measured: RuntimeCost, durations: Floats) -> Floats:
    phases = measured.phase_launch_s
    launches = np.cumsum([0.0, *(phases.get(op.phase, measured.launch_s) for op in profile.ops)])
    begins = np.cumsum([0.0, *durations])
    reached: Floats = launches + np.minimum.accumulate(begins - launches)
    return np.maximum(np.diff(reached), 0.0)


@dataclass(frozen=True, eq=False)
class Problem:
    """One training step to be planned. Saved values are numbered in the order of their first packs."""

    profile: Profile
    """The step with all that was asked for in :meth:`of`."""
    tick_count: int
    op_ticks: Ints
    work_before_op_s: Floats
    """Seconds of the compute stream before each op when everything is kept. It has one entry more than ops; the last is
    the whole step. On the CPU they include the handles' seconds (``launch_cost``)."""
    point_ticks: Ints
    point_work_s: Floats
    """The same before each point."""
    point_ops: tuple[int, ...]
    """Ops completed before each point."""
    point_is_save: tuple[bool, ...]
    point_value: tuple[int, ...]
    """Saved value that each point packs or unpacks."""
    handles: tuple[int, ...]
    """Saved value of each handle; -1 for a handle outside the plan."""
    save_points: tuple[int, ...]
    """Point of each saved value's first pack."""
    use_points: tuple[int, ...]
    """Point of each use, in order."""
    names: tuple[str, ...]
    layers: tuple[str, ...]
    size_bytes: Ints
    """Bytes a copy moves."""
    rounded_bytes: Ints
    """Bytes a resident value takes."""
    born: Ints
    forward_death: Ints
    freed: Ints
    save_tick: Ints
    first_use: Ints
    """Tick of the first use point; ``tick_count`` if backward never uses it."""
    first_use_point: tuple[int, ...]
    """-1 if backward never uses it."""
    copies: dict[int, int]
    """By source (``sources.py``): the larger copy of it that is saved, which is the next value."""
    must_keep: tuple[str, ...]
    """Why a value can only be kept; empty if it may be swapped."""
    replay: ReplayGraph
    base_bytes: Ints
    """Bytes at each tick that no decision changes, including workspace and without saved values."""
    link: Link
    in_core_s: float
    """Seconds of the in-core step: without a session, and so without handles."""
    plain_s: float
    """Seconds of the step by PyTorch alone if that was timed, else ``in_core_s``: the reference of overheads."""
    launch_cost: LaunchCost
    measured: Profile
    """The profile with all optimizer state on the device; ``profile`` is the same step with ``state``."""
    state: tuple[StateChunk, ...]
    """The chunks of optimizers of which some state is streamed, as ``Plan.state``."""

    @staticmethod
    def of(
        profile: Profile,
        plan: Plan | None = None,
        *,
        ranks: int = 1,
        has_arena: bool | None = None,
        has_sources: bool = False,
        state: Sequence[StateChunk] = (),
    ) -> Problem:
        """The planning problem of a profile's step, or of the step of a plan that was made from it: with the plan's
        sources and optimizer state, its share of the link, and an arena if it has one.

        ``ranks`` of one host share its link evenly. ``has_sources``: sources may be held. ``state``: chunks, of which
        some are streamed. Raises ``ModelMismatchError`` if the plan was made from another profile, ``UsageError`` if
        ``ranks`` is below 1, and as :func:`check_profile`.
        """
        if plan is not None:
            ranks, has_sources, state = max(ranks, plan.link.ranks), any(one.source for one in plan.values), plan.state
            has_arena = plan.holds_arena if has_arena is None else has_arena
        profile = on_ranks(without_arena(profile) if has_arena is False else profile, ranks)
        profile = with_sources(profile) if has_sources else profile
        if plan is not None:
            _check_names(profile, plan)
            check_state(profile, plan.state)
        return _problem_of(profile, tuple(state))

    @cached_property
    def point_tick_list(self) -> list[int]:
        """``point_ticks`` for code that reads one at a time."""
        return list(map(int, self.point_ticks))

    @cached_property
    def point_work_list(self) -> list[float]:
        """``point_work_s`` for code that reads one at a time."""
        return list(map(float, self.point_work_s))

    @cached_property
    def save_op_array(self) -> Ints:
        return np.array([self.point_ops[point] for point in self.save_points], dtype=np.int64)

    @cached_property
    def use_ticks(self) -> list[int]:
        return [self.point_tick_list[point] for point in self.use_points]

    @cached_property
    def point_index(self) -> tuple[int, ...]:
        """Per point: its index among the save points or among the use points."""
        counts = {True: -1, False: -1}
        found = []
        for is_save in self.point_is_save:
            counts[is_save] += 1
            found.append(counts[is_save])
        return tuple(found)

    @property
    def value_count(self) -> int:
        return len(self.names)

    @property
    def step_s(self) -> float:
        """Seconds of the compute stream when everything is kept."""
        return float(self.work_before_op_s[-1])

    @cached_property
    def keep_all_s(self) -> float:
        """Seconds of the step that keeps everything; no plan's step is shorter."""
        cost, before_op_s = self.launch_cost, self.launch_cost.before_op_s
        if cost.is_compute or not len(cost.launch_s):
            return self.step_s
        lead_s = float((before_op_s[:-1] - self.work_before_op_s[:-1]).max())
        return max(self.step_s + max(0.0, lead_s), float(before_op_s[-1]))

    @cached_property
    def first_step_less_bytes(self) -> Ints:
        """How many bytes less are live at each tick of the first step, before the optimizer has state."""
        less = np.zeros(self.tick_count, dtype=np.int64)
        ops = zip(self.profile.ops, self.profile.op_ticks, strict=True)
        first_tick = next((tick for op, tick in ops if op.phase is Phase.OPTIMIZER), 0)
        less[:first_tick] = sum(
            self.profile.rounded_bytes(value.size_bytes)
            for value in self.profile.values
            if value.kind is Kind.OPTIMIZER_STATE and value.born < 0
        )
        return less

    @cached_property
    def unserved(self) -> Problem:
        """The same without an arena; itself if ops take no other time then."""
        slower = without_arena(self.measured)
        return self if slower is self.measured else _problem_of(slower, self.state)

    def with_state(self, state: Sequence[StateChunk]) -> Problem:
        """The same step with other chunks of optimizer state, of which some are streamed."""
        return self if tuple(state) == self.state else _problem_of(self.measured, tuple(state))

    def out_seconds(self, value: int) -> float:
        """Seconds of a value's copy to the host, alone on the link."""
        return self.link.out_seconds(int(self.size_bytes[value]))

    def in_seconds(self, value: int) -> float:
        """Seconds of a value's copy back, alone on the link."""
        return self.link.in_seconds(int(self.size_bytes[value]))

    def overhead(self, step_s: float) -> float:
        """Overhead of a step, relative to the one by PyTorch alone."""
        return step_s / self.plain_s - 1 if self.plain_s > 0 else 0.0

    def replay_seconds(self, value: int) -> float:
        """Seconds of the compute stream for a value's own replay; it has one."""
        replay, cost = self.replay.of(value), self.launch_cost
        return replay.seconds + (cost.replay_s if cost.is_compute else 0.0) * len(replay.ops)

    def layer_at(self, tick: int) -> str:
        """Layer of the op at a tick, or of the value packed or unpacked there."""
        index = int(np.searchsorted(self.op_ticks, tick))
        if index < len(self.op_ticks) and self.op_ticks[index] == tick:
            op = self.profile.ops[index]
            return op.layer or ("optimizer" if op.phase is Phase.OPTIMIZER else "")
        point = int(np.searchsorted(self.point_ticks, tick))
        if point < len(self.point_ticks) and self.point_value[point] >= 0:
            return self.layers[self.point_value[point]]
        return ""


def _check_names(profile: Profile, plan: Plan) -> None:
    names = [profile.values[index].name for index in saved_values(profile)]
    for wanted, found in zip_longest((value.name for value in plan.values), names):
        if wanted != found:
            raise ModelMismatchError(
                f"the plan was made from another profile: expected the saved value {wanted or 'nothing further'}, "
                f"found {found or 'nothing further'}; name the profile that the plan was made from, or plan again"
            )


def _problem_of(measured: Profile, state: tuple[StateChunk, ...]) -> Problem:
    profile = with_state(measured, state)
    check_profile(profile)
    is_save = tuple(point.kind is PointKind.SAVE for point in profile.points)
    save_points = tuple(index for index, save in enumerate(is_save) if save)
    use_points = tuple(index for index, save in enumerate(is_save) if not save)
    value_of = [profile.handles[profile.points[point].handle].value for point in save_points]
    values = [profile.values[value] for value in value_of]
    saved_of = [-1] * len(profile.values)
    for saved, value in enumerate(value_of):
        saved_of[value] = saved
    handle_value = tuple(saved_of[handle.value] for handle in profile.handles)
    point_value = tuple(handle_value[point.handle] for point in profile.points)
    first_use_point = [-1] * len(value_of)
    for point in reversed(use_points):
        first_use_point[point_value[point]] = point
    point_ticks = np.array(profile.point_ticks, dtype=np.int64)
    first_use = np.array([point_ticks[p] if p >= 0 else profile.tick_count for p in first_use_point], dtype=np.int64)
    work = np.concatenate(([0.0], np.cumsum([op.duration_s for op in profile.ops])))
    in_core_s, cost = float(work[-1]), launch_cost_of(profile)
    if cost.is_compute:
        work = work + cost.before_op_s
    point_ops = tuple(point.op for point in profile.points)
    save_tick = point_ticks[list(save_points)]
    copies = {saved: saved + 1 for saved, value in enumerate(values) if is_source(value)}
    return Problem(
        profile=profile,
        tick_count=profile.tick_count,
        op_ticks=np.array(profile.op_ticks, dtype=np.int64),
        work_before_op_s=work,
        point_ticks=point_ticks,
        point_work_s=work[list(point_ops)],
        point_ops=point_ops,
        point_is_save=is_save,
        point_value=point_value,
        handles=handle_value,
        save_points=save_points,
        use_points=use_points,
        names=tuple(value.name for value in values),
        layers=tuple(value.layer for value in values),
        size_bytes=np.array([value.size_bytes for value in values], dtype=np.int64),
        rounded_bytes=np.array([profile.rounded_bytes(value.size_bytes) for value in values], dtype=np.int64),
        born=born_ticks(profile, value_of),
        forward_death=np.array([value.forward_death for value in values], dtype=np.int64),
        freed=np.array([value.freed for value in values], dtype=np.int64),
        save_tick=save_tick,
        first_use=first_use,
        first_use_point=tuple(first_use_point),
        copies=copies,
        must_keep=tuple(
            value.pinned or (HELD if value.forward_death >= use else "")
            for value, use in zip(values, first_use, strict=True)
        ),
        replay=build_replay_graph(
            profile,
            saved_of,
            value_of,
            [point_ops[p] for p in save_points],
            save_tick.tolist(),
            first_use.tolist(),
            copies,
        ),
        base_bytes=live_bytes(profile, [value for value, saved in enumerate(saved_of) if saved < 0]),
        link=profile.link,
        in_core_s=in_core_s,
        plain_s=in_core_s if profile.times.plain_step_s is None else profile.times.plain_step_s,
        launch_cost=cost,
        measured=measured,
        state=state,
    )


def check_profile(profile: Profile) -> None:
    """Raises a :class:`~poochplan.errors.PoochError` for the first fault found.

    Faults are: no saved value, no backward, saves and uses in an order that autograd never has, a tick after the step,
    an op without a duration, a value that is read before it is created (a cycle) or is the output of two ops, a link
    without bandwidth, invalid seconds of the launching thread.
    """
    _check_points(profile)
    _check_ticks(profile)
    _check_ops(profile)
    _check_costs(profile)


def _check_points(profile: Profile) -> None:
    """Each value is saved once, at its first handle. Each handle is used at most once, after that."""
    what = {
        PointKind.SAVE: "saved value: expected values that forward keeps for backward, found none, so there is nothing "
        "to plan",
        PointKind.USE: "backward: expected a use of a saved value, found none",
    }
    kinds = {point.kind for point in profile.points}
    for kind, fault in what.items():
        if kind not in kinds:
            raise PoochError(f"the profile has no {fault}; profile a whole training step")
    values = [handle.value for handle in profile.handles]
    first = {value: len(values) - 1 - place for place, value in enumerate(reversed(values))}
    saved, used = set[int](), set[int]()
    for number, point in enumerate(profile.points):
        value = values[point.handle]
        if point.kind is PointKind.SAVE:
            fault = "" if first[value] == point.handle and value not in saved else "the first handle of a value, once"
            saved.add(value)
        else:
            fault = (
                "" if value in saved and point.handle not in used else "a handle of a value that is saved by then, once"
            )
            used.add(point.handle)
        if fault:
            raise PoochError(
                f"points[{number}].handle: expected {fault}, found handle {point.handle} of "
                f"{profile.values[value].name}; profile again"
            )
    lost = next((place for place, value in enumerate(values) if value not in saved), None)
    if lost is not None:
        raise PoochError(
            f"handles[{lost}].value: expected a value with a save point, found {profile.values[values[lost]].name}, "
            "which has none; profile again"
        )


def _check_ticks(profile: Profile) -> None:
    for number, value in enumerate(profile.values):
        born = 0 if value.born < 0 else profile.op_ticks[value.born]
        born = born if value.born_tick is None else value.born_tick
        ticks = ("born_tick", 0, born), ("forward_death", 0, value.forward_death), ("freed", born, value.freed)
        for name, first, tick in ticks:
            if not first <= tick < profile.tick_count:
                raise PoochError(
                    f"values[{number}].{name} ({value.name}): expected a tick from {first} to "
                    f"{profile.tick_count - 1}, the step's last, found {tick}; profile again"
                )


def _check_ops(profile: Profile) -> None:
    made = set[int]()
    for index, op in enumerate(profile.ops):
        for value in op.outputs:
            born = profile.values[value].born
            if not 0 <= born <= index or value in made:  # earlier if a compiled region runs in parts
                raise PoochError(
                    f"ops[{index}].outputs ({op.name}): expected values that are born by then, each in one op's, found "
                    f"{profile.values[value].name}, which ops[{born}] creates; profile again"
                )
            made.add(value)
        if not (math.isfinite(op.duration_s) and op.duration_s >= 0):
            raise PoochError(
                f"ops[{index}] ({op.name}): expected a duration of at least 0 s, found {op.duration_s}; profile again"
            )
        for value in (*op.inputs, *op.writes):
            born = profile.values[value].born
            if born > index:
                raise PoochError(
                    f"ops[{index}] ({op.name}) reads {profile.values[value].name}: expected a value that an earlier op "
                    f"creates, found one that ops[{born}] creates later (a cycle); profile again"
                )


def _check_costs(profile: Profile) -> None:
    for name, direction in (("outward", profile.link.outward), ("inward", profile.link.inward)):
        if not direction.bandwidth_bytes_per_s > 0 or direction.latency_s < 0:
            raise PoochError(
                f"link.{name}: expected a bandwidth above 0 and a latency of at least 0, found "
                f"{direction.bandwidth_bytes_per_s} bytes/s and {direction.latency_s} s; measure the link again"
            )
    cost = profile.runtime
    if cost is None:
        return
    for name in ("handle_s", "swap_s", "record_s", "drop_s", "replay_s", "launch_s", "unpack_s", "fetch_s"):
        seconds = getattr(cost, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise PoochError(f"runtime.{name}: expected at least 0 s, found {seconds}; profile again")
    if cost.unpack_s > cost.handle_s or cost.fetch_s > cost.swap_s:
        raise PoochError(
            f"runtime: expected unpack_s within handle_s and fetch_s within swap_s, found {cost.unpack_s} of "
            f"{cost.handle_s} s and {cost.fetch_s} of {cost.swap_s} s; profile again"
        )
