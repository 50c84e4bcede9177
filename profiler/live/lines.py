"""Which segments are of one kind, and how far each kind's study is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from poochplan.formats.plan_set import Signature, is_larger
from poochplan.formats.profile import Profile
from poochplan.runtime.engine.cursor import Outcome, Segment

from .study import Hurry, NewWatch, Studied
from .watch import Watch

MOST_LOST = 20
"""Segments in a row that told nothing, after which a kind is given up."""
PATIENCE = 12
"""Segments of other inputs in a row, after which a study makes do with the one segment that it has captured."""


class Key(NamedTuple):
    """What tells one kind of segment from another."""

    after: int
    """Which optimizer stepped last, of those that the loop has."""
    place: int
    """How many segments there were since then."""
    inputs: Signature
    gradients: bool
    """Whether gradients are there from the segments before."""

    def is_beside(self, other: Key) -> bool:
        """Whether they differ in their inputs alone."""
        return self._replace(inputs=other.inputs) == other

    def is_larger(self, other: Key) -> bool:
        """Whether a plan for this kind serves the other."""
        return self.is_beside(other) and is_larger(self.inputs, other.inputs)


class Line:
    """One kind of segment. States: *studied* (``next_watch``), then *profiled* (``profile``) or *refused*."""

    def __init__(self, key: Key, study: Studied) -> None:
        self.key = key
        self.profile: Profile | None = None
        self.refused = ""
        """Why there will be no profile."""
        self.segments = 0
        """So many have been watched."""
        self._lost = self._waited = 0
        self._study = study
        self.next_watch: NewWatch | None = next(study)
        """Makes the watch of the next segment; None when the study is over."""

    def has_seen(self, watch: Watch, segment: Segment) -> None:
        """A watched segment is over."""
        self.segments += 1
        why_not = watch.why_not or _WHY_NOT.get(segment.outcome or Outcome.USED, "")
        if why_not:
            self._lost += 1
            if watch.is_final or self._lost >= MOST_LOST:
                self.give_up(why_not)
            return
        self._lost = self._waited = 0
        self._go_on(lambda: self._study.send(watch))

    @property
    def is_studied(self) -> bool:
        """Whether its study goes on."""
        return self.next_watch is not None

    def waits(self) -> bool:
        """A segment of other inputs was there in place of one of these; whether the study ends with that."""
        self._waited += 1
        if self._waited < PATIENCE or not self.segments or not self.is_studied:
            return False
        self._go_on(lambda: self._study.throw(Hurry()))
        return not self.is_studied

    def _go_on(self, study: Callable[[], NewWatch]) -> None:
        try:
            self.next_watch = study()
        except StopIteration as studied:
            self.next_watch, self.profile = None, studied.value

    def give_up(self, why: str) -> None:
        """There will be no profile."""
        self.next_watch, self.refused = None, why
        self._study.close()


_WHY_NOT = {
    Outcome.RAISED: "its forward raised",
    Outcome.UNUSED: "nothing of it is used by a backward",
    Outcome.LEFT_OVER: "a later segment uses what it saves",
}
"""A segment that ended so tells nothing of a whole one."""
