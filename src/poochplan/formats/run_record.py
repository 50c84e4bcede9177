"""The file that ``pooch run`` writes: a RunRecord, to be compared with its plan later."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

import msgspec

from poochplan.units import format_bytes, format_copies, format_seconds, share_of_peak

from .files import Document, numbered
from .plan import Departure, Plan
from .profile_parts import Bytes, Change, Count, Host, Memory, Seconds, Text

SCHEMA_VERSION = 1
MUCH_FRAGMENTATION = 0.1


class RankRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one rank, of several that trained together."""

    measured_peak_bytes: Bytes | None
    planned_step_s: Seconds
    stall_s: Seconds
    left_steps: Count
    bitwise_equal: bool | None

    @property
    def text(self) -> str:
        """All of them, in words."""
        peak = (
            "peak not metered" if self.measured_peak_bytes is None else f"peak {format_bytes(self.measured_peak_bytes)}"
        )
        step = f"step {format_seconds(self.planned_step_s)}, stall {format_seconds(self.stall_s)}"
        left = f"LEFT THE PLAN in {self.left_steps} steps" if self.left_steps else "followed the plan"
        equal = {None: "bits not checked", True: "bitwise equal", False: "NOT BITWISE EQUAL"}[self.bitwise_equal]
        return f"{peak}, {step}, {left}, {equal}"


class RunRecord(Document, frozen=True, kw_only=True):
    """The results of a run, next to the predictions of its plan. Bytes and seconds are those of one step: medians over
    steps.
    """

    heading: ClassVar[str] = "Run of {}"
    kind: Literal["run"] = "run"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    plan_fingerprint: Text
    """``Plan.fingerprint`` of the plan that was followed."""
    versions: dict[Text, Text] = msgspec.field(default_factory=dict)
    """Versions in the run: poochplan, torch, python."""
    host: Host | None = None
    """The machine of the run."""
    in_core_peak_bytes: Bytes
    budget_bytes: Bytes
    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes | None
    """The largest peak of any metered step; None if none was metered."""
    in_core_step_s: Seconds
    in_core_step_measured: bool
    """Whether it was measured next to the planned steps; otherwise it is the profile's."""
    predicted_step_s: Seconds
    planned_step_s: Seconds
    """Measured."""
    predicted_overhead: Change
    measured_overhead: Change
    out_bytes: Bytes
    in_bytes: Bytes
    replay_s: Seconds
    replayed_values: Count
    stall_s: Seconds
    contradiction: Text
    """How the measured time contradicts the profile; empty if it does not."""
    fallbacks: Count
    fallback_reasons: tuple[Text, ...]
    departures: tuple[Departure, ...]
    """Where steps diverged from the plan."""
    bitwise_equal: bool | None
    """None if it was not checked."""
    difference: Text | None
    allocated_peak_bytes: Bytes | None
    reserved_peak_bytes: Bytes | None
    arena_bytes: Bytes | None
    arena_live_bytes: Bytes | None
    arena_peak_bytes: Bytes | None = None
    """These three are the plan's. All fields below have their defaults in files that lack them."""
    memory: Memory = Memory.LIVE
    """Which memory the peaks count."""
    predicted_live_peak_bytes: Bytes | None = None
    served_arena_bytes: Bytes | None = None
    """Size of the arena that served the last steps; None if there was none."""
    served_blocks: Count = 0
    """Blocks of the last step that was served; the next four fields are of that step too."""
    served_bytes: Bytes = 0
    unserved_blocks: Count = 0
    """Number of blocks that lay outside contrary to the plan."""
    unserved_bytes: Bytes = 0
    unserved: tuple[Text, ...] = ()
    """The first of these blocks, and the reasons."""
    why_not_served: Text = ""
    """Why no step was served; empty if one was."""
    steps: Count = 0
    """Number of steps under the plan, including timed ones."""
    left_steps: Count = 0
    """Number of steps that differed from the plan, completely or in one value."""
    compared_steps: Count = 0
    """Steps whose tensors were compared with the in-core ones."""
    compared_tensors: Count = 0
    rank: Count = 0
    """Of several ranks, the one that all fields but the next describe: the worst."""
    on: Literal["allocated", "reserved"] = "allocated"
    """What the budget covers."""
    promised_bytes: Bytes = 0
    """Most bytes of that, as the plan says."""
    ranks: tuple[RankRun, ...] = ()
    """Each rank's results; empty if only one process ran."""

    @property
    def is_over(self) -> bool:
        """Whether a metered step exceeded the budget, or, of reserved bytes, what the plan says if that is more."""
        if self.on == "reserved" and (self.reserved_peak_bytes or 0) > max(self.budget_bytes, self.promised_bytes):
            return True
        return self.measured_peak_bytes is not None and self.measured_peak_bytes > self.budget_bytes

    def rows(self, plan: Plan | None = None) -> dict[str, str]:
        """Predictions and results, in words; with ``plan`` also those of the plan itself."""
        share = share_of_peak(self.budget_bytes, self.in_core_peak_bytes)
        in_core = format_seconds(self.in_core_step_s)
        if self.in_core_step_measured:
            in_core = f"{in_core} (PyTorch alone, before and after it)"
        else:
            in_core = f"{in_core if plan is None else plan.prediction.in_core_text}, from the profile"
        return {
            "in-core peak": format_bytes(self.in_core_peak_bytes),
            "budget": f"{format_bytes(self.budget_bytes)} ({share:.0%} of the in-core peak)",
            **({} if plan is None else {"budget is on": plan.counted_text}),
            "predicted peak": self.memory.peak_text(self.predicted_peak_bytes, self.predicted_live_peak_bytes),
            "measured peak": self._peak_text(),
            "in-core step time": in_core,
            "planned step time": f"{format_seconds(self.planned_step_s)} (predicted "
            f"{format_seconds(self.predicted_step_s)})",
            "predicted overhead": f"{self.predicted_overhead:+.1%}",
            "measured overhead": f"{self.measured_overhead:+.1%}",
            "bytes swapped": f"{format_copies(self.out_bytes, self.in_bytes)} a step",
            "time recomputed": f"{format_seconds(self.replay_s)} a step, {self.replayed_values} values",
            "stall": f"{format_seconds(self.stall_s)} a step",
            "gradients bitwise equal": self._equal_text(),
            **self._allocator_rows(),
            **(self._arena_rows() if plan is None or plan.device == "cpu" else {}),
            **({"left the plan": f"{self.left_steps} of {self.steps} steps"} if self.left_steps else {}),
            **({"worst rank": f"{self.rank} of {len(self.ranks)}, whose figures these are"} if self.ranks else {}),
            **{f"rank {number}": one.text for number, one in enumerate(self.ranks)},
            **({"note": self.contradiction} if self.contradiction else {}),
            **numbered("fallback", self.fallback_reasons),
        }

    def _peak_text(self) -> str:
        if self.measured_peak_bytes is None:
            return "not metered"
        within = "OVER THE BUDGET" if self.is_over else "within the budget"
        within += f"; {self.left_steps} of {self.steps} steps LEFT THE PLAN" if self.left_steps else ""
        return f"{format_bytes(self.measured_peak_bytes)} ({within})"

    def _equal_text(self) -> str:
        if self.bitwise_equal is None:
            return "not checked (--check compares them with in-core)"
        if not self.bitwise_equal:
            return f"no: {self.difference}"
        if not self.compared_steps:  # older files do not have it
            return "yes"
        counts = f"{self.compared_tensors} tensors in {self.compared_steps} steps"
        return f"yes (and loss, buffers, parameters, optimizer state: {counts})"

    def _allocator_rows(self) -> dict[str, str]:
        """The peaks of CUDA's caching allocator."""
        if self.allocated_peak_bytes is None or self.reserved_peak_bytes is None:
            return {}
        fragmentation = fragmentation_text(self.allocated_peak_bytes, self.reserved_peak_bytes)
        return {
            "allocated peak": f"{format_bytes(self.allocated_peak_bytes)} (the allocator's, workspaces included)",
            "reserved peak": f"{format_bytes(self.reserved_peak_bytes)}{fragmentation}",
        }

    def _arena_rows(self) -> dict[str, str]:
        """The blocks of a step that the arena served, and the others with the reasons."""
        if self.served_arena_bytes is None:
            return {"served from the arena": f"nothing: {self.why_not_served}"} if self.why_not_served else {}
        served = f"{self.served_blocks} blocks, {format_bytes(self.served_bytes)} a step"
        missed = "no planned block"
        if self.unserved_blocks:
            missed = f"{self.unserved_blocks} blocks, {format_bytes(self.unserved_bytes)}: {'; '.join(self.unserved)}"
        return {
            "served from the arena": f"{served}, from one arena of {format_bytes(self.served_arena_bytes)}",
            "not served": missed,
        }


def fragmentation_text(allocated_bytes: int, reserved_bytes: int) -> str:
    """The share of the reserved bytes that was never in use; if it is large, also the setting that lowers it."""
    share = 1 - allocated_bytes / reserved_bytes if reserved_bytes else 0.0
    text = f" ({share:.0%} fragmentation)"
    if share > MUCH_FRAGMENTATION and not segments_expand():
        return f"{text}; set PYTORCH_ALLOC_CONF=expandable_segments:True to have less"
    return text


def segments_expand() -> bool:
    """Whether the environment asks torch's allocator for expandable segments."""
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:True" in settings
