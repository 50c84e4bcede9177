"""Loop: what is known of a running loop. Which segments are of one kind, and the progress of each kind's study."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from poochplan.errors import named_line
from poochplan.formats.plan_set import Signature, is_larger
from poochplan.formats.profile import Profile
from poochplan.planner.whatif import with_bytes_beside
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.metering.census import Growth, foreseen_bytes
from poochplan.runtime.step_policies.follow import Follow

from .segment_observer import NewObserver, SegmentObserver, StudyContext
from .study import NoMoreSegments, StudyOptions, study

MOST_LOST = 20
"""After this many segments in a row without a result, a kind is given up."""
PATIENCE = 12
"""After this many segments of other inputs in a row, a study uses only the one segment that it has captured."""
MOST_RESIZED = 4
"""After this many segments in a row whose saved values have other sizes a kind is given up."""
MOST_SHORTER = 40
"""After this many segments in a row that leave out layers, a study uses only the one segment that it has captured."""
MOST_KINDS = 24
"""At most this many kinds without a profile are studied at once."""
SLACK = 0.005
"""Two segments are alike if the memory outside one exceeds that outside the other by at most this share."""


class Key(NamedTuple):
    """The facts that distinguish kinds of segments."""

    after: int
    """Which of the loop's optimizers stepped last."""
    place: int
    """Number of segments since that step."""
    inputs: Signature
    gradients: bool
    """Whether gradients of earlier segments exist."""
    switches: str
    """Autocast, precision and similar settings when it begins: see ``tensors/signatures.py``."""

    def is_beside(self, other: Key) -> bool:
        """Whether the two differ only in their inputs."""
        return self._replace(inputs=other.inputs) == other

    def is_larger(self, other: Key) -> bool:
        """Whether a plan for this kind also fits the other."""
        return self.is_beside(other) and is_larger(self.inputs, other.inputs)


class StepKind:
    """One kind of segment, and its study. States: *studied* (``next_observer``), then *profiled* (``profile``) or
    *refused*.
    """

    def __init__(
        self, key: Key, context: StudyContext, options: StudyOptions, most_bytes: int = 0, least_values: int = 0
    ) -> None:
        """``least_values``: what its longest known segment saves. Only one that saves as much is captured."""
        self.key = key
        self.profile: Profile | None = None
        self.refused = ""
        """Why there will be no profile."""
        self.segments = 0
        """Number of segments that have been observed."""
        self.growth = Growth()
        """Growth of the memory outside its segments."""
        self.foreseen_bytes = 0
        """Bytes beyond the profile that will exist outside its segments, as far as optimizers determine them."""
        self._lost = self._waited = self._resized = self._shorter = 0
        self._values, self._least_values = 0, least_values
        """Number of values that the captured segment has saved, and the longest one."""
        self.shape: tuple[int, ...] | None = None
        """The shape (see :func:`shape_of`) of its first segment with a result."""
        self.base_bytes = 0
        """Bytes alive when that segment began, plus those foreseen then: foreseen growth does not change the sum."""
        self._last: Segment | None = None
        self._is_used_later = False
        """Whether later segments have used what one of the kind has left over."""
        self._most_bytes = most_bytes
        self._context, self._options = context, options
        self._study = study(context, options)
        self.next_observer: NewObserver | None = next(self._study)
        """Makes the observer of the next segment; None when the study is over."""

    def has_seen(self, observer: SegmentObserver, segment: Segment) -> None:
        """An observed segment is over."""
        self.segments += 1
        why_not = observer.why_not or self._why_not(observer, segment)
        why_not = UNMOVED if why_not == UNUSED and segment.others and not segment.saves else why_not
        longer = self._is_other_path(observer, segment)
        if longer is not None:
            self._goes_another_way(is_longer=longer)
            return
        if why_not:
            self._lost += 1
            policy = observer.policy
            self._resized = self._resized + 1 if isinstance(policy, Follow) and policy.is_resized else 0
            if self._resized >= MOST_RESIZED:
                self.give_up(VARIES.format(why_not))
            elif observer.is_final or self._lost >= _TRIES.get(segment.outcome or Outcome.USED, MOST_LOST):
                self.give_up(why_not)
            return
        self._lost = self._waited = self._resized = self._shorter = 0
        self._values = self._values or segment.saved_values
        if observer.base_bytes is not None:
            self.growth.saw(segment.number, observer.base_bytes)
            self.stands_beside(observer.base_bytes + observer.foreseen_bytes)
        if self.shape is None:
            self.shape, self.foreseen_bytes = shape_of(segment), observer.foreseen_bytes
            self.base_bytes = (observer.base_bytes or 0) + observer.foreseen_bytes
        self._go_on(lambda: self._study.send(observer))

    def _is_other_path(self, observer: SegmentObserver, segment: Segment) -> bool | None:
        """Whether the segment has run layers that the captured one has not; false if it is the other way round, and
        None if they have run the same ones, or nothing is known of that.
        """
        if segment.outcome is not Outcome.USED:
            return None
        values, self._least_values = segment.saved_values, max(self._least_values, segment.saved_values)
        if not self._values:
            return None if values >= self._least_values else False
        if values > self._values:
            return True
        return False if segment.left_out and not segment.diverged else None

    def _goes_another_way(self, *, is_longer: bool) -> None:
        """A profile is of the longest path: a longer one is captured anew, and shorter ones are waited out."""
        self._lost = self._resized = 0
        if is_longer:
            self._study.close()
            self._values, self.shape, self._shorter = 0, None, 0
            self._study = study(self._context, self._options)
            self.next_observer = next(self._study)
            return
        self._shorter += 1
        if self._shorter >= MOST_SHORTER and self._values:
            self._go_on(lambda: self._study.throw(NoMoreSegments()))
        elif self._shorter >= MOST_SHORTER:  # the longest one is too rare
            self._shorter = self._least_values = 0

    def _why_not(self, observer: SegmentObserver, segment: Segment) -> str:
        """Why the outcome says nothing. What is left over may be only held, as an output is that the loop logs."""
        before, self._last = self._last, segment
        self._is_used_later |= before is not None and bool(before.late_uses)
        is_only_held = segment.used and not (self._is_used_later or observer.is_retained)
        if segment.outcome is Outcome.LEFT_OVER and is_only_held:
            return ""
        return _WHY_NOT.get(segment.outcome or Outcome.USED, "")

    @property
    def is_studied(self) -> bool:
        return self.next_observer is not None

    @property
    def varies(self) -> bool:
        """Whether it has no profile because no two of its segments are alike."""
        return self.refused == TOO_MANY or self.refused.startswith(VARIES.partition("{")[0])

    def waits(self) -> bool:
        """A segment of other inputs came in place of one of this kind. Returns whether the study ends with that."""
        self._waited += 1
        if self._waited < PATIENCE or not self.segments or not self.is_studied:
            return False
        self._go_on(lambda: self._study.throw(NoMoreSegments()))
        return not self.is_studied

    def new_observer(self) -> SegmentObserver | None:
        """The observer of a segment that is about to begin; None if the study is over, or fails here."""
        try:
            return None if self.next_observer is None else self.next_observer()
        except Exception as error:  # the loop trains on
            self.give_up(named_line(error))
            return None

    def _go_on(self, ask: Callable[[], NewObserver]) -> None:
        try:
            self.next_observer = ask()
        except StopIteration as studied:
            self.next_observer = None
            self.profile = studied.value
            if self._most_bytes > self.base_bytes:
                self.profile = with_bytes_beside(studied.value, self._most_bytes - self.base_bytes)
        except Exception as error:  # the loop trains on
            self.give_up(named_line(error))

    def stands_beside(self, base_bytes: int) -> None:
        """So many bytes were alive or foreseen when a segment of the kind began. The profile must include them."""
        self._most_bytes = max(self._most_bytes, base_bytes)

    def give_up(self, why: str) -> None:
        """There will be no profile."""
        self.next_observer, self.refused = None, why
        self.close()

    def close(self) -> None:
        """No segments are observed any more: gives back the memory of a study that is not over. Idempotent."""
        self._study.close()


_Stood = tuple[tuple[int, ...], int]
"""Facts of a segment: its shape, and the bytes that were alive or foreseen when it began."""


class StepKinds(dict[Key, StepKind]):
    """The kinds by key. State: which kinds were found to be alike, such as one micro-batch and the next, or a step
    after one that the optimizer skipped; and which were found to differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alike: dict[Key, Key] = {}
        self._apart: dict[Key, _Stood | None] = {}
        """With the facts of one segment; None if it has no result."""
        self._most_bytes: dict[Key, int] = {}
        """Most bytes that were alive or foreseen when a segment of a kind without a study began."""
        self._longest: dict[Key, int] = {}
        """Number of values that the longest segment of a kind has saved, if it is studied again for that."""

    def begin(self, key: Key, context: StudyContext, options: StudyOptions) -> StepKind:
        """The study of that kind begins, or is refused at once."""
        kind = StepKind(key, context, options, self._most_bytes.get(key, 0), self._longest.get(key, 0))
        if sum(one.is_studied for one in self.values()) >= MOST_KINDS:
            kind.give_up(TOO_MANY)
        self[key] = kind
        return kind

    def study_again(self, key: Key, least_values: int) -> None:
        """Segments of that kind are studied anew, its longest ones if the number of values that these save is given."""
        self._longest[key] = least_values
        self.pop(key, None)

    def key_of(self, key: Key) -> Key:
        """The key of the kind that segments with that key belong to."""
        return self._alike.get(key, key)

    def may_be_known(self, key: Key) -> bool:
        """Whether a segment with a new key may be of a known kind, judged before it has run."""
        return key not in self and key not in self._apart and any(self._seen(key))

    def compared(self, key: Key, segment: Segment, base_bytes: int) -> None:
        """A segment with a new key is over: decides whether it is like those of a known kind."""
        shape = shape_of(segment)
        if segment.outcome is Outcome.USED:
            for other, (seen_shape, seen_bytes) in self._seen(key):
                if shape == seen_shape and base_bytes <= seen_bytes * (1 + SLACK):
                    self._alike[key] = other
                    if other in self:
                        self[other].stands_beside(base_bytes)
                    else:
                        self._most_bytes[other] = max(self._most_bytes.get(other, 0), base_bytes)
                    return
        if segment.outcome is not Outcome.RAISED:
            self._apart[key] = (shape, base_bytes) if segment.outcome is Outcome.USED else None

    def _seen(self, key: Key) -> Iterator[tuple[Key, _Stood]]:
        """Kinds, even without a study, that a segment with that key may belong to: only their place differs."""
        for other, kind in self.items():
            if kind.shape is not None and other[2:] == key[2:]:
                yield other, (kind.shape, kind.base_bytes)
        for other, stood in self._apart.items():
            if stood is not None and other not in self and other[2:] == key[2:]:
                yield other, stood

    @property
    def alike(self) -> list[tuple[Key, Key]]:
        """Keys, with the kinds that they are like."""
        return list(self._alike.items())

    def take(self, alike: list[tuple[Key, Key]]) -> None:
        """Takes over kinds that another process has found to be alike."""
        self._alike.update(alike)

    def part(self, key: Key) -> None:
        """Segments with that key are a separate kind from now on."""
        if self._alike.pop(key, None) is not None:
            self._apart[key] = None


class Loop:
    """An observer fills it, and a source of plans reads it. State: the kinds of its segments; its optimizers with their
    places, how often they have stepped, and the place of the last one.

    Parameters
    ----------
    model: all of the models together.
    optimizers: the known ones; others are found when they step.
    where: the models' device.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], where: torch.device
    ) -> None:
        self.model, self.where = model, where
        self.kinds = StepKinds()
        self.optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int](zip(optimizers, itertools.count()))
        """A new optimizer gets the place of one that is gone."""
        self.steps = self.after = 0

    def meets(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is one of the loop's."""
        if optimizer not in self.optimizers:
            taken = set(self.optimizers.values())
            self.optimizers[optimizer] = next(place for place in itertools.count() if place not in taken)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.meets(optimizer)  # one that was new while the session rested
        self.steps += 1
        self.after = self.optimizers[optimizer]

    @property
    def is_studied(self) -> bool:
        """Whether some kind of its segments is being studied."""
        return any(kind.is_studied for kind in self.kinds.values())

    @property
    def foreseen_bytes(self) -> int:
        """Bytes that its optimizers will add one day."""
        return foreseen_bytes(self.optimizers, self.where.type)


def shape_of(segment: Segment) -> tuple[int, ...]:
    """The numbers of saves and uses of a segment, including uses of values from earlier segments."""
    return segment.saves, segment.packs, segment.uses, segment.saved_bytes, segment.earlier_uses


TOO_MANY = "inputs come in too many shapes, none of them often: pad them to a few lengths"
VARIES = "the sizes of what they save vary, and those of their inputs do not: {}"
UNUSED = "no backward uses the saved tensors"
UNMOVED = "all that they save is sparse, nested or of a subclass, which no plan moves"
_WHY_NOT = {
    Outcome.RAISED: "the forward raised",
    Outcome.UNUSED: UNUSED,
    Outcome.LEFT_OVER: (
        "a later part of the loop uses the saved tensors, or its backward keeps them (retain_graph=True)"
    ),
}
"""Outcomes of a segment that say nothing about a complete one."""
_TRIES = {Outcome.LEFT_OVER: 3, Outcome.UNUSED: 3}
"""This many such outcomes in a row suffice, if the loop always does this."""
