"""The differences of two plans, of two profiles, of two certificates, and of a plan and its run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import pandas as pd
from rich.table import Table

from poochplan.errors import UsageError
from poochplan.formats.plan import Departure, Plan, PlannedValue, PointActions
from poochplan.formats.plan_set import describe
from poochplan.formats.profile import Kind, Op, Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import Certificate, RunRecord, StepDigests

from .tables import Figure, figure_data, figure_table, frame_table, plain_rows

ABSENT = "-"
_ACTIONS = ("swap_out", "release", "prefetch", "replay")


class ChangedValue(NamedTuple):
    """A saved value with different decisions; ``"-"`` if a plan does not have the value."""

    layer: str
    name: str
    size_bytes: int
    """The larger one if sizes differ."""
    first: str
    second: str


class ChangedPoint(NamedTuple):
    """A point at which the plans have different actions, in words."""

    at: str
    number: int
    first: str
    second: str


@dataclass(frozen=True)
class PlanDifferences:
    """The differences of two plans. All fields are empty if only the time of their searches differs."""

    figures: list[Figure]
    values: list[ChangedValue]
    """The largest first."""
    points: list[ChangedPoint]
    """In the order of the clock; empty if the plans are for different steps, which have different points."""
    same_step: bool

    def __bool__(self) -> bool:
        return bool(self.figures or self.values or self.points) or not self.same_step

    def by_layer(self) -> pd.DataFrame:
        """Bytes of the changed values by layer (the index) and change, the most first.

        Columns: ``change``, ``values``, ``bytes``.
        """
        frame = pd.DataFrame(self.values, columns=list(ChangedValue._fields))
        frame["change"] = frame["first"] + " -> " + frame["second"]
        grouped = frame.groupby(["layer", "change"], sort=False)
        found = grouped.agg(values=("name", "count"), size_bytes=("size_bytes", "sum")).reset_index("change")
        return found.sort_values("size_bytes", ascending=False, kind="stable")

    def shown(self, names: tuple[str, str], rows: int) -> Iterator[Table | str]:
        """Tables and lines for a person, each of at most ``rows`` rows; ``names`` are those of the two files."""
        if self.figures:
            yield figure_table("Plans", self.figures, names)
        if self.values:
            layers = self.by_layer()
            headings = {"change": "change", "values": "values", "size_bytes": "bytes"}
            yield _first_rows("Decisions that changed, by layer", layers, headings, rows)
            values = pd.DataFrame(self.values).set_index("name")
            headings = {"layer": "layer", "first": "A", "second": "B", "size_bytes": "bytes"}
            yield _first_rows("The largest of these values", values, headings, rows)
        if self.points:
            shown = min(rows, len(self.points))
            yield f"Points at which the plans do different things ({shown} of {len(self.points)}):"
            for point in self.points[:rows]:
                yield f"  {point.at} {point.number}: {point.first}\n    then: {point.second}"
        if not self.same_step:
            yield "The plans are for steps that save or use other values: their points do not compare."

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "same_step": self.same_step,
            "figures": figure_data(self.figures),
            "values": [value._asdict() for value in self.values],
            "points": [point._asdict() for point in self.points],
        }


def plan_differences(first: Plan, second: Plan) -> PlanDifferences:
    """All differences except for notes, and seconds and rounds of the search."""
    ours, theirs = (([value.name for value in plan.values], plan.handles, plan.uses) for plan in (first, second))
    return PlanDifferences(
        figures=_those_that_differ(_plan_figures(first, second)),
        values=_changed_values(first, second),
        points=_changed_points(first, second) if ours == theirs else [],
        same_step=ours == theirs,
    )


def _plan_figures(first: Plan, second: Plan) -> list[Figure]:
    a, b = first.prediction, second.prediction
    return [
        Figure("workload", first.workload, second.workload),
        Figure("model", first.model.fingerprint, second.model.fingerprint),
        Figure("inputs", describe(first.inputs), describe(second.inputs)),
        Figure("profile", first.profile_fingerprint, second.profile_fingerprint),
        Figure("device", first.device, second.device),
        Figure("host", _text(first.host), _text(second.host)),
        Figure("versions", _text(first.versions), _text(second.versions)),
        Figure("assumed", "; ".join(first.assumed), "; ".join(second.assumed)),
        Figure("budget", first.budget_bytes, second.budget_bytes, "bytes"),
        Figure("in-core peak", a.in_core_peak_bytes, b.in_core_peak_bytes, "bytes"),
        Figure("predicted peak", a.peak_bytes, b.peak_bytes, "bytes"),
        Figure("of the first step", a.first_step_peak_bytes, b.first_step_peak_bytes, "bytes"),
        Figure("in-core step", a.in_core_step_s, b.in_core_step_s, "s"),
        Figure("predicted step", a.step_s, b.step_s, "s"),
        Figure("overhead", a.overhead, b.overhead, "share"),
        Figure("stall", a.stall_s, b.stall_s, "s"),
        Figure("replay", a.replay_s, b.replay_s, "s"),
        Figure("interference", a.interference_s, b.interference_s, "s"),
        Figure("the runtime itself", a.runtime_s, b.runtime_s, "s"),
        Figure("bytes out", a.out_bytes, b.out_bytes, "bytes"),
        Figure("bytes in", a.in_bytes, b.in_bytes, "bytes"),
        Figure("host tier", a.host_bytes, b.host_bytes, "bytes"),
        *_link_figures(first, second),
        Figure("proven bound", first.solve.bound_s, second.solve.bound_s, "s"),
        Figure("policy", first.solve.policy, second.solve.policy),
    ]


def _changed_values(first: Plan, second: Plan) -> list[ChangedValue]:
    ours = {value.name: value for value in first.values}
    theirs = {value.name: value for value in second.values}
    changed = [_change(ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    found = [value for value in changed if value.first != value.second]
    return sorted(found, key=lambda value: value.size_bytes, reverse=True)


def _change(first: PlannedValue | None, second: PlannedValue | None) -> ChangedValue:
    known = first or second
    assert known is not None, "a name is of a plan"
    return ChangedValue(
        layer=known.layer or OUTSIDE,
        name=known.name,
        size_bytes=max(value.size_bytes for value in (first, second) if value is not None),
        first=ABSENT if first is None else str(first.decision),
        second=ABSENT if second is None else str(second.decision),
    )


def _changed_points(first: Plan, second: Plan) -> list[ChangedPoint]:
    ours = {(actions.at, actions.index): actions for actions in first.schedule}
    theirs = {(actions.at, actions.index): actions for actions in second.schedule}
    recorded = ["record on" if plan.record_from_start else "nothing" for plan in (first, second)]
    points = [ChangedPoint("start", 0, *recorded)]
    for place in sorted({*ours, *theirs}, key=lambda place: (place[0] == "use", place[1])):
        points.append(ChangedPoint(*place, _words(ours.get(place), first), _words(theirs.get(place), second)))
    return [point for point in points if point.first != point.second]


def _words(actions: PointActions | None, plan: Plan) -> str:
    """The actions at a point, with the names of values."""
    if actions is None:
        return "nothing"
    done = [
        f"{what.replace('_', ' ')} {', '.join(plan.values[index].name for index in getattr(actions, what))}"
        for what in _ACTIONS
        if getattr(actions, what)
    ]
    return "; ".join([*done, *([f"record {actions.record}"] if actions.record else [])])


@dataclass(frozen=True)
class ProfileDifferences:
    """The differences of two profiles. Two profiles of one step differ only in times."""

    figures: list[Figure]
    first_op: str
    """The first op that differs; empty if both steps dispatch the same ops."""
    layers: pd.DataFrame
    """Layers that differ, the largest change of seconds first. Columns: ``saved_bytes`` and ``step_s`` of the first
    profile, ``then_bytes`` and ``then_s`` of the second."""

    def __bool__(self) -> bool:
        return bool(self.figures or self.first_op or len(self.layers))

    def shown(self, names: tuple[str, str], rows: int) -> Iterator[Table | str]:
        """Tables and lines for a person, each of at most ``rows`` rows; ``names`` are those of the two files."""
        if self.figures:
            yield figure_table("Profiles", self.figures, names)
        if self.first_op:
            yield f"The steps part at {self.first_op}"
        if len(self.layers):
            headings = {"saved_bytes": "A saves", "then_bytes": "B saves", "step_s": "A takes", "then_s": "B takes"}
            yield _first_rows("Layers, by the change of their seconds", self.layers, headings, rows)

    def data(self) -> dict[str, Any]:
        """For JSON."""
        figures = figure_data(self.figures)
        return {"figures": figures, "first_op": self.first_op, "layers": plain_rows(self.layers)}


def profile_differences(first: Profile, second: Profile) -> ProfileDifferences:
    """All differences except for notes and the times of single ops."""
    figures = _those_that_differ(_profile_figures(first, second))
    return ProfileDifferences(figures, _first_op(first, second), _changed_layers(first, second))


def _profile_figures(first: Profile, second: Profile) -> list[Figure]:
    a, b = first.times, second.times
    return [
        Figure("workload", first.workload, second.workload),
        Figure("model", first.model.fingerprint, second.model.fingerprint),
        Figure("inputs", describe(first.inputs), describe(second.inputs)),
        Figure("mode", first.mode, second.mode),
        Figure("device", first.device.name, second.device.name),
        Figure("threads", first.device.threads, second.device.threads),
        Figure("host", _text(first.host), _text(second.host)),
        Figure("versions", _text(first.versions), _text(second.versions)),
        Figure("in-core peak", first.in_core_peak_bytes, second.in_core_peak_bytes, "bytes"),
        Figure("in layer", first.in_core_peak_layer, second.in_core_peak_layer),
        Figure("saved for backward", _saved_bytes(first), _saved_bytes(second), "bytes"),
        Figure("live all step long", sum(first.static_bytes.values()), sum(second.static_bytes.values()), "bytes"),
        Figure("ops", len(first.ops), len(second.ops)),
        Figure("saves and uses", len(first.points), len(second.points)),
        Figure("step", a.step_s, b.step_s, "s"),
        Figure("its spread", a.spread_s, b.spread_s, "s"),
        Figure("forward", a.forward_s, b.forward_s, "s"),
        Figure("backward", a.backward_s, b.backward_s, "s"),
        Figure("optimizer", a.optimizer_s, b.optimizer_s, "s"),
        *_link_figures(first, second),
        Figure("assumed", "; ".join(first.assumed), "; ".join(second.assumed)),
    ]


def _first_op(first: Profile, second: Profile) -> str:
    for index, (ours, theirs) in enumerate(zip_longest(first.ops, second.ops)):
        if ours is None or theirs is None or (ours.name, ours.layer) != (theirs.name, theirs.layer):
            return f"op {index}: {_op_text(ours)}, then {_op_text(theirs)}"
    return ""


def _op_text(op: Op | None) -> str:
    return "no op" if op is None else f"{op.name} in {op.layer or 'the step, outside the model'} ({op.phase})"


def _changed_layers(first: Profile, second: Profile) -> pd.DataFrame:
    ours, theirs = (_layer_frame(profile) for profile in (first, second))
    frame = pd.concat([ours, theirs.set_axis(["then_bytes", "then_s"], axis=1)], axis=1).fillna(0.0)
    frame = frame[["saved_bytes", "then_bytes", "step_s", "then_s"]].rename_axis("layer")
    changed = frame[(frame["saved_bytes"] != frame["then_bytes"]) | (frame["step_s"] != frame["then_s"])]
    by_change = (changed["then_s"] - changed["step_s"]).abs().sort_values(ascending=False, kind="stable")
    return changed.loc[by_change.index]


def _layer_frame(profile: Profile) -> pd.DataFrame:
    frame = profile.to_frame("layers")
    step_s = frame["forward_s"] + frame["backward_s"]
    return pd.DataFrame({"saved_bytes": frame["saved_bytes"].astype(float), "step_s": step_s})


def _saved_bytes(profile: Profile) -> int:
    return sum(value.size_bytes for value in profile.values if value.kind is Kind.ACTIVATION)


@dataclass(frozen=True)
class RunDifferences:
    """A plan's predictions and the measurements of its run. Bytes and seconds always differ a little. The run counts as
    different if it diverged, exceeded the budget, or lost the bits of in-core steps.
    """

    run: RunRecord
    figures: list[Figure]

    def __bool__(self) -> bool:
        run = self.run
        return bool(run.is_over or run.fallback_reasons or run.departures or run.difference)

    def shown(self, names: tuple[str, str], rows: int) -> Iterator[Table | str]:
        """Tables and lines for a person; the table of departures has at most ``rows`` rows."""
        run, over = self.run, ": OVER THE BUDGET" if self.run.is_over else ""
        yield figure_table(f"Plan and run of {run.workload}{over}", self.figures, ("promised", "found"))
        if run.departures:
            headings = {name: name for name in ("step", "layer", "planned", "found")}
            frame = pd.DataFrame([_departure_row(one) for one in run.departures]).set_index("point")
            yield _first_rows("Where steps left the plan", frame, headings, rows, fold=True)
        yield from (f"Not followed: {reason}" for reason in run.fallback_reasons)
        yield from (f"Note: {what}" for what in (run.contradiction, run.difference) if what)

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "figures": figure_data(self.figures),
            "over_budget": self.run.is_over,
            "departures": msgspec.to_builtins(self.run.departures),
            "reasons": list(self.run.fallback_reasons),
            "contradiction": self.run.contradiction,
            "difference": self.run.difference,
        }


def run_differences(plan: Plan, run: RunRecord) -> RunDifferences:
    """Compares the run with its plan. Raises ``UsageError`` if the run followed another plan."""
    if run.plan_fingerprint != plan.fingerprint:
        raise UsageError(
            f"expected a run of this plan ({plan.fingerprint}), found one of plan {run.plan_fingerprint}; name the "
            "plan that pooch run was given"
        )
    promised = plan.prediction
    figures = [
        Figure("budget, peak", plan.budget_bytes, run.measured_peak_bytes, "bytes"),
        Figure("peak", run.predicted_peak_bytes, run.measured_peak_bytes, "bytes"),
        Figure("step", promised.step_s, run.planned_step_s, "s"),
        Figure("in-core step", promised.in_core_step_s, run.in_core_step_s, "s"),
        Figure("overhead", promised.overhead, run.measured_overhead, "share"),
        Figure("stall", promised.stall_s, run.stall_s, "s"),
        Figure("replay", promised.replay_s, run.replay_s, "s"),
        Figure("bytes out", promised.out_bytes, run.out_bytes, "bytes"),
        Figure("bytes in", promised.in_bytes, run.in_bytes, "bytes"),
    ]
    return RunDifferences(run, figures)


@dataclass(frozen=True)
class CertificateDifferences:
    """The differences of two runs' digests. Versions, machine, seed and settings may differ too."""

    figures: list[Figure]
    difference: str
    """Step, kind and name of the first digest that differs; empty if all are the same."""
    compared_steps: int

    def __bool__(self) -> bool:
        return bool(self.difference)

    def shown(self, names: tuple[str, str], rows: int) -> Iterator[Table | str]:
        """A table of the other differences, and a line."""
        if self.figures:
            yield figure_table("Certificates", self.figures, names)
        yield self.difference or f"All digests of {self.compared_steps} steps are the same."

    def data(self) -> dict[str, Any]:
        """For JSON."""
        figures = figure_data(self.figures)
        return {"figures": figures, "difference": self.difference, "compared_steps": self.compared_steps}


def certificate_differences(first: Certificate, second: Certificate) -> CertificateDifferences:
    """Compares the planned steps of both one by one; without planned steps, the in-core ones."""
    figures = [
        Figure("plan", first.plan_fingerprint, second.plan_fingerprint),
        Figure("seed", first.seed, second.seed),
        Figure("versions", _text(first.versions), _text(second.versions)),
        Figure("host", _text(first.host), _text(second.host)),
        *(
            Figure(name, first.flags.get(name, ABSENT), second.flags.get(name, ABSENT))
            for name in sorted({*first.flags, *second.flags})
        ),
    ]
    pairs = list(zip(first.steps, second.steps, strict=False))
    found = (f"step {n}: {what} differs" for n, (a, b) in enumerate(pairs) if (what := _first_digest(a, b)))
    counts = f"{len(first.steps)} steps against {len(second.steps)}" if len(first.steps) != len(second.steps) else ""
    return CertificateDifferences(_those_that_differ(figures), next(found, counts), len(pairs))


def _first_digest(first: StepDigests, second: StepDigests) -> str:
    """Kind and name of the first digest that differs; empty if none does."""
    if first.loss != second.loss:
        return "loss"
    for kind in ("gradients", "buffers", "parameters", "generators"):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        for name in (*ours, *theirs):
            if ours.get(name) != theirs.get(name):
                return f"{kind.removesuffix('s')} {name}"
    return ""


def _departure_row(one: Departure) -> dict[str, str]:
    return {
        "point": f"{one.at} {one.index}",
        "step": str(one.step),
        "layer": (one.layer or OUTSIDE) if one.value else "-",
        "planned": f"{one.value}: {one.planned}" if one.value else one.planned,
        "found": one.found,
    }


def _those_that_differ(figures: Iterable[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.first != figure.second]


def _link_figures(first: Plan | Profile, second: Plan | Profile) -> tuple[Figure, Figure]:
    ours, theirs = first.link, second.link
    return (
        Figure("rate out", ours.out_bytes_per_s, theirs.out_bytes_per_s, "bytes/s"),
        Figure("rate in", ours.in_bytes_per_s, theirs.in_bytes_per_s, "bytes/s"),
    )


def _first_rows(title: str, frame: pd.DataFrame, headings: dict[str, str], rows: int, *, fold: bool = False) -> Table:
    """The first rows of a frame, with their number in the title."""
    return frame_table(f"{title} ({min(rows, len(frame))} of {len(frame)})", frame.head(rows), headings, fold=fold)


def _text(facts: msgspec.Struct | dict[str, str] | None) -> str | None:
    if facts is None:
        return None
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(facts).items())
