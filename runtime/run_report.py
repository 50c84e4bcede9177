"""What a session did, in numbers; and fallbacks, where a plan was not followed: each kind is warned of once."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from poochplan.formats.files import html_table, text_table
from poochplan.formats.plan import Departure
from poochplan.runtime.messages import warn
from poochplan.units import counted, format_bytes, format_seconds

MOST_REASONS = 20


class FallbackKind(StrEnum):
    """Why the plan was not followed. Each kind is warned of once in a session."""

    DIVERGED = "diverged"
    """The step is not the planned one."""
    NO_PLAN = "no plan"
    """No plan of the set is for inputs such as the step's, or they were not known in time."""
    NOT_REPLAYABLE = "not replayable"
    """A value could not be recomputed and was swapped."""
    HOST_TIER = "host tier"
    """The host tier could not be written, full or broken; values were kept."""


class SessionStatus(StrEnum):
    """Whether the steps of a session followed their plans."""

    FOLLOWED = "followed"
    PARTLY_FOLLOWED = "partly followed"
    NOT_FOLLOWED = "not followed"
    NO_STEPS = "no steps"
    """None was seen: no planned model was called with gradients on the session's thread."""


class MemoryPeaks(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks of a caching allocator since the session was entered."""

    allocated_bytes: int
    """In use at one moment, workspaces included."""
    reserved_bytes: int
    """Taken from the device; the excess over ``allocated_bytes`` is fragmentation."""
    retries: int = 0
    """How often the allocator found no room, emptied its cache and tried again; each time delays the step."""

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that was never in use at once."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


class StepReport(msgspec.Struct, kw_only=True):
    """One step, or the sum over steps (peaks: the largest)."""

    steps: int = 0
    peak_bytes: int | None = None
    """Most bytes at any moment, as the budget counts them; None for steps that were not metered."""
    reserved_bytes: int | None = None
    """On CUDA, most bytes that the allocator had taken from the GPU; None for steps that were not metered."""
    out_bytes: int = 0
    """Bytes copied to the host."""
    in_bytes: int = 0
    replay_s: float = 0.0
    """Seconds in replays, with waits for their inputs. On CUDA, of the compute stream in steps with a census."""
    replayed_values: int = 0
    stall_s: float = 0.0
    """Seconds the compute stream waited for copies. On CUDA, in steps with a census."""
    hooks_s: float = 0.0
    """Seconds of the calling thread in autograd's hooks, with moving, replaying and waiting; without those of kept
    values at points where nothing else is planned.
    """
    served_bytes: int = 0
    """Allocated from an arena, each block counted; known when the step is over."""
    unserved_bytes: int = 0
    """Allocated from torch's allocator in steps with an arena: the block has no place, or its place is in use."""
    fallbacks: int = 0
    """Times the plan was not followed: a step that diverged (counted once), a value kept because the disk is full, a
    value that could not be recomputed."""
    fallback_kinds: dict[FallbackKind, int] = msgspec.field(default_factory=dict)
    """The number of each kind."""
    fallback_reasons: list[str] = msgspec.field(default_factory=list)
    audited_values: int = 0
    """Released values that were compared with what came back for them."""
    audit_differences: int = 0
    """Those that did not come back as they were; they are kept from then on."""
    departures: list[Departure] = msgspec.field(default_factory=list)
    """Where steps diverged, once for each step; only the first ones."""

    def add(self, other: StepReport) -> None:
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if isinstance(default, int | float):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, other.peak_bytes)
        if other.reserved_bytes is not None:
            self.reserved_bytes = max(self.reserved_bytes or 0, other.reserved_bytes)
        for kind, times in other.fallback_kinds.items():
            self.fallback_kinds[kind] = self.fallback_kinds.get(kind, 0) + times
        for reason in other.fallback_reasons:
            if reason not in self.fallback_reasons and len(self.fallback_reasons) < MOST_REASONS:
                self.fallback_reasons.append(reason)
        self.departures += other.departures[: MOST_REASONS - len(self.departures)]


class Unserved(msgspec.Struct, frozen=True, kw_only=True):
    """A block outside the arena that the layout has inside, or does not have."""

    size_bytes: int
    layer: str
    """The layer that saved or used a value last."""
    why: str
    """``unplanned``: nothing of this size was expected there; ``taken``: its place was in use."""


class ArenaReport(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of the last step that used an arena."""

    size_bytes: int = 0
    served: int = 0
    served_bytes: int = 0
    """Over the step, each block counted."""
    unplanned: int = 0
    unplanned_bytes: int = 0
    taken: int = 0
    taken_bytes: int = 0
    unserved: list[Unserved] = msgspec.field(default_factory=list)
    """The first of the unplanned and taken blocks."""
    larger_bytes: int = 0
    """By how much the recorded layout exceeds the room in the budget; it is then not used."""

    @property
    def missed(self) -> int:
        """Number of blocks that lay outside contrary to the layout."""
        return self.unplanned + self.taken


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``session.report()``: the last step that ended, the sum over all steps, and the predictions.

    Prints as a table.

    The predictions are those of the plan that the last step followed, also if that is a larger plan.
    """

    last_step: StepReport
    total: StepReport
    predicted_peak_bytes: int
    predicted_first_step_peak_bytes: int
    budget_bytes: int
    """These three are 0 while there is no plan."""
    predicted_reserved_bytes: int | None = None
    """On CUDA, most bytes that the allocator takes from the GPU, as it is set; None if they are not predicted."""
    steps_followed: int = 0
    """Number of ended steps that did everything in their plan."""
    status: SessionStatus = SessionStatus.NO_STEPS
    memory: MemoryPeaks | None = None
    """The caching allocator's peaks (CUDA); None on the CPU."""
    arena: ArenaReport | None = None
    """The arena of the steps; None without one."""
    compiled_graphs: int = 0
    """Graphs of any model that ``torch.compile`` compiled inside the session, or took from its caches. Graphs of other
    shapes than the plan's have no plan; ``TORCH_LOGS=recompiles`` shows other reasons for compiling again."""

    def __str__(self) -> str:
        return text_table(self._title(), self._rows(), _HEADINGS)

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._rows(), _HEADINGS)

    def _title(self) -> str:
        budget = f"with a budget of {format_bytes(self.budget_bytes)}" if self.budget_bytes else "without a plan so far"
        return f"{counted(self.total.steps, 'step')} {budget}"

    def _rows(self) -> list[tuple[str, str, str]]:
        """Name, of the last step, of all steps; what never happened has no row."""
        steps = (self.last_step, self.total)
        largest_bytes = max(self.predicted_peak_bytes, self.predicted_first_step_peak_bytes)

        def row(name: str, show: Callable[[StepReport], str]) -> tuple[str, str, str]:
            last, total = (show(step) for step in steps)
            return name, last, total

        rows = [
            row("peak", self._peak),
            ("predicted peak", format_bytes(self.predicted_peak_bytes), format_bytes(largest_bytes)),
            row("swapped out", lambda step: format_bytes(step.out_bytes)),
            row("swapped in", lambda step: format_bytes(step.in_bytes)),
            row("recomputed", lambda step: f"{step.replayed_values} values, {format_seconds(step.replay_s)}"),
            row("waits for copies", lambda step: format_seconds(step.stall_s)),
            row("time in hooks", lambda step: format_seconds(step.hooks_s)),
            ("as planned", "", f"{self.steps_followed} of {self.total.steps} steps ({self.status})"),
            row("audited", self._audited),
            row("not as planned", lambda step: f"{step.fallbacks} times" if step.fallbacks else "never"),
        ]
        if self.compiled_graphs:
            rows.append(("compiled graphs", "", str(self.compiled_graphs)))
        if self.memory is not None:
            rows.append(("allocated", "", format_bytes(self.memory.allocated_bytes)))
            rows.append(("reserved", self._reserved(), format_bytes(self.memory.reserved_bytes)))
            if self.predicted_reserved_bytes is not None:
                rows.append(("predicted reserved", format_bytes(self.predicted_reserved_bytes), ""))
            if self.memory.retries:
                rows.append(("caches emptied", "", f"{self.memory.retries} times: the memory is fragmented, or full"))
        if self.arena is not None:
            rows += _arena_rows(self.arena, self.total)
        return rows + [("because", "", reason) for reason in self.total.fallback_reasons]

    def _reserved(self) -> str:
        found = self.last_step.reserved_bytes
        return "" if found is None else format_bytes(found)

    def _audited(self, step: StepReport) -> str:
        differing = f", {step.audit_differences} DIFFERED" if step.audit_differences else ""
        return f"{counted(step.audited_values, 'value')}{differing}"

    def _peak(self, step: StepReport) -> str:
        if step.peak_bytes is None:
            return "not metered"
        over = " (OVER THE BUDGET)" if step.peak_bytes > self.budget_bytes > 0 else ""
        return f"{format_bytes(step.peak_bytes)}{over}"


_HEADINGS = ("", "last step", "all steps")


def _arena_rows(arena: ArenaReport, total: StepReport) -> list[tuple[str, str, str]]:
    if arena.larger_bytes:
        return [("arena", f"not used: {format_bytes(arena.larger_bytes)} more than there is room for", "")]
    return [
        ("arena", format_bytes(arena.size_bytes), ""),
        (
            "served from it",
            f"{arena.served} blocks, {format_bytes(arena.served_bytes)}",
            format_bytes(total.served_bytes),
        ),
        *(("not served", f"{format_bytes(one.size_bytes)} in {one.layer}: {one.why}", "") for one in arena.unserved),
    ]


class Fallbacks:
    """State: the kinds that were warned of; whether nothing is to be warned of for now (``silent``), and what was not
    warned of meanwhile (``unsaid``).
    """

    def __init__(self) -> None:
        self.silent = False
        self.unsaid: dict[FallbackKind, str] = {}
        self._warned: set[FallbackKind] = set()

    def count(self, report: StepReport, kind: FallbackKind, reason: str) -> None:
        """One more of that kind, in the step of this report."""
        report.fallbacks += 1
        report.fallback_kinds[kind] = report.fallback_kinds.get(kind, 0) + 1
        if reason not in report.fallback_reasons:
            report.fallback_reasons.append(reason)
        if self.silent:
            self.unsaid.setdefault(kind, reason)
        elif kind not in self._warned:
            self._warned.add(kind)
            warn(reason)

    def say(self) -> None:
        """Warns of what was not warned of, and from now on of everything."""
        self.silent = False
        unsaid, self.unsaid = self.unsaid, {}
        self._warned.update(unsaid)
        for reason in unsaid.values():
            warn(reason)
