"""What a profile must be for a plan to mean anything; each fault is one line that names the field."""

from __future__ import annotations

import math

from poochplan.errors import PoochError
from poochplan.formats.profile import PointKind, Profile


def check_profile(profile: Profile) -> None:
    """Raises a :class:`~poochplan.errors.PoochError` for the first fault found.

    Faults are: no saved value, no backward, saves and uses in no order that autograd has, a tick behind the step, an op
    without a duration, a value that is read before it is created (a cycle) or is the output of two, a
    link without bandwidth, seconds of the launching thread that are none.
    """
    _check_points(profile)
    _check_handles(profile)
    _check_ticks(profile)
    _check_ops(profile)
    _check_link(profile)
    _check_runtime(profile)


def _check_points(profile: Profile) -> None:
    kinds = {point.kind for point in profile.points}
    if PointKind.SAVE not in kinds:
        raise PoochError(
            "the profile has no saved value: expected values that forward keeps for backward, found none, so there is "
            "nothing to plan; profile a whole training step"
        )
    if PointKind.USE not in kinds:
        raise PoochError(
            "the profile has no backward: expected a use of a saved value, found none; profile a whole training step"
        )


def _check_handles(profile: Profile) -> None:
    """Each value is saved once, at its first handle; each handle is used once at most, behind that."""
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
        born = (
            value.born_tick if value.born_tick is not None else profile.op_ticks[value.born] if value.born >= 0 else 0
        )
        for name, first, tick in (
            ("born_tick", 0, born),
            ("forward_death", 0, value.forward_death),
            ("freed", born, value.freed),
        ):
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
            if not 0 <= born <= index or value in made:  # earlier: of a compiled region that runs in parts
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


def _check_link(profile: Profile) -> None:
    for name, direction in (("outward", profile.link.outward), ("inward", profile.link.inward)):
        if not direction.bandwidth_bytes_per_s > 0 or direction.latency_s < 0:
            raise PoochError(
                f"link.{name}: expected a bandwidth above 0 and a latency of at least 0, found "
                f"{direction.bandwidth_bytes_per_s} bytes/s and {direction.latency_s} s; measure the link again"
            )


def _check_runtime(profile: Profile) -> None:
    cost = profile.runtime
    if cost is None:
        return
    for name in ("handle_s", "swap_s", "record_s", "replay_s", "launch_s", "unpack_s", "fetch_s"):
        seconds = getattr(cost, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise PoochError(f"runtime.{name}: expected at least 0 s, found {seconds}; profile again")
    if cost.unpack_s > cost.handle_s or cost.fetch_s > cost.swap_s:
        raise PoochError(
            f"runtime: expected unpack_s within handle_s and fetch_s within swap_s, found {cost.unpack_s} of "
            f"{cost.handle_s} s and {cost.fetch_s} of {cost.swap_s} s; profile again"
        )
