"""The Plan: one decision for each saved value, and what the runtime does at which point of its clock."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from ..files import read_struct, write_struct
from ..profiler.schema import Link, ModelSignature

SCHEMA_VERSION = 1


class Decision(StrEnum):
    """The three fates of a saved value."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


class PlannedValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One saved value, in the order of first packs: its position in ``Plan.values`` is its save point."""

    name: str
    layer: str
    decision: Decision
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    """Shape and dtype of the tensor at its first pack."""
    host_offset: int = -1
    """Byte offset in the host slab or spill file; -1 when the value is not swapped."""
    why: str = ""
    """Why it could not be anything else: pinned, or too small to matter."""


class PointActions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the runtime does at one point of its clock, in the order of the fields."""

    at: Literal["save", "use"]
    index: int
    """Save point: index into ``Plan.values``. Use point: index into ``Plan.uses``."""
    swap_out: tuple[int, ...] = ()
    """Values whose copy to the host starts here. At their own save point or later."""
    release: tuple[int, ...] = ()
    """Values whose copy is waited for here and whose device buffer is then given up by the runtime."""
    prefetch: tuple[int, ...] = ()
    """Values whose device buffer is allocated here and whose copy back starts here."""
    replay: tuple[int, ...] = ()
    """Values recomputed here, in this order."""
    record: Literal["on", "off", ""] = ""
    """Recording of ops for replay is switched from the next op on."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says this plan will do."""

    peak_bytes: int
    """Most live bytes at any moment, from the second step on."""
    first_step_peak_bytes: int
    """The same in the first step, before the optimizer has state."""
    in_core_peak_bytes: int
    in_core_step_s: float
    step_s: float
    overhead: float
    """``step_s / in_core_step_s - 1``."""
    stall_s: float
    """Seconds the compute stream waits for copies."""
    replay_s: float
    interference_s: float
    """Seconds lost because compute runs slower beside copies."""
    runtime_s: float = 0.0
    """Seconds that the runtime itself takes on top of ``step_s``, which the simulator knows nothing of: every plan for
    the profile pays for its handles, and for what it swaps and records."""
    out_bytes: int
    in_bytes: int
    host_bytes: int
    arena_bytes: int | None = None
    """What one static arena for all that the step allocates would need, without what is there before the step; None
    where it was not worked out."""
    arena_live_bytes: int | None = None
    """Most of these bytes that are live at any moment: no arena is smaller."""

    @property
    def expected_step_s(self) -> float:
        """What a clock will show: the step as simulated, and the runtime's own time."""
        return self.step_s + self.runtime_s

    @property
    def expected_overhead(self) -> float:
        """``expected_step_s / in_core_step_s - 1``."""
        return self.expected_step_s / self.in_core_step_s - 1 if self.in_core_step_s > 0 else 0.0


class Solve(msgspec.Struct, frozen=True, kw_only=True):
    """How the decisions were found."""

    policy: str
    solver: str
    status: str
    """``within gap`` (of the bound), ``time limit``, ``evaluation limit``, ``searched`` (to the end, without any of
    these), or ``not needed``."""
    objective_s: float | None
    """Overhead in seconds by the fluid model; the prediction comes from the simulator."""
    bound_s: float | None
    """Proven lower bound on the step time of any plan for this budget; None for a policy that proves none."""
    gap: float | None
    """``step_s / bound_s - 1``."""
    wall_s: float
    rounds: int
    """Times a model was solved: relaxed, tightened where the simulated peak was over budget, with integrality."""
    evaluations: int | None = None
    """Simulations that the search was allowed, where these ended it and no clock did; None for a time limit."""
    seed: int = 0
    """Of the search's random walks."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one model, one step and one budget."""

    kind: Literal["plan"] = "plan"
    schema_version: int = SCHEMA_VERSION
    workload: str
    profile_fingerprint: str
    budget_bytes: int
    device: Literal["cpu", "cuda"]
    estimate: bool = False
    """Made from a profile that was not measured on the real device."""
    assumed: tuple[str, ...] = ()
    """What its profile assumed in place of a measurement: another link, memory or compute."""
    roofline: str = ""
    """Name of the device whose roofline gave its profile's durations; the runtime runs it only when forced."""
    gradients_live_through_forward: bool = False
    solve: Solve
    prediction: Prediction
    link: Link
    notes: tuple[str, ...] = ()
    record_from_start: bool = False
    """Recording is on from the start of the step, before the first save point."""
    model: ModelSignature
    inputs: tuple[str, ...] = ()
    """``path dtype[shape]`` of each tensor that the model is called with; a :class:`PlanSet` picks its plan by them."""
    values: tuple[PlannedValue, ...]
    handles: tuple[int, ...]
    """Value of each handle, in pack order."""
    uses: tuple[int, ...]
    """Handle of each use point, in order."""
    schedule: tuple[PointActions, ...]
    """Only the points at which something happens, in the order of the clock."""

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the plan as JSON, one value and one point a line; never over a file unless ``force``."""
        return write_struct(path, self, force=force)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan; raises ``UsageError`` or ``InputFileError`` with one clear line."""
        return read_struct(path, cls, what="plan", schema_version=SCHEMA_VERSION)
