"""The Plan: one decision for each saved value, and what the runtime does at which point of its clock."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from poochplan.units import format_bytes, format_seconds, share_of_peak

from .display.shown_table import html_table
from .files import read_struct, write_struct
from .profile_parts import Host, Link, Memory, ModelSignature

SCHEMA_VERSION = 5
"""2 says of the search what ended it (``evaluations``, ``seed``); in 3 the step holds the runtime's own seconds; 4 says
what the peaks count, and has the layout of an arena; 5 what is recomputed inside compiled graphs."""
RUNTIME_IN_STEP = 3
"""The first version whose ``Prediction.step_s`` holds ``runtime_s``."""
HOST_ALIGNMENT_BYTES = 4096
"""Every swapped value begins at a multiple of this in host memory and in the spill file."""


def host_aligned(size_bytes: int) -> int:
    """The next place in host memory, at or behind ``size_bytes``, where a swapped value may begin."""
    return -(-size_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES


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


OUTSIDE = -1
"""The offset of a block that does not lie in the arena."""


class Place(NamedTuple):
    """Where one block of a planned step lies in the arena."""

    point: int
    """Points of the runtime's clock that have been passed when it is taken."""
    size_bytes: int
    """As asked for."""
    offset: int
    """In the arena, or ``OUTSIDE``."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One arena for what a planned step takes and gives back."""

    arena_bytes: int
    least_bytes: int
    """Smaller blocks lie outside; so do those from before the first point."""
    places: tuple[Place, ...]
    """Of all blocks of that size or more behind the first point, in the order in which they are taken."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says this plan will do."""

    peak_bytes: int
    """Most bytes at any moment, from the second step on: live ones, or allocated ones where ``memory`` says so."""
    live_peak_bytes: int | None = None
    """The most that storages alone take; None in files that do not say."""
    memory: Memory = Memory.LIVE
    """What the peaks count."""
    first_step_peak_bytes: int
    """The same in the first step, before the optimizer has state."""
    in_core_peak_bytes: int
    in_core_step_s: float
    """As measured: without a session, and so without what the runtime takes."""
    step_s: float
    """What a clock will show: ops, waits, replays, and what the runtime itself takes of the compute stream."""
    overhead: float
    """``step_s / in_core_step_s - 1``."""
    stall_s: float
    """Seconds the compute stream waits for copies."""
    replay_s: float
    interference_s: float
    """Seconds lost because compute runs slower beside copies."""
    runtime_s: float = 0.0
    """Seconds of ``step_s`` that the runtime itself takes. On the CPU these are its work for handles, swaps, recording
    and replays; on CUDA the compute stream's waits for what the thread has not launched yet."""
    out_bytes: int
    in_bytes: int
    host_bytes: int
    arena_bytes: int | None = None
    """What one static arena for all that the step allocates would need, without what is there before the step; None
    where it was not worked out."""
    arena_live_bytes: int | None = None
    """Most of these bytes that are live at any moment: no arena is smaller."""
    arena_peak_bytes: int | None = None
    """The arena, and the most that lies outside at any moment; what was there before the step included."""


class SolveStatus(StrEnum):
    """How the search for a plan ended."""

    WITHIN_GAP = "within gap"  # of the proven bound
    TIME_LIMIT = "time limit"
    EVALUATION_LIMIT = "evaluation limit"
    INTERRUPTED = "interrupted"  # by the user; the best plan so far
    SEARCHED = "searched"  # to the end, without any of these
    NOT_NEEDED = "not needed"  # one policy decided alone, or everything is kept


class Solve(msgspec.Struct, frozen=True, kw_only=True):
    """How the decisions were found."""

    policy: str
    solver: str
    status: SolveStatus
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


class Instructions(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime does in one step, and by what it tells that step from another. Promises nothing."""

    record_from_start: bool = False
    values: tuple[PlannedValue, ...] = ()
    handles: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    schedule: tuple[PointActions, ...] = ()


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a step left its plan: what was planned there, and what was found."""

    step: int = 0
    """Of the session, from 1 on."""
    at: Literal["save", "pack", "use"]
    """A save point, the pack of a further handle, or a use point."""
    index: int
    """Which of those: into ``Plan.values``, ``Plan.handles`` or ``Plan.uses``."""
    layer: str
    """Of the planned value; empty outside the model, and where nothing was planned."""
    value: str
    """Name of the planned value; empty where nothing was planned."""
    planned: str
    found: str


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A plan for one model, one step and one budget: :class:`Instructions`, and what is promised of them."""

    kind: Literal["plan"] = "plan"
    schema_version: int = SCHEMA_VERSION
    workload: str
    profile_fingerprint: str
    budget_bytes: int
    device: Literal["cpu", "cuda"]
    versions: dict[str, str] = {}
    """Those of its profile, of torch among them, and of the poochplan that made it; empty in files that do not say."""
    host: Host | None = None
    """Where its profile was measured; None where that is not known."""
    estimate: bool = False
    """Made from a profile that was not measured on the real device."""
    assumed: tuple[str, ...] = ()
    """What its profile assumed in place of a measurement: another link, memory or compute."""
    roofline: str = ""
    """Name of the device whose roofline gave its profile's durations; the runtime runs it only when forced."""
    gradients_live_through_forward: bool = False
    static_bytes: dict[str, int] = {}
    """Bytes by kind that the profiled step had besides what it made and let go of; empty in files that do not say."""
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
    layout: Layout | None = None
    """Where its blocks lie in an arena; None where that was not worked out."""
    replays: tuple[str, ...] = ()
    """What is recomputed inside compiled graphs, as ``graph/node``, and saved no longer: of a plan for a model that
    :func:`poochplan.compile` has compiled."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what the runtime does, for which model and within which budget; of nothing that is promised."""
        content = (self.instructions, self.model.fingerprint, self.inputs, self.budget_bytes)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    @property
    def holds_arena(self) -> bool:
        """Whether the device is the CPU, and the budget holds the arena and what lies outside it: then the runtime
        serves steps from it unasked.
        """
        peak_bytes = self.prediction.arena_peak_bytes
        return self.device == "cpu" and peak_bytes is not None and peak_bytes <= self.budget_bytes

    @cached_property
    def instructions(self) -> Instructions:
        """What to do, without what is promised."""
        return Instructions(
            record_from_start=self.record_from_start,
            values=self.values,
            handles=self.handles,
            uses=self.uses,
            schedule=self.schedule,
        )

    def _repr_html_(self) -> str:
        """In a notebook: budget, prediction, decisions and how they were found."""
        return html_table(f"Plan for {self.workload}", _summary(self))

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the plan as JSON, one value and one point a line; never over a file unless ``force``."""
        return write_struct(path, msgspec.structs.replace(self, schema_version=SCHEMA_VERSION), force=force)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan; raises ``UsageError`` or ``InputFileError`` with one clear line."""
        found = read_struct(path, cls, what="plan", schema_version=SCHEMA_VERSION)
        if found.schema_version >= RUNTIME_IN_STEP:
            return found
        return msgspec.structs.replace(found, prediction=_with_runtime_in_step(found.prediction))


def _with_runtime_in_step(prediction: Prediction) -> Prediction:
    """What an earlier version said beside the step, in it."""
    step_s = prediction.step_s + prediction.runtime_s
    overhead = step_s / prediction.in_core_step_s - 1 if prediction.in_core_step_s > 0 else 0.0
    return msgspec.structs.replace(prediction, step_s=step_s, overhead=overhead)


def _summary(plan: Plan) -> list[tuple[str, str]]:
    promised, solve = plan.prediction, plan.solve
    share = f", {share_of_peak(plan.budget_bytes, promised.in_core_peak_bytes):.0%} of in-core"
    bound = "" if solve.gap is None else f", within {solve.gap:.2%} of the best there is"
    return [
        ("budget", f"{format_bytes(plan.budget_bytes)}{share}"),
        ("predicted peak", format_bytes(max(promised.peak_bytes, promised.first_step_peak_bytes))),
        ("predicted step", f"{format_seconds(promised.step_s)} (in-core {format_seconds(promised.in_core_step_s)})"),
        ("predicted overhead", f"{promised.overhead:+.1%}{bound}"),
        *((str(decision), _decided(plan, decision)) for decision in Decision),
        ("found", f"by {solve.policy}: {solve.status} after {format_seconds(solve.wall_s)}"),
        *(("assumed", text) for text in plan.assumed),
        *(("note", text) for text in plan.notes),
    ]


def _decided(plan: Plan, decision: Decision) -> str:
    sizes = [value.size_bytes for value in plan.values if value.decision is decision]
    return f"{len(sizes)} values, {format_bytes(sum(sizes))}"
