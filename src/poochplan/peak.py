"""explain_peak: the moment at which a step takes most memory, and the holders of that memory; and the simulation of a
plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from poochplan.formats.occupancy import born_ticks, ints, live_bytes
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Kind, Phase, PointKind, Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import Simulation, held_at, simulate
from poochplan.units import format_bytes

WORKSPACE, REPLAY = "workspace", "replay"
"""Kinds of holders that are no values: memory that the op takes and gives back, and all memory of one replay."""
OF_THE_MODEL = "(model and optimizer)"
"""In place of a layer: parameters and related values, whose layers a profile does not have."""
SHOWN = 5
"""Number of layers, and of values, in the text."""
_WORDS = {
    "activation": "activations",
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "input": "inputs, there before",
    "library": "held by cuBLAS between ops",
    "temporary": "temporaries",
    WORKSPACE: "workspace of the op",
    REPLAY: "a replay under way",
}
_FATES = {Decision.KEEP: "kept", Decision.SWAP: "swapped", Decision.RECOMPUTE: "recomputed"}


@dataclass(frozen=True)
class Holder:
    """One value, or the memory that the op or a replay takes in addition to values."""

    name: str
    layer: str
    """Empty outside the model."""
    kind: str
    """A ``Kind``, ``"workspace"`` or ``"replay"``."""
    size_bytes: int
    """Rounded up as by the allocator."""
    decision: str = ""
    """Decision about a saved value under a plan. The value is on the device at this moment anyway: before its copy out,
    or after its way back."""

    @property
    def where(self) -> str:
        """The layer, or words in place of one."""
        of_the_model = self.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
        return self.layer or (OF_THE_MODEL if of_the_model else OUTSIDE)

    @property
    def what(self) -> str:
        """The kind in words, with the decision."""
        fate = f", {_FATES[Decision(self.decision)]}" if self.decision else ""
        return f"{_WORDS.get(self.kind, self.kind)}{fate}"


@dataclass(frozen=True)
class PeakExplanation:
    """The first moment at which most bytes are live, in the planned or in-core step. ``str()`` gives its text."""

    workload: str
    size_bytes: int
    """The predicted peak; the holders add up to it, to the byte."""
    in_core_peak_bytes: int
    budget_bytes: int | None
    """None in-core."""
    tick: int
    tick_count: int
    phase: str
    layer: str
    """Layer of the op; empty outside the model."""
    op: str
    """Name of the op, or words for the save or use of a value between two ops."""
    holders: tuple[Holder, ...]
    """Largest first."""
    measured_peak_bytes: int | None = None

    @property
    def moment(self) -> str:
        """The moment, for example ``"backward, at aten.mm.default in layer1.0"``."""
        return f"{self.phase}, at {self.op}{f' in {self.layer}' if self.layer else ''}"

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind and decision, in words; most first."""
        found: Counter[str] = Counter()
        for holder in self.holders:
            found[holder.what] += holder.size_bytes
        return dict(found.most_common())

    def by_layer(self) -> dict[str, dict[str, int]]:
        """Bytes of each layer, by kind and decision in words; the largest layers first."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for holder in self.holders:
            found[holder.where][holder.what] += holder.size_bytes
        order = sorted(found, key=lambda layer: -found[layer].total())
        return {layer: dict(found[layer].most_common()) for layer in order}

    def lines(self) -> tuple[str, ...]:
        """The moment, then the holders: kinds, the largest layers, the largest values."""
        counts = Counter(holder.what for holder in self.holders)
        found = [self._moment()]
        for what, size_bytes in self.by_kind().items():
            found.append(_line(size_bytes, f"{what} ({counts[what]} in all)" if counts[what] > 1 else what))
        found.append("the layers that hold most of it:")
        for layer, kinds in list(self.by_layer().items())[:SHOWN]:
            parts = "; ".join(f"{what} {format_bytes(size)}" for what, size in list(kinds.items())[:2])
            found.append(_line(sum(kinds.values()), f"{layer}: {parts}"))
        found.append("the largest values:")
        found += [_line(one.size_bytes, f"{one.name} ({one.what})") for one in self.holders[:SHOWN]]
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _moment(self) -> str:
        measured = "" if self.measured_peak_bytes is None else f", measured {format_bytes(self.measured_peak_bytes)}"
        of = "in-core" if self.budget_bytes is None else f"of a budget of {format_bytes(self.budget_bytes)}"
        return f"predicted peak {format_bytes(self.size_bytes)} {of}{measured}: in {self.moment}; held by"


def explain_peak(
    profile: Profile, plan: Plan | None = None, *, measured_peak_bytes: int | None = None
) -> PeakExplanation:
    """The moment and the holders of the predicted peak, of the planned step or of the in-core one.

    Parameters
    ----------
    plan: made from this profile; None for the step with everything kept.
    measured_peak_bytes: the peak of a run, to show next to the prediction.

    Raises
    ------
    ModelMismatchError
        The plan was made from another profile.
    """
    if plan is None:
        live = live_bytes(profile)
        tick = int(np.argmax(live))
        size_bytes = int(live[tick])
        holders = list(_values(profile, range(len(profile.values)), tick))
    else:
        problem = Problem.of(profile, plan)
        profile, simulation = problem.profile, simulate_plan(problem, plan)
        tick, size_bytes = simulation.peak_tick, simulation.peak_bytes
        holders = list(_planned(problem, plan, tick))
    phase, layer, op = _moment_of(profile, tick)
    return PeakExplanation(
        workload=profile.workload,
        size_bytes=size_bytes,
        in_core_peak_bytes=profile.in_core_peak_bytes,
        budget_bytes=None if plan is None else plan.budget_bytes,
        tick=tick,
        tick_count=profile.tick_count,
        phase=phase,
        layer=layer,
        op=op,
        holders=tuple(sorted(holders, key=lambda holder: -holder.size_bytes)),
        measured_peak_bytes=measured_peak_bytes,
    )


def simulate_plan(problem: Problem, plan: Plan) -> Simulation:
    """The simulated step of the plan, with its trace; ``problem`` is :meth:`Problem.of` its profile and itself."""
    return simulate(problem, schedule_of(plan), trace=True)


def _planned(problem: Problem, plan: Plan, tick: int) -> Iterator[Holder]:
    profile, saved = problem.profile, problem.replay.value_of
    on_device, replay = held_at(problem, schedule_of(plan), tick)
    others = sorted(set(range(len(profile.values))) - set(saved))
    yield from _values(profile, others, tick)
    for place in on_device:
        value = profile.values[saved[place]]
        size_bytes = profile.rounded_bytes(value.size_bytes)
        if size_bytes:
            yield Holder(value.name, value.layer, str(value.kind), size_bytes, str(plan.values[place].decision))
    if replay is not None:
        first, *more = replay.targets
        name = f"replay of {problem.names[first]}{f' and {len(more)} more' if more else ''}"
        yield Holder(name, problem.layers[first], REPLAY, replay.peak_bytes)


def _values(profile: Profile, values: range | list[int], tick: int) -> Iterator[Holder]:
    """Values of the in-core step that are live at ``tick``, and the workspace of its op."""
    born = born_ticks(profile, values)
    freed = ints(profile.values[value].freed for value in values)
    for place in np.flatnonzero((born <= tick) & (tick <= freed)):
        value = profile.values[values[int(place)]]
        size_bytes = profile.rounded_bytes(value.size_bytes)
        if size_bytes:
            yield Holder(value.name, value.layer, str(value.kind), size_bytes)
    op = _op_at(profile, tick)
    if op is not None and profile.ops[op].workspace_bytes:
        size_bytes = profile.rounded_bytes(profile.ops[op].workspace_bytes)
        yield Holder(profile.ops[op].name, profile.ops[op].layer, WORKSPACE, size_bytes)


def _op_at(profile: Profile, tick: int) -> int | None:
    place = int(np.searchsorted(profile.op_ticks, tick))
    return place if place < len(profile.ops) and profile.op_ticks[place] == tick else None


def _moment_of(profile: Profile, tick: int) -> tuple[str, str, str]:
    """Phase, layer and op; between two ops, the save or use at that tick."""
    index = _op_at(profile, tick)
    if index is not None:
        op = profile.ops[index]
        return str(op.phase), op.layer, op.name
    point = profile.points[profile.point_ticks.index(tick)]
    value = profile.values[profile.handles[point.handle].value]
    is_save = point.kind is PointKind.SAVE
    verb = "save" if is_save else "use"
    return str(Phase.FORWARD if is_save else Phase.BACKWARD), value.layer, f"the {verb} of {value.name}"


def _line(size_bytes: int, text: str) -> str:
    return f"  {format_bytes(size_bytes):>10}  {text}"
