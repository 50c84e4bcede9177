"""Which segments are of one kind, and how far each kind's study is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from poochplan.formats.plan_set import Signature, is_larger
from poochplan.formats.profile import Profile
from poochplan.planner.whatif import with_bytes_beside
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.watch.census import Growth

from .study import Hurry
from .watch import NewWatch, Studied, Watch

MOST_LOST = 20
"""Segments in a row that told nothing, after which a kind is given up."""
PATIENCE = 12
"""Segments of other inputs in a row, after which a study makes do with the one segment that it has captured."""
MOST_KINDS = 24
"""So many are studied at once, of which none has a profile yet."""
SLACK = 0.005
"""Segments are alike where there is more beside one by no more than this share of what is beside the other."""


class Key(NamedTuple):
    """What tells one kind of segment from another."""

    after: int
    """Which optimizer stepped last, of those that the loop has."""
    place: int
    """How many segments there were since then."""
    inputs: Signature
    gradients: bool
    """Whether gradients are there from the segments before."""
    switches: str
    """Autocast, precision and the like, as it begins: see :class:`~poochplan.tensors.signatures.Switches`."""

    def is_beside(self, other: Key) -> bool:
        """Whether they differ in their inputs alone."""
        return self._replace(inputs=other.inputs) == other

    def is_larger(self, other: Key) -> bool:
        """Whether a plan for this kind serves the other."""
        return self.is_beside(other) and is_larger(self.inputs, other.inputs)


class Line:
    """One kind of segment. States: *studied* (``next_watch``), then *profiled* (``profile``) or *refused*."""

    def __init__(self, key: Key, study: Studied, most_bytes: int = 0) -> None:
        self.key = key
        self.profile: Profile | None = None
        self.refused = ""
        """Why there will be no profile."""
        self.segments = 0
        """So many have been watched."""
        self.growth = Growth()
        """Of what lives beside its segments."""
        self.foreseen_bytes = 0
        """How much more than the profile has will live beside them one day, as far as optimizers say."""
        self._lost = self._waited = 0
        self.shape: tuple[int, ...] | None = None
        """See :func:`shape_of`, of the first one that told something."""
        self.base_bytes = 0
        """What was alive as that one began, and what was foreseen then: growth that is foreseen does not change it."""
        self._most_bytes = most_bytes
        self._study = study
        self.next_watch: NewWatch | None = next(study)
        """Makes the watch of the next segment; None when the study is over."""

    def has_seen(self, watch: Watch, segment: Segment) -> None:
        """A watched segment is over."""
        self.segments += 1
        why_not = watch.why_not or _WHY_NOT.get(segment.outcome or Outcome.USED, "")
        if why_not:
            self._lost += 1
            if watch.is_final or self._lost >= _TRIES.get(segment.outcome or Outcome.USED, MOST_LOST):
                self.give_up(why_not)
            return
        self._lost = self._waited = 0
        if watch.base_bytes is not None:
            self.growth.saw(segment.number, watch.base_bytes)
            self.stands_beside(watch.base_bytes + watch.foreseen_bytes)
        if self.shape is None:
            self.shape, self.foreseen_bytes = shape_of(segment), watch.foreseen_bytes
            self.base_bytes = (watch.base_bytes or 0) + watch.foreseen_bytes
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
            self.next_watch = None
            self.profile = studied.value
            if self._most_bytes > self.base_bytes:
                self.profile = with_bytes_beside(studied.value, self._most_bytes - self.base_bytes)

    def stands_beside(self, base_bytes: int) -> None:
        """So much was alive or foreseen as another segment of the kind began: the profile is to hold where that is
        more.
        """
        self._most_bytes = max(self._most_bytes, base_bytes)

    def give_up(self, why: str) -> None:
        """There will be no profile."""
        self.next_watch, self.refused = None, why
        self._study.close()


class _Stood(NamedTuple):
    """What is known of a segment: its shape, and what was alive or foreseen as it began."""

    shape: tuple[int, ...]
    base_bytes: int


class Lines(dict[Key, Line]):
    """By kind. State: which kinds were found to be like which others, such as one micro-batch like the next, and a step
    behind one that the optimizer left out; and which were found not to be.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alike: dict[Key, Key] = {}
        self._apart: dict[Key, _Stood | None] = {}
        """With what was seen of one segment; None where that tells nothing."""
        self._most_bytes: dict[Key, int] = {}

    def kind_of(self, key: Key) -> Key:
        """The kind that segments of this key are of."""
        return self._alike.get(key, key)

    def may_be_known(self, key: Key) -> bool:
        """Whether a segment of a new key may be of a known kind, as far as can be told before it has run."""
        return key not in self and key not in self._apart and any(self._seen(key))

    def compared(self, key: Key, segment: Segment, base_bytes: int) -> None:
        """A segment of a new key is over: it is like those of a known kind, or it is not."""
        shape = shape_of(segment)
        if segment.outcome is Outcome.USED:
            for other, seen in self._seen(key):
                if shape == seen.shape and base_bytes <= seen.base_bytes * (1 + SLACK):
                    self._alike[key] = other
                    self._stands_beside(other, base_bytes)
                    return
        if segment.outcome is not Outcome.RAISED:
            self._apart[key] = _Stood(shape, base_bytes) if segment.outcome is Outcome.USED else None

    def _seen(self, key: Key) -> Iterator[tuple[Key, _Stood]]:
        """Kinds that a segment of that key may be of; such as have no study yet among them."""
        for other, line in self.items():
            if line.shape is not None and _may_be(other, key):
                yield other, _Stood(line.shape, line.base_bytes)
        for other, stood in self._apart.items():
            if stood is not None and other not in self and _may_be(other, key):
                yield other, stood

    def _stands_beside(self, key: Key, base_bytes: int) -> None:
        if key in self:
            self[key].stands_beside(base_bytes)
        else:
            self._most_bytes[key] = max(self._most_bytes.get(key, 0), base_bytes)

    def stood(self, key: Key) -> int:
        """Most bytes that were alive or foreseen as a segment began of that kind, which has no line yet."""
        return self._most_bytes.get(key, 0)

    @property
    def alike(self) -> list[tuple[Key, Key]]:
        """Keys with the kinds that they are like."""
        return list(self._alike.items())

    def take(self, alike: list[tuple[Key, Key]]) -> None:
        """Another process has found these alike."""
        self._alike.update(alike)

    def part(self, key: Key) -> None:
        """Segments of that key are of a kind of their own from now on."""
        if self._alike.pop(key, None) is not None:
            self._apart[key] = None

    @property
    def are_too_many(self) -> bool:
        """Whether no more kinds are to be studied for now."""
        return sum(line.next_watch is not None for line in self.values()) >= MOST_KINDS


def shape_of(segment: Segment) -> tuple[int, ...]:
    """How much a segment saves and uses, of earlier ones too."""
    return segment.saves, segment.packs, segment.uses, segment.saved_bytes, segment.earlier_uses


def _may_be(one: Key, other: Key) -> bool:
    return one[2:] == other[2:]  # they differ in their place alone


UNUSED = "nothing of it is used by a backward"
_WHY_NOT = {
    Outcome.RAISED: "its forward raised",
    Outcome.UNUSED: UNUSED,
    Outcome.LEFT_OVER: "a later part of the loop uses what it saves",
}
"""A segment that ended so tells nothing of a whole one."""
_TRIES = {Outcome.LEFT_OVER: 3, Outcome.UNUSED: 3}
"""So many such in a row are enough, where that is how the loop is."""
