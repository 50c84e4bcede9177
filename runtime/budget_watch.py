"""Whether steps keep to the budget of the plan that they follow; what takes more is told once, and who holds it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum

from poochplan.errors import BudgetExceededError
from poochplan.formats.plan import Plan
from poochplan.runtime.watch.holders import Holder
from poochplan.runtime.watch.users_line import users_line
from poochplan.units import format_bytes

_FIRST_STEPS = 2
"""Without and with the optimizer's state: every later step is like the second."""
_MOST_NAMED = 4


class OverBudget(StrEnum):
    """What becomes of a step that follows its plan and takes more than its budget."""

    WARN = "warn"
    """It is told once, in a warning."""
    ERROR = "error"
    """``BudgetExceededError`` at the end of that step."""
    REPLAN = "replan"
    """A new plan is made with the measured bytes, and followed from the next step on."""


class BudgetWatch:
    """State: the peak of the last step of each kind that ended, and whether a step above its budget has been told of.

    It knows neither sessions nor meters: :meth:`look` is given what a step took, and asks who holds it only where that
    is to be said.
    """

    def __init__(self, policy: OverBudget = OverBudget.WARN) -> None:
        self.policy = policy
        self._last_peak_bytes: dict[Hashable, int] = {}
        """By kind of step."""
        self._told = False

    def is_over(self, peak_bytes: int, plan: Plan) -> bool:
        """Whether a step above its budget is to be told of, or done something about."""
        return not self._told and peak_bytes > plan.budget_bytes

    def look(self, peak_bytes: int, plan: Plan, where: str = "", held: Callable[[], Sequence[Holder]] = tuple) -> None:
        """Tells of a step that follows the plan and has taken more than the plan's budget; the first time only.

        Parameters
        ----------
        peak_bytes: what the step took.
        where: the moment of that, such as "backward of blocks.2"; empty where it is not known.
        held: who holds more than was predicted. Asked only if it is told.

        Raises ``BudgetExceededError`` if that is the policy.
        """
        if not self.is_over(peak_bytes, plan):
            return
        text = over_budget_text(peak_bytes, plan, where, held())
        if self.policy is OverBudget.ERROR:
            raise BudgetExceededError(f"{text}; {_REMEDY}", peak_bytes=peak_bytes)
        self.tell(f"{text}; {_REMEDY}")

    def tell(self, text: str) -> None:
        """A warning that cites the user's line; no other follows."""
        self._told = True
        warnings.warn(f"poochplan: {text}", RuntimeWarning, stacklevel=users_line())

    def starts_anew(self) -> None:
        """Another plan is followed from now on."""
        self._told = False
        self._last_peak_bytes.clear()

    def is_settled(self, steps: int, peak_bytes: int, plan: Plan, *, kind: Hashable = None) -> bool:
        """Whether steps are alike, now that so many have ended, the last of them with this peak.

        They are not where each takes more than the one of its kind before and than was predicted: something is left
        behind in each. The first of a kind, behind steps of others, has none before it.

        ``kind``: what steps differ in that are not to be compared: gradients that were there already, for example,
        live beside the step.
        """
        before_bytes = self._last_peak_bytes.get(kind, peak_bytes if self._last_peak_bytes else 0)
        self._last_peak_bytes[kind] = peak_bytes
        grows = peak_bytes > max(before_bytes, plan.prediction.peak_bytes)
        return steps >= _FIRST_STEPS and (self._told or not grows)


def over_budget_text(peak_bytes: int, plan: Plan, where: str, held: Sequence[Holder]) -> str:
    """What a step took, when, and who holds what was not predicted."""
    text = (
        f"a step that follows the plan took {peak_bytes} bytes, more than its budget of {plan.budget_bytes} "
        f"(predicted: {plan.prediction.peak_bytes}){f', in {where}' if where else ''}"
    )
    if not held:
        return (
            f"{text}; likely it makes more than it did when it was profiled, or reference cycles hold tensors until "
            "Python's collector runs (the profile's notes tell of those)"
        )
    named = ", ".join(f"{one.name} ({format_bytes(one.size_bytes)})" for one in held[:_MOST_NAMED])
    more = sum(one.size_bytes for one in held[_MOST_NAMED:])
    return f"{text}; beside what was predicted there are {named}{f' and {format_bytes(more)} more' if more else ''}"


_REMEDY = (
    "let go of what is not needed (call gc.collect() after each step where it is in cycles), or have it counted: "
    'profile(also=[...]), or apply(on_over_budget="replan", profile=profile)'
)
