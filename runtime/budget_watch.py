"""Whether metered steps keep to the budget of the plan that they follow; what takes more is told once."""

from __future__ import annotations

import warnings

from poochplan.formats.plan import Plan

_FIRST_STEPS = 2
"""Without and with the optimizer's state: every later step is like the second."""


class BudgetWatch:
    """State: the peak of the last step that ended, and whether a step above its budget has been told of."""

    def __init__(self) -> None:
        self._last_peak_bytes = 0
        self._told = False

    def look(self, peak_bytes: int, plan: Plan) -> None:
        """Warns, the first time, where a step that follows the plan has taken more than the plan's budget."""
        if self._told or peak_bytes <= plan.budget_bytes:
            return
        self._told = True
        warnings.warn(
            f"poochplan: a step that follows the plan took {peak_bytes} bytes, more than its budget of "
            f"{plan.budget_bytes} (predicted: {plan.prediction.peak_bytes}); likely tensors are kept from step to "
            "step or made beside it, or reference cycles hold them until Python's collector runs (the profile's notes "
            "tell of those); let go of them, call gc.collect() after each step, or plan with a smaller budget (said "
            "once)",
            RuntimeWarning,
            stacklevel=2,
        )

    def is_settled(self, steps: int, peak_bytes: int, plan: Plan) -> bool:
        """Whether all that comes is known, now that so many steps have ended, the last of them with this peak.

        It is not where each takes more than the one before and than was predicted: something is left behind in each.
        """
        before_bytes, self._last_peak_bytes = self._last_peak_bytes, peak_bytes
        grows = peak_bytes > max(before_bytes, plan.prediction.peak_bytes)
        return steps >= _FIRST_STEPS and (self._told or not grows)
