"""Follow: carries out a plan, as long as the step matches it (engine rules 7 and 8)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

from poochplan.errors import DivergenceError, UsageError
from poochplan.formats.plan import Decision, Instructions, PlannedValue, PointActions
from poochplan.formats.plan_set import Signature
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.replays.compiled_tape import ExpectedSave
from poochplan.runtime.replays.replay import NotReplayable, StorageRecord

from .diagnosis import Difference, differs_at_pack, differs_at_save, differs_at_use, what_changed
from .left_out import Gaps, LeftOut
from .step_policy import NOTHING, Actions, Diverged, KeepAll, StepPolicy, SwapEach


class DivergencePolicy(StrEnum):
    """What happens in a step that diverges from its plan."""

    WARN = "warn"
    """One warning in a session; the rest of the step swaps every saved value."""
    ERROR = "error"
    """Raises ``DivergenceError``."""

    def judge(self, reason: Diverged) -> None:
        """Raises ``DivergenceError`` if this is the policy."""
        if self is DivergencePolicy.ERROR:
            advice = reason.advice or "make a new profile and plan for this step"
            raise DivergenceError(f"{reason}: {advice}")


NOT_CALLED = "a layer saves something before the planned model is called"
_RECORD = {"on": True, "off": False, "": None}


class Follow(StepPolicy):
    """State: the values of this segment, by save point.

    Parameters
    ----------
    plan: the plan to follow.
    safe: decides if the step diverges, and for values that cannot be recomputed.
    policy: whether a diverged step is an error.
    inputs, model, tensors: of the planned step, if they matter. With inputs, layers save only after the model is
        called. ``tensors``: its parameters and buffers, as in the plan.
    """

    def __init__(
        self,
        plan: IndexedPlan,
        safe: SwapEach,
        policy: DivergencePolicy = DivergencePolicy.WARN,
        *,
        inputs: Signature = (),
        model: torch.nn.Module | None = None,
        tensors: tuple[str, ...] = (),
    ) -> None:
        self.instructions = plan.instructions
        self._plan = plan
        self._planned, self.sources = plan.instructions.values, plan.sources
        self._handles, self._uses = plan.instructions.handles, plan.instructions.uses
        self._last = len(self._planned) - 1
        self._safe = safe
        self._policy = policy
        self._values: dict[int, weakref.ref[SavedValue]] = {}
        self._to_come: dict[int, SavedValue] = {}
        """Values that still expect a handle, by the last one's position. Autograd may release their others before."""
        self._absent, self._absent_values = set[int](), set[int]()
        """Handles and values of layers that this step leaves out."""
        self.is_resized = False
        """Whether it diverged where the planned value has another size."""
        self._sources: list[tuple[int, SavedValue]] = []
        """Sources from which recipes still to be made start, with the last save point of these."""
        self._inputs, self._model, self._tensors = inputs, model, tensors
        self._awaits_call: Segment | None = None
        self.divergence = ""
        """Where and how the segment diverged; empty while it has not."""
        self._difference: Difference | None = None
        """The first one of the step from the plan."""

    def begin(self, segment: Segment) -> Actions:
        self._segment = segment
        if self._inputs and segment.model is None and not segment.announced:
            self._awaits_call = segment
        return Actions(record=True) if self._plan.instructions.record_from_start else NOTHING

    def followed(self) -> tuple[IndexedPlan, dict[int, weakref.ref[SavedValue]], dict[int, SavedValue]] | None:
        return (self._plan, self._values, self._to_come) if self._awaits_call is None else None

    def saved(self, index: int | None, ordinal: int, tensor: torch.Tensor, record: StorageRecord) -> Decision:
        if index is None:
            self.handle(ordinal, record.save_point, tensor)
            return Decision.KEEP
        if self._awaits_call is not None and self._awaits_call.model is not None:
            self._awaits_call = None
        # Before the model is called, a tensor is not the planned value of a layer.
        if self._awaits_call is not None and index <= self._last and self._planned[index].layer:
            raise Diverged(NOT_CALLED)
        if index > self._last or not self._plan.fits(index, tensor):
            self.leaves_out(index, ordinal, tensor)
            self.is_resized = index <= self._last and self._plan.is_resized(index, tensor)
            raise self._differs(differs_at_save(self._plan.instructions, index, tensor, exact=self._plan.exact))
        self.handle(ordinal, index, tensor)
        return self._planned[index].decision

    def handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> None:
        handles = self._handles
        if self._to_come:
            self._to_come.pop(ordinal, None)
        if index is None or ordinal >= len(handles) or handles[ordinal] != index:
            if index is not None and self._is_another_handle(ordinal, index, tensor):
                return
            found = differs_at_pack(self._plan.instructions, ordinal, index, tensor, exact=self._plan.exact)
            raise self._differs(found)

    # -- layers that are left out -----------------------------------------------------------------------------

    def leaves_out(self, index: int, ordinal: int, tensor: torch.Tensor) -> None:
        """A tensor is saved that is not planned for this save point. Raises ``LeftOut`` if it is planned behind layers
        that may be left out.
        """
        plan = self._plan
        if self._policy is DivergencePolicy.ERROR:  # every other step is one
            return
        for behind in range(index + 1, self._last + 1):
            if plan.fits(behind + (behind in self.sources), tensor) and plan.gaps.may_leave_out(index, behind):
                raise self._pass_over(index, behind, ordinal, plan.gaps.first_handle(behind))

    def _is_another_handle(self, ordinal: int, index: int, tensor: torch.Tensor) -> bool:
        """Whether a handle that is not planned there stands for one of a layer that is left out. Raises
        ``LeftOut`` if it is planned behind layers that may be left out.
        """
        handles, behind = self._handles, ordinal
        if self._policy is DivergencePolicy.ERROR:
            return False
        if ordinal < len(handles) and handles[ordinal] in self._absent_values:
            return self._plan.fits(handles[ordinal], tensor)
        saves = self._segment.saves if index in self._values else index
        while behind < len(handles) and handles[behind] != index:
            behind += 1
        end = max(handles[:behind], default=-1) + 1
        is_whole = saves < end and self._plan.gaps.may_leave_out(saves, end)
        if behind < len(handles) and (is_whole or (saves == end and self._absent)):
            raise self._pass_over(saves, end, ordinal, behind)
        return False

    def _pass_over(self, index: int, behind: int, ordinal: int, pack: int, use: int = 0) -> LeftOut:
        self._absent_values.update(range(index, behind))
        self._absent.update(range(ordinal, pack))
        for handle in range(ordinal, pack):
            self._to_come.pop(handle, None)
        actions = self._between(self._plan.at_save, index, behind)
        if behind > self._last:
            actions.append((behind, Actions(record=False)))
        return LeftOut(behind, pack, use, actions)

    def _between(
        self, planned: Sequence[PointActions | None], begin: int, end: int, before: int = 0
    ) -> list[tuple[int, Actions]]:
        """What is planned from one point to before another, with the points; ``before``: those of another kind."""
        found = enumerate(planned[begin:end], before + begin + 1)
        return [(point, self._resolved(one)) for point, one in found if one is not None]

    def _passed_uses(self, number: int, handle: SavedHandle, saves: int) -> None:
        """A handle is used whose use is not planned there. Raises ``LeftOut`` if all that is planned before does not
        exist in this step.
        """
        if self._policy is DivergencePolicy.ERROR:
            return
        pack = self._segment.packs
        absent = self._absent if saves > self._last else self._absent.union(range(pack, len(self._handles)))
        if saves <= self._last and not self._plan.gaps.may_leave_out(saves, self._last + 1):
            return
        use = number
        while use < len(self._uses) and self._uses[use] != handle.ordinal and self._uses[use] in absent:
            use += 1
        if use == len(self._uses) or self._uses[use] != handle.ordinal or (use == number and saves > self._last):
            return
        actions = self._between(self._plan.at_use, number, use, len(self._planned))
        gap = self._pass_over(saves, self._last + 1, pack, len(self._handles), use)
        raise LeftOut(gap.saves, gap.packs, use, [*gap.actions, *actions])

    def _differs(self, found: Difference) -> Diverged:
        self._difference = found
        return Diverged(found.reason, departure=found.departure)

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        if index is None:
            return NOTHING
        self._bind(value, index)
        if self._sources:
            self._sources = [(until, source) for until, source in self._sources if until >= index]
        if self._plan.last_handles[index] >= 0:
            self._to_come[self._plan.last_handles[index]] = value
        actions = self.planned_at_save(index)
        # No op after the last save is replayed, and backward must not run under the recorder.
        return actions._replace(record=False) if index == self._last else actions

    def _bind(self, value: SavedValue, index: int) -> None:
        value.index = index
        value.name = self._planned[index].name
        self._values[index] = weakref.ref(value)

    def at_sourced(self, index: int, ordinal: int, tensor: torch.Tensor) -> None:
        if not self._plan.fits(index + 1, tensor):
            self.leaves_out(index, ordinal, tensor)

    def at_source(self, value: SavedValue | None, index: int) -> Actions:
        if value is not None:
            self._bind(value, index)
            self._sources.append((self._planned[index].until, value))
        return self.planned_at_save(index)

    def planned_at_save(self, index: int) -> Actions:
        planned = self._plan.at_save[index]
        return NOTHING if planned is None else self._resolved(planned)

    def planned_at_use(self, number: int) -> Actions:
        planned = self._plan.at_use[number]
        return NOTHING if planned is None else self._resolved(planned)

    def at_use(self, number: int, handle: SavedHandle, saves: int) -> Actions:
        uses = self._uses
        self._let_go()
        if saves <= self._last or number >= len(uses) or uses[number] != handle.ordinal:
            self._passed_uses(number, handle, saves)
            found = differs_at_use(self._plan.instructions, number, handle.ordinal, saves, exact=self._plan.exact)
            raise self._differs(found)
        return self.planned_at_use(number)

    def _resolved(self, planned: PointActions) -> Actions:
        alive = self._alive
        return Actions(
            alive(planned.swap_out),
            alive(planned.release),
            alive(planned.prefetch),
            alive(planned.replay),
            _RECORD[planned.record],
        )

    def _alive(self, indices: Sequence[int]) -> Sequence[SavedValue]:
        if not indices:
            return ()
        values = self._values
        found = [values[index]() for index in indices if index in values]
        return [value for value in found if value is not None]

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        return Actions(swap_out=(value,), release=(value,))  # planned steps have no room for it after this point

    def _let_go(self) -> None:
        """No further handle or recipe is expected."""
        self._to_come.clear()
        self._sources.clear()

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        self._let_go()
        self.divergence = reason.reason
        if self._difference is not None:
            changed = what_changed(self._segment, self._inputs, self._model, self._difference, self._tensors)
            reason.advice = changed
        self._policy.judge(reason)
        if self._awaits_call is not None and self._awaits_call.model is None:  # perhaps not a step of the model
            self._awaits_call.aside = True
            return KeepAll(), NOTHING
        return self._safe, self._safe.take(self._alive(sorted(self._values)))


@dataclass(frozen=True, eq=False)
class IndexedPlan:
    """The instructions of a plan, with their actions by point.

    ``exact``: whether each save must have the planned shape and bytes. Otherwise it may be smaller, so that a plan for
    larger inputs can be used: no storage takes more than planned, on the device and on the host.
    """

    instructions: Instructions
    at_save: tuple[PointActions | None, ...]
    at_use: tuple[PointActions | None, ...]
    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the values."""
    last_handles: tuple[int, ...]
    """For each value the handle that is made last, or -1 if it has only one."""
    sources: dict[int, PlannedValue]
    """By save point."""
    exact: bool = True

    @classmethod
    def of(cls, instructions: Instructions, *, exact: bool = True) -> IndexedPlan:
        """Raises ``UsageError`` if torch lacks the dtype of a value."""
        at_save = {actions.index: actions for actions in instructions.schedule if actions.at == "save"}
        at_use = {actions.index: actions for actions in instructions.schedule if actions.at == "use"}
        return cls(
            instructions,
            tuple(map(at_save.get, range(len(instructions.values)))),
            tuple(map(at_use.get, range(len(instructions.uses)))),
            tuple(_dtype(number, value) for number, value in enumerate(instructions.values)),
            _last_handles(instructions),
            {number: value for number, value in enumerate(instructions.values) if value.source},
            exact,
        )

    @cached_property
    def gaps(self) -> Gaps:
        """Made in the first step that leaves something out."""
        return Gaps(self.instructions)

    def expected_saves(self) -> Iterator[ExpectedSave]:
        """As :class:`PlanToFollow` has it."""
        engines = {0, len(self.dtypes) - 1, *self.sources, *(source.until + 1 for source in self.sources.values())}
        for number, value in enumerate(self.instructions.values):
            decision, acts = None if number in engines else value.decision, self.at_save[number]
            size_bytes, last = value.size_bytes, self.last_handles[number]
            yield self.dtypes[number], value.shape, size_bytes, last, value.name, decision, acts

    def is_resized(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor is the planned value of this save point, but for its size."""
        return tensor.dtype is self.dtypes[index] and tensor.ndim == len(self.instructions.values[index].shape)

    def fits(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor can be the planned value of this save point."""
        if index >= len(self.dtypes):
            return False
        planned, size_bytes = self.instructions.values[index], tensor.untyped_storage().nbytes()
        if tensor.dtype is not self.dtypes[index]:
            return False
        if self.exact:
            return size_bytes == planned.size_bytes and tensor.shape == planned.shape
        return tensor.ndim == len(planned.shape) and size_bytes <= planned.size_bytes


def _last_handles(instructions: Instructions) -> tuple[int, ...]:
    last, again = {}, set()
    for ordinal, value in enumerate(instructions.handles):
        if value in last:
            again.add(value)
        last[value] = ordinal
    return tuple(last[value] if value in again else -1 for value in range(len(instructions.values)))


def _dtype(number: int, value: PlannedValue) -> torch.dtype:
    found = getattr(torch, value.dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(
            f"plan: values[{number}].dtype: expected a dtype of torch {torch.__version__}, such as float32, found "
            f"{value.dtype[:40]!r}; make a new plan here"
        )
    return found


class AlwaysFollow:
    """A chooser whose segments all follow these instructions."""

    def __init__(self, instructions: Instructions) -> None:
        self._plan, self.alternatives = IndexedPlan.of(instructions), [instructions]

    def choose(self, segment: Segment) -> StepPolicy:
        return Follow(self._plan, SwapEach())
