"""ActivePlan: the plan that steps of one kind follow, and how they keep to its budget."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from poochplan.formats.plan import Plan
from poochplan.runtime.engine.audited_plan import AuditedPlan
from poochplan.runtime.step_policies.follow import IndexedPlan
from poochplan.units import format_bytes

from .metering.census import EVERY
from .metering.holders import HeldMemory

FIRST_STEPS = 2
"""The first step runs without the optimizer's state, the second with it. Later steps are like the second."""
MOST_PLANS = 4
"""A kind of step whose steps took more memory, or get no arena, is planned anew at most this often."""
_MOST_NAMED = 4


class OverBudget(StrEnum):
    """The reaction to a step that follows its plan and exceeds its budget."""

    WARN = "warn"
    """One warning reports it."""
    ERROR = "error"
    """``BudgetExceededError`` is raised at the end of that step."""
    REPLAN = "replan"
    """A new plan is made from the measured bytes."""


class ActivePlan:
    """State: how many steps have begun under it, their largest peaks, and whether an excess was reported. A plan
    that replaces it starts with new state.

    Parameters
    ----------
    kind: of the steps, such as the name of their model.
    """

    def __init__(self, kind: Any, plan: Plan) -> None:
        self.kind, self.plan = kind, plan
        self.exact = IndexedPlan.of(plan.instructions)
        self.smaller = IndexedPlan.of(plan.instructions, exact=False)
        """The plan for steps of smaller inputs."""
        self.audited = AuditedPlan(plan.instructions)
        self.begun = 0
        self.is_told = False
        """Whether a step above the budget was reported. It is reported once."""
        self.has_exceeded = False
        """Whether any step was above the budget, as an error tells too."""
        self._ended = 0
        self._is_settled = False
        self._to_check, self._to_check_next_time = 0, 1
        self._most_bytes: dict[bool, int] = {}
        """The largest peaks of steps without, and with, gradients that existed before them."""

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be metered, beginning with a census."""
        return not self._is_settled or self._to_check > 0 or (self.begun + 1) % EVERY == 0

    @property
    def room_bytes(self) -> int:
        """Bytes that may be kept beside a step without an arena. None while steps grow."""
        return self.free_bytes if self._is_settled else 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no step takes, by what is predicted and what was measured; 0 if one was above it."""
        predicted = self.plan.prediction
        most_bytes = max(predicted.peak_bytes, predicted.first_step_peak_bytes, *self._most_bytes.values())
        if self.has_exceeded:
            return 0
        if self.plan.on == "reserved":
            return max(0, self.plan.budget_bytes - max(most_bytes, self.plan.covered_bytes))
        return self.plan.budget_bytes - most_bytes

    def begins(self) -> None:
        self.begun += 1
        self._to_check = max(0, self._to_check - 1)

    def check_next(self) -> None:
        """Has the next step metered, beginning with a census; after each further call twice as many steps as before,
        because it may be each nth step that takes more.
        """
        if not self._to_check:
            self._to_check = self._to_check_next_time
            self._to_check_next_time = min(2 * self._to_check, EVERY)

    def is_over(self, peak_bytes: int) -> bool:
        """Whether a step of these bytes is to be reported, or needs another reaction."""
        return not self.is_told and peak_bytes > self.plan.budget_bytes

    def reserved_above(self, reserved_bytes: int | None, expand: bool | None) -> int:
        """Bytes by which a step has reserved more than the budget, or than the plan says if that is more. 0 if the
        budget is on allocated bytes. ``expand``: whether segments do, for which the plan may not be made.
        """
        if self.plan.on != "reserved" or reserved_bytes is None or self.is_told:
            return 0
        promised_bytes = self.plan.covered_bytes if expand is self.plan.prediction.expands else 0
        return max(0, reserved_bytes - max(self.plan.budget_bytes, promised_bytes))

    def ended(self, peak_bytes: int | None, *, has_gradients: bool) -> None:
        """A step under this plan is over. ``peak_bytes``: its peak without an arena's holes; None if not metered.

        Steps are settled once none takes more than all others of its kind before, or more than predicted. The first
        step of a kind that follows steps of another kind has none before.
        """
        self._ended += 1
        if peak_bytes is None:
            return
        most_bytes = self._most_bytes.get(has_gradients, peak_bytes if self._most_bytes else 0)
        self._most_bytes[has_gradients] = max(most_bytes, peak_bytes)
        grows = peak_bytes > max(most_bytes, self.plan.prediction.peak_bytes)
        self._is_settled = self._ended >= FIRST_STEPS and (self.is_told or not grows)


def over_budget_text(peak_bytes: int, plan: Plan, where: str, held: Sequence[HeldMemory], gaps_bytes: int = 0) -> str:
    """The text about a step above its budget: its bytes, their moment, and the holders of unpredicted bytes.
    ``gaps_bytes``: between the blocks of its arena, if they alone are the excess.
    """
    text = (
        f"a step that follows the plan took {peak_bytes} bytes, more than its budget of {plan.budget_bytes} "
        f"(predicted: {plan.prediction.peak_bytes}){f', in {where}' if where else ''}"
    )
    if gaps_bytes:
        return f"{text}; {format_bytes(gaps_bytes)} of them are gaps between the blocks of its arena"
    if not held:
        return (
            f"{text}; perhaps it makes more tensors than when it was profiled, or reference cycles hold tensors until "
            "Python's collector runs (see the profile's notes)"
        )
    return f"{text}; {_named(held)}"


def out_of_memory_text(peak_bytes: int | None, plan: Plan, where: str, held: Sequence[HeldMemory]) -> str:
    """The text about a step that ran out of memory: how far it had come, its prediction, and the excess's holders."""
    text = (
        f"out of memory in a step that follows the plan{f', in {where}' if where else ''}: it had taken "
        f"{format_bytes(peak_bytes or 0)}, predicted are at most {format_bytes(plan.prediction.peak_bytes)} of a "
        f"budget of {format_bytes(plan.budget_bytes)}"
    )
    return f"{text}; {_named(held)}" if held else text


def _named(held: Sequence[HeldMemory]) -> str:
    named = ", ".join(f"{one.name} ({format_bytes(one.size_bytes)})" for one in held[:_MOST_NAMED])
    more = sum(one.size_bytes for one in held[_MOST_NAMED:])
    return f"in addition to the prediction there are {named}{f' and {format_bytes(more)} more' if more else ''}"


REMEDY = (
    "release tensors that are not needed (for cycles call gc.collect() after each step), or have them counted: "
    'profile(also=[...]), or apply(on_over_budget="replan", profile=profile)'
)
STILL_GROWS = (
    f"it has been planned again {MOST_PLANS} times and still grows: the loop keeps tensors, perhaps with the graphs "
    "behind them, as in a list of losses or outputs; keep loss.item() or output.detach()"
)
