"""What an online session says while it runs: one line on stderr, rewritten in place on a terminal."""

from __future__ import annotations

import sys
import warnings

from poochplan.formats.facts.advice import limits
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import share_that_holds
from poochplan.runtime.watch.users_line import users_line
from poochplan.units import format_bytes, format_seconds

from .before_plan import Unplanned

IN_CORE = (
    "steps run in-core while they are measured, as long as memory has room; the budget is kept from the plan on "
    '(before_plan="swap" keeps it from the first step on)'
)


class Teller:
    """State: what the line says now, and what it has warned of. ``is_quiet``: it says nothing but warnings."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._said = ""
        self._told_of: set[str] = set()

    def say(self, text: str) -> None:
        """The line is this from now on. Off a terminal each new text is a line of its own."""
        if self.is_quiet or text == self._said:
            return
        is_terminal = sys.stderr.isatty()
        padding = " " * max(0, len(self._said) - len(text)) if is_terminal else ""
        print(f"poochplan: {text}{padding}", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
        self._said = text

    def say_once(self, text: str) -> None:
        """As :meth:`say`, the first time only."""
        if text not in self._told_of:
            self._told_of.add(text)
            self.say(text)

    def warn(self, text: str) -> None:
        """A warning that cites the user's line; the same one comes once."""
        if text not in self._told_of:
            self._told_of.add(text)
            warnings.warn(f"poochplan: {text}", RuntimeWarning, stacklevel=users_line())

    def end(self) -> None:
        """What comes next is on a line of its own."""
        if self._said and not self.is_quiet and sys.stderr.isatty():
            print(file=sys.stderr)


def described(plan: Plan) -> str:
    """What a plan is, in one line."""
    decisions = [value.decision for value in plan.values]
    counts = ", ".join(
        f"{decisions.count(decision)} {word}"
        for decision, word in ((Decision.SWAP, "swapped"), (Decision.RECOMPUTE, "recomputed"))
        if decision in decisions
    )
    promise = plan.prediction
    return (
        f"at most {format_bytes(promise.peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)}, "
        f"{format_seconds(promise.step_s)} a step ({promise.overhead:+.1%}) predicted, {counts or 'everything kept'}"
    )


def infeasible(profile: Profile, budget_bytes: int, smallest_bytes: int, way: Unplanned) -> str:
    """That no plan fits, what does, and how steps go on."""
    where = f"layer {profile.in_core_peak_layer}" if profile.in_core_peak_layer else "the step"
    share = share_that_holds(smallest_bytes, profile.in_core_peak_bytes)
    also = "".join(f"; {line}" for line in limits(profile))
    return (
        f"no plan fits the budget of {format_bytes(budget_bytes)}: the smallest possible is {smallest_bytes} bytes "
        f"({format_bytes(smallest_bytes)}, {share} of the in-core peak), which {where} needs; {_HOW[way]}, and the "
        f"budget is not kept{also}"
    )


def without_plan(reason: str, way: Unplanned) -> str:
    """Why steps will have no plan, and how they go on."""
    return f"no plan is made for some of the steps, for {reason}; {_HOW[way]}"


_HOW = {
    Unplanned.IN_CORE: "they run in-core as long as memory has room",
    Unplanned.SWAP: "every saved value is swapped",
}
