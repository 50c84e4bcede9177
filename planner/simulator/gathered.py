"""The replays that find the gathered weights that they read (FSDP2), whatever the other decisions are.

Such a weight has memory only in *stretches* of the step: in the unit's forward, and around its backward. A replay runs
at the first use of its value, or at that of a value whose replay starts from it. At each of these ticks, all weights
that its ops read must have memory. So a value may be recomputed only if this holds for any decisions on other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poochplan.formats.occupancy import born_ticks
from poochplan.formats.profile import Profile


@dataclass(frozen=True)
class Stretches:
    """First and last tick of each stretch. A storage is named by the value of its first stretch."""

    profile: Profile
    of: dict[int, list[tuple[int, int]]]

    @classmethod
    def in_profile(cls, profile: Profile) -> Stretches:
        """The stretches of all storages that release their memory and take it again."""
        numbers = [number for number, value in enumerate(profile.values) if value.stretch_of >= 0]
        found: dict[int, list[tuple[int, int]]] = {}
        for number, born in zip(numbers, born_ticks(profile, numbers).tolist(), strict=True):
            value = profile.values[number]
            found.setdefault(value.stretch_of, []).append((born, value.freed))
        return cls(profile, found)

    def read_by(self, ops: Sequence[int]) -> set[int]:
        """The storages that these ops read, by their first stretches."""
        read = {value for op in ops for value in self.profile.ops[op].inputs}
        return {self.profile.values[value].stretch_of for value in read} - {-1}

    def around(self, storage: int, tick: int) -> tuple[int, int] | None:
        """The stretch that has the tick; None if the storage has no memory then."""
        return next((one for one in self.of[storage] if one[0] <= tick <= one[1]), None)


@dataclass(frozen=True)
class Reach:
    """Where replays may run, value by value."""

    reasons: tuple[str, ...]
    """Why a replay may not find the weights that it reads; empty if it always finds them."""
    earliest_tick: tuple[int, ...]
    """First tick of its replays: from here to its first use, all weights that they may read have memory."""


def reach_of(
    stretches: Stretches,
    ops: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
    first_use: Sequence[int],
) -> Reach:
    """The reach of saved values. Each has the ops of its replay (empty without a replay), the saved values from which
    it starts, and the tick of its first use.
    """
    reads = [stretches.read_by(own) for own in ops]
    reasons = [""] * len(ops)
    tick_count = stretches.profile.tick_count
    asked = [{tick} if tick < tick_count else set[int]() for tick in first_use]
    by_last_op = sorted((own[-1], value) for value, own in enumerate(ops) if own)
    for _, value in reversed(by_last_op):  # a replay that starts from a value has a later last op
        away = [one for one in reads[value] if any(stretches.around(one, tick) is None for tick in asked[value])]
        if away:
            reasons[value] = _reason(stretches, min(away), is_own=stretches.around(min(away), first_use[value]) is None)
            continue
        for source in inputs[value]:
            asked[source] |= asked[value]
    earliest = [0] * len(ops)
    for _, value in by_last_op:
        if not reasons[value]:
            for source in inputs[value]:
                reads[value] |= reads[source] if not reasons[source] else set()
            around = (stretches.around(one, first_use[value]) for one in reads[value])
            earliest[value] = max((one[0] for one in around if one is not None), default=0)
    return Reach(tuple(reasons), tuple(earliest))


def _reason(stretches: Stretches, storage: int, *, is_own: bool) -> str:
    name = stretches.profile.values[storage].name
    when = "it is used" if is_own else "another value's replay may start from it"
    return f"its input {name} is not gathered when {when}"
