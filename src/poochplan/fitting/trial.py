"""Steps of the value that was found, run under its plan: within the memory, and bitwise those of in-core training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from poochplan import verify
from poochplan.formats.plan import Plan
from poochplan.workload import Workload

from .family import Family


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What running the value found."""

    value: int
    steps: int
    peak_bytes: int | None
    """Most that a metered step took."""
    is_within: bool
    """Whether each step stayed within the budget."""
    is_bitwise: bool | None
    """Whether losses, gradients, buffers and parameters are those of in-core steps; None where in-core does not fit."""
    difference: str | None = None
    """The first that differs."""


def tried(
    family: Family,
    value: int,
    made: Plan,
    steps: int,
    *,
    in_core: bool,
    spill_dir: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Trial:
    """Runs ``steps`` steps under the plan, and where ``in_core`` the same without one; raises what ``apply`` raises."""

    def build() -> Workload:
        return family.workload(value)

    say(f"{family.parameter} {value}, {steps} steps under its plan")
    difference = None
    if in_core:
        compared = verify.check(build, made, steps=steps, timed_steps=0, seed=family.seed, spill_dir=spill_dir)
        run, difference = compared.planned, compared.difference
    else:
        run = verify.run_planned(
            build, made, steps=steps, timed_steps=0, seed=family.seed, spill_dir=spill_dir, record=False
        )
    peaks = [step.peak_bytes for step in run.step_reports if step.peak_bytes is not None]
    return Trial(
        value=value,
        steps=steps,
        peak_bytes=max(peaks, default=None),
        is_within=max(peaks, default=0) <= made.budget_bytes,
        is_bitwise=difference is None if in_core else None,
        difference=difference,
    )
