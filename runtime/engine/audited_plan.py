"""Whose turn it is: for how many steps each released value of a plan has waited for its comparison by the audit."""

from __future__ import annotations

import random

from poochplan.formats.plan import Decision, Instructions

MOST_PLACES = 1 << 14
"""A plan knows of so many places for how long their values have waited."""

Place = tuple[int, int]
"""A save point, and the parameter or buffer that was saved before it. Steps that leave out layers may have values of
different layers at one save point.
"""


class AuditedPlan:
    """State: for how many steps each released value of a plan has waited, and those that are kept from now on.

    Each counts the steps that release it, so that it has its turn on every path that a step can take.
    """

    def __init__(self, instructions: Instructions) -> None:
        self.values = instructions.values
        self._released = {
            index for index, value in enumerate(self.values) if value.decision is not Decision.KEEP and not value.source
        }
        self._waited: dict[Place, int] = {}
        """Steps since a value was compared last."""
        self._elsewhere = dict(zip(sorted(self._released), reversed(range(len(self._released))), strict=True))
        """The same by save point, for places that are new. At first each differs, so that they take turns."""
        self.leaves_out = False
        """Whether steps leave out layers."""
        self.kept = set[int]()
        """Save points of values that have differed."""
        self.last_held: dict[Place, int] = {}
        """The last save point at which forward held a value after its release, as its last comparison has shown."""
        self.is_alarmed = False
        """Whether the next step compares all, because what has changed one value may have changed others."""
        self._bytes = sum(self.values[index].size_bytes for index in self._released)
        self._chance = random.Random(0)

    @property
    def released(self) -> set[int]:
        """Save points of all values that are compared in turn."""
        return self._released - self.kept

    def is_next(self, place: Place, most_bytes: float, left_bytes: float) -> bool:
        """Whether a value that is released now is compared: if as many steps have released it as there are values, or
        if there is time. ``most_bytes`` can be compared in the time of a step, ``left_bytes`` in what is left of it.
        """
        index, waited = place[0], self._waited.pop(place, None)
        is_new = waited is None
        waited = 1 + (self._elsewhere[index] if waited is None else waited)
        is_early = is_new or waited * most_bytes >= self._bytes
        is_next = waited >= len(self.released) or (is_early and self.values[index].size_bytes <= left_bytes)
        if is_next:  # by chance, or turns may fall on steps of one path again and again
            waited = self._chance.randrange(len(self.released) // 2 + 1) if self.leaves_out else 0
        self._waited[place] = waited  # the last one, so that the first one was not seen for longest
        if is_new:
            self._elsewhere[index] = waited
            if len(self._waited) > MOST_PLACES:
                seen_first = next(iter(self._waited))
                del self._waited[seen_first]
                self.last_held.pop(seen_first, None)
        return is_next

    def is_missed(self, place: Place) -> None:
        """The value has not been compared after all: it is the next time that a step releases it."""
        self._waited[place] = len(self.values)
        self.last_held.pop(place, None)

    def named(self, index: int) -> str:
        """A value, for a message."""
        value = self.values[index]
        return f"{value.name} ({_AGAIN[value.decision]}{f', layer {value.layer}' if value.layer else ''})"

    def takes_over(self, before: AuditedPlan) -> None:
        """The plan replaces another for the same steps: what differed under that one is known by its name."""
        names = {before.values[index].name for index in before.kept}
        self.kept = {index for index, value in enumerate(self.values) if value.name in names}
        self.is_alarmed = bool(names)


class SwapsWithoutPlan(AuditedPlan):
    """State: which of the values is compared that the next step swaps without a plan: one, by a checksum."""

    def __init__(self) -> None:
        self.kept, self.last_held, self.is_alarmed = set(), {}, False
        self._turn = self._count = self._most = 0

    def has_turn(self) -> bool:
        """Whether the value that is now released is compared."""
        self._count += 1
        return self.is_alarmed or self._count - 1 == self._turn

    @property
    def latest(self) -> int:
        """The number in its step of the value that was released last."""
        return self._count - 1

    def step_ends(self) -> None:
        if self._count:
            self._most = max(self._most, self._count)
            self._turn, self._count, self.is_alarmed = (self._turn + 1) % self._most, 0, False

    def is_missed(self, place: Place) -> None:
        self.last_held.pop(place, None)

    def named(self, index: int) -> str:
        return f"value {index + 1} of those that a step without a plan swaps"


_AGAIN = {Decision.SWAP: "swapped", Decision.RECOMPUTE: "recomputed", Decision.KEEP: "kept"}
