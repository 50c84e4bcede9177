"""What a profile must be for a plan to mean anything; each fault is one line that names the field."""

from __future__ import annotations

import math

from poochplan.errors import PoochError
from poochplan.formats.profile import PointKind, Profile


def check_profile(profile: Profile) -> None:
    """Raises a :class:`~poochplan.errors.PoochError` for the first fault found.

    Faults are: no saved value, no backward, an op without a duration, a value that is read before it is created (a
    cycle), a link without bandwidth, seconds of the launching thread that are none.
    """
    _check_points(profile)
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


def _check_ops(profile: Profile) -> None:
    for index, op in enumerate(profile.ops):
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
