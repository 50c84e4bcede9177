"""Messages of ``auto`` in addition to those of every session (``runtime/messages.py``)."""

from __future__ import annotations

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import limits
from poochplan.planner.planning import share_that_holds
from poochplan.units import format_bytes, format_seconds

from .before_plan import Unplanned

IN_CORE = (
    "steps run in-core while they are measured, as long as memory has room; the budget is kept from the plan on "
    '(before_plan="swap" keeps it from the first step on)'
)
ONE_REGION = (
    "the model is compiled as a whole, which leaves nothing to plan: steps run in-core as long as memory has room; "
    "poochplan.compile compiles it with a plan inside, or compile its blocks one by one"
)
BUILDING = "building the allocator that counts the memory inside ops, in the background; once for this torch"
PLANNING = "planning in another process"
KNOWN = f"profiled in an earlier run; {PLANNING}"
ENDED_UNPLANNED = "the loop has ended while a plan was being made; the next run continues from its profile"
ENDED_UNPROFILED = "the loop has ended before it was profiled, which takes a dozen steps: nothing was planned"
NO_BACKWARD = (
    "nothing was planned: no backward has used what the model saved; if the loop trains, other saved-tensors hooks "
    "have taken it (save_on_cpu, a hook of a framework's): switch them off"
)
OUTGROWN = "there is more in memory than when the step was profiled: planning again"
LEFT = "steps differ from their plan now: profiling again, in-core; the budget is kept again from the next plan on"


def grown(peak_bytes: int) -> str:
    return (
        f"steps without a plan take {format_bytes(peak_bytes)} now, more than before or than the budget: they are "
        "looked at again, and the budget is not kept meanwhile"
    )


def activated(plan: Plan) -> str:
    found, promise = plan.decided(), plan.prediction
    words = {Decision.SWAP: "swapped", Decision.RECOMPUTE: "recomputed"}
    counts = ", ".join(f"{len(found[decision])} {word}" for decision, word in words.items() if found[decision])
    return (
        f"from the next step on at most {format_bytes(promise.peak_of_step(plan.holds_arena))} of a budget of "
        f"{format_bytes(plan.budget_bytes)}, {format_seconds(promise.step_s)} a step ({promise.overhead:+.1%}) "
        f"predicted, {counts or 'everything kept'}"
    )


def infeasible(profile: Profile, budget_bytes: int, smallest_bytes: int, mode: Unplanned) -> str:
    where = f"layer {profile.in_core_peak_layer}" if profile.in_core_peak_layer else "the step"
    share = share_that_holds(smallest_bytes, profile.in_core_peak_bytes)
    also = "".join(f"; {line}" for line in limits(profile))
    return (
        f"no plan fits the budget of {format_bytes(budget_bytes)}: the smallest possible is {smallest_bytes} bytes "
        f"({format_bytes(smallest_bytes)}, {share} of the in-core peak), which {where} needs; steps {_HOW[mode]}, "
        f"and the budget is not kept{also}"
    )


def profiled(steps: int, number: int) -> str:
    """Says how many steps have been measured, for the ``number``-th kind of step, from 1."""
    which = "" if number == 1 else " more, of other inputs or another part of the loop"
    return f"profiled in {steps} steps{which}; {PLANNING}"


def dearer(step_s: float, promised_s: float, why: str, *, is_planned_again: bool) -> str:
    then = "another plan is made for the slower link" if is_planned_again else "the plan stays in force"
    return f"steps take {format_seconds(step_s)} where {format_seconds(promised_s)} were predicted: {why}; {then}"


def lacks_arena(more_bytes: int) -> str:
    return (
        f"steps take their memory from torch, because one arena needs {format_bytes(more_bytes)} more than the plan "
        "leaves: another plan is made that has room for it"
    )


def not_planned(reason: str) -> str:
    return f"steps go on without a plan: {reason}"


def bound(peak_bytes: int, budget_bytes: int) -> str:
    return (
        f"a step without a plan took {format_bytes(peak_bytes)}, more than the budget of {format_bytes(budget_bytes)}: "
        "from now on its values are swapped where the budget has no room for them, which is slow"
    )


def without_plan(reason: str, mode: Unplanned, bound_bytes: int = 0) -> str:
    """``bound_bytes``: a budget that they keep all the same."""
    if bound_bytes:
        kept = f"their values are kept while the budget of {format_bytes(bound_bytes)} has room, and swapped otherwise"
        return f"no plan is made for some of the steps: {reason}; {kept}, which is slow"
    kept = ", and the budget is not kept for them" if mode is Unplanned.IN_CORE else ""
    return f"no plan is made for some of the steps: {reason}; they {_HOW[mode]}{kept}"


_HOW = {
    Unplanned.IN_CORE: "run in-core as long as memory has room",
    Unplanned.SWAP: "swap every saved value",
}
