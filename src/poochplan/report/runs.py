"""What ``pooch run`` found, beside what the plan promised."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poochplan.formats.plan import Departure, Plan
from poochplan.formats.profile import Host
from poochplan.formats.queries import OUTSIDE
from poochplan.units import format_bytes, format_seconds, share_of_peak

from .inspection.run_record import RunRecord
from .tables import Rows, arena_row, counted_text, overhead_text, peak_text, swapped_text

if TYPE_CHECKING:
    from poochplan.runtime.run_report import ArenaReport, MemoryPeaks, StepReport
    from poochplan.verify import Comparison, Run

MUCH_FRAGMENTATION = 0.1
MUCH_OFF = 0.5
"""Share by which a measured time contradicts the one that the profile gave."""
LEAST_OFF_S = 0.02
"""Less than this is a stumble of the machine, whatever share of a short step it is."""


@dataclass(frozen=True)
class RunSummary:
    """Measured figures of a run under a plan; bytes and seconds of one step are medians over its steps."""

    peak_bytes: int | None
    """Largest metered peak of any step; None when no step was metered."""
    step_s: float
    in_core_step_s: float | None
    """Measured beside it by ``--check``; None when the run was not compared."""
    out_bytes: int
    in_bytes: int
    replay_s: float
    replayed_values: int
    stall_s: float
    steps: int
    """Under the plan, timed ones too."""
    left_steps: int
    """That left the plan, wholly or in one value."""
    fallbacks: int
    fallback_reasons: tuple[str, ...]
    checked: bool
    compared_steps: int
    compared_tensors: int
    difference: str | None
    memory: MemoryPeaks | None = None
    """The allocator's peaks (CUDA)."""
    departures: tuple[Departure, ...] = ()
    arena: ArenaReport | None = None
    """What the arena served; None where there was none."""
    why_not_served: str = ""
    """Why there was none, where that is known before the run."""

    @classmethod
    def of(
        cls,
        planned: Run,
        *,
        in_core: Run | None = None,
        comparison: Comparison | None = None,
        why_not_served: str = "",
    ) -> RunSummary:
        """Sums up a run under a plan, and the comparison where there is one."""
        assert planned.report is not None
        total = planned.report.total
        steps = planned.step_reports
        timed = [step for step in steps[1:] if step.peak_bytes is None] or steps
        return cls(
            peak_bytes=max((step.peak_bytes for step in steps if step.peak_bytes is not None), default=None),
            step_s=planned.step_s,
            in_core_step_s=None if in_core is None else in_core.step_s,
            out_bytes=_median_bytes(timed, "out_bytes"),
            in_bytes=_median_bytes(timed, "in_bytes"),
            replay_s=statistics.median(step.replay_s for step in timed),
            replayed_values=_median_bytes(timed, "replayed_values"),
            stall_s=statistics.median(step.stall_s for step in timed),
            steps=len(steps),
            left_steps=sum(step.fallbacks > 0 for step in steps),
            fallbacks=total.fallbacks,
            fallback_reasons=tuple(total.fallback_reasons),
            checked=comparison is not None,
            compared_steps=0 if comparison is None else comparison.compared_steps,
            compared_tensors=0 if comparison is None else comparison.compared_tensors,
            difference=None if comparison is None else comparison.difference,
            memory=planned.report.memory,
            departures=tuple(total.departures),
            arena=planned.report.arena,
            why_not_served=why_not_served,
        )

    def overhead(self, plan: Plan) -> float:
        """Measured step time over the in-core one, measured beside it or else the profile's, minus 1."""
        return self.step_s / (self.in_core_step_s or plan.prediction.in_core_step_s) - 1

    def is_over(self, plan: Plan) -> bool:
        """Whether a metered step took more than the budget."""
        return self.peak_bytes is not None and self.peak_bytes > plan.budget_bytes

    def contradiction(self, plan: Plan) -> str:
        """One line where the measured time is more than half of the profile's away from it; else empty.

        PyTorch alone against itself where both timed it (``--check``), else the planned step against its prediction.
        Differences of less than 20 ms say nothing. A plan whose times were assumed is not contradicted by this machine.
        """
        prediction = plan.prediction
        if plan.estimate:
            return ""
        is_in_core, found_s, said_s = False, self.step_s, prediction.step_s
        if self.in_core_step_s is not None and prediction.is_timed_alone:
            is_in_core, found_s, said_s = True, self.in_core_step_s, prediction.in_core_step_s
        what = "in-core" if is_in_core else "planned"
        off_s = abs(found_s - said_s)
        if off_s <= max(LEAST_OFF_S, MUCH_OFF * said_s):
            return ""
        source = "the profile says" if is_in_core else "the plan predicts"
        return (
            f"the {what} step took {format_seconds(found_s)}, where {source} {format_seconds(said_s)}: the machine was "
            "busy during one of the two; profile again, and plan from that"
        )

    def rows(self, plan: Plan) -> Rows:
        """The table of ``pooch run``."""
        prediction = plan.prediction
        in_core = f"{prediction.in_core_text}, from the profile"
        if self.in_core_step_s:
            in_core = f"{format_seconds(self.in_core_step_s)} (PyTorch alone, before and after it)"
        share = share_of_peak(plan.budget_bytes, prediction.in_core_peak_bytes)
        rows = {
            "in-core peak": format_bytes(prediction.in_core_peak_bytes),
            "budget": f"{format_bytes(plan.budget_bytes)} ({share:.0%} of the in-core peak)",
            "budget is on": counted_text(plan),
            "predicted peak": peak_text(prediction),
            "measured peak": self._peak_text(plan),
            "in-core step time": in_core,
            "planned step time": f"{format_seconds(self.step_s)} (predicted {format_seconds(prediction.step_s)})",
            "predicted overhead": overhead_text(prediction.overhead),
            "measured overhead": overhead_text(self.overhead(plan)),
            "bytes swapped": f"{swapped_text(self.out_bytes, self.in_bytes)} a step",
            "time recomputed": f"{format_seconds(self.replay_s)} a step, {self.replayed_values} values",
            "stall": f"{format_seconds(self.stall_s)} a step",
            "gradients bitwise equal": self._equal_text(),
        }
        if self.memory is not None:
            rows["allocated peak"] = (
                f"{format_bytes(self.memory.allocated_bytes)} (the allocator's, workspaces included)"
            )
            rows["reserved peak"] = f"{format_bytes(self.memory.reserved_bytes)}{fragmentation_text(self.memory)}"
            rows |= arena_row(plan)  # what an allocator that knew the plan would need
        if plan.device == "cpu":
            rows |= self._arena_rows()
        if self.left_steps:
            rows["left the plan"] = f"{self.left_steps} of {self.steps} steps: {'; '.join(self.fallback_reasons)}"
        return rows

    def _arena_rows(self) -> Rows:
        """What the arena served of a step, and what it did not and why."""
        arena = self.arena
        if arena is None or not arena.size_bytes:
            return {"served from the arena": f"nothing: {self.arena_reason}"}
        served = f"{arena.served} blocks, {format_bytes(arena.served_bytes)} a step"
        rows = {"served from the arena": f"{served}, from one arena of {format_bytes(arena.size_bytes)}"}
        missed = arena.unplanned + arena.taken
        if not missed:
            return rows | {"not served": "nothing of what was planned"}
        size = format_bytes(arena.unplanned_bytes + arena.taken_bytes)
        return rows | {"not served": f"{missed} blocks, {size}: {'; '.join(self.unserved)}"}

    @property
    def arena_reason(self) -> str:
        """Why no step was served, in one line; empty where one was."""
        if self.arena is None:
            return self.why_not_served or "the first steps are ordinary, and no step came behind them; raise --timed"
        if self.arena.larger_bytes:
            return f"the arena would be {format_bytes(self.arena.larger_bytes)} above what the budget has room for"
        return ""

    @property
    def unserved(self) -> tuple[str, ...]:
        """The first blocks that lay outside against the plan, with why."""
        found = self.arena.unserved if self.arena is not None else []
        why = {"unplanned": "not expected there", "taken": "its place was in use"}
        return tuple(
            f"{format_bytes(one.size_bytes)} in {one.layer or OUTSIDE}, {why.get(one.why, one.why)}" for one in found
        )

    def _peak_text(self, plan: Plan) -> str:
        if self.peak_bytes is None:
            return "not metered"
        within = "OVER THE BUDGET" if self.is_over(plan) else "within the budget"
        within += f"; {self.left_steps} of {self.steps} steps LEFT THE PLAN" if self.left_steps else ""
        return f"{format_bytes(self.peak_bytes)} ({within})"

    def _equal_text(self) -> str:
        if not self.checked:
            return "not checked (--check compares them with in-core)"
        if self.difference is not None:
            return f"no: {self.difference}"
        return f"yes (and loss, buffers, parameters: {self.compared_tensors} tensors in {self.compared_steps} steps)"

    def record(self, plan: Plan, versions: dict[str, str], host: Host) -> RunRecord:
        """What ``pooch run`` writes with ``-o``, and prints with ``--json``."""
        prediction = plan.prediction
        return RunRecord(
            workload=plan.workload,
            plan_fingerprint=plan.fingerprint,
            versions=versions,
            host=host,
            in_core_peak_bytes=prediction.in_core_peak_bytes,
            budget_bytes=plan.budget_bytes,
            predicted_peak_bytes=max(prediction.peak_bytes, prediction.first_step_peak_bytes),
            measured_peak_bytes=self.peak_bytes,
            in_core_step_s=self.in_core_step_s or prediction.in_core_step_s,
            in_core_step_measured=self.in_core_step_s is not None,
            predicted_step_s=prediction.step_s,
            planned_step_s=self.step_s,
            predicted_overhead=prediction.overhead,
            measured_overhead=self.overhead(plan),
            out_bytes=self.out_bytes,
            in_bytes=self.in_bytes,
            replay_s=self.replay_s,
            replayed_values=self.replayed_values,
            stall_s=self.stall_s,
            contradiction=self.contradiction(plan),
            steps=self.steps,
            left_steps=self.left_steps,
            fallbacks=self.fallbacks,
            fallback_reasons=self.fallback_reasons,
            departures=self.departures,
            bitwise_equal=(self.difference is None) if self.checked else None,
            difference=self.difference,
            allocated_peak_bytes=None if self.memory is None else self.memory.allocated_bytes,
            reserved_peak_bytes=None if self.memory is None else self.memory.reserved_bytes,
            arena_bytes=prediction.arena_bytes,
            arena_live_bytes=prediction.arena_live_bytes,
            arena_peak_bytes=prediction.arena_peak_bytes,
            memory=prediction.memory,
            predicted_live_peak_bytes=prediction.live_peak_bytes,
            served_arena_bytes=(self.arena.size_bytes or None) if self.arena else None,
            served_blocks=self.arena.served if self.arena else 0,
            served_bytes=self.arena.served_bytes if self.arena else 0,
            unserved_blocks=self.arena.unplanned + self.arena.taken if self.arena else 0,
            unserved_bytes=self.arena.unplanned_bytes + self.arena.taken_bytes if self.arena else 0,
            unserved=self.unserved,
            why_not_served=self.arena_reason,
        )


def fragmentation_text(memory: MemoryPeaks) -> str:
    """What of the reserved bytes was never in use, and the setting that helps where it is much and not set."""
    text = f" ({memory.fragmentation:.0%} fragmentation)"
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if memory.fragmentation > MUCH_FRAGMENTATION and "expandable_segments:True" not in settings:
        return f"{text}; set PYTORCH_ALLOC_CONF=expandable_segments:True to have less"
    return text


def _median_bytes(steps: list[StepReport], field: str) -> int:
    return int(statistics.median(getattr(step, field) for step in steps))
