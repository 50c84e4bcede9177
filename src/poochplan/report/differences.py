"""The differences of two plans, of two profiles, and of a plan and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec
import pandas as pd
from rich.table import Table

from poochplan.errors import UsageError
from poochplan.formats.plan import Departure, Plan, PlannedValue, PointActions
from poochplan.formats.plan_set import describe
from poochplan.formats.profile import Kind, Op, Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import RunRecord

from .tables import Figure, Inspected, Unit, figure_table, first_rows, plain_rows

ABSENT = "-"
_ACTIONS = ("swap_out", "release", "prefetch", "replay")
Fact = tuple[str, str | int | float | None, Unit]
"""Name, text or number, and its unit; None where a file does not say."""
Section = str | Callable[[int], Iterable[Table | str]]
"""What a person reads; some are of at most so many rows."""


@dataclass(frozen=True)
class Differences:
    """What differs between two files: True where anything does."""

    differ: bool
    title: str
    figures: list[Figure]
    parts: list[Section]
    """Shown behind the figures."""
    data: dict[str, Any]
    """For JSON, beside the figures."""
    names: tuple[str, str] | None = None
    """Of the two figures; those of the files where it is None."""

    def __bool__(self) -> bool:
        return self.differ

    def shown(self, names: tuple[str, str], rows: int) -> Iterator[Table | str]:
        """Tables and lines for a person, each of at most ``rows`` rows; ``names`` are those of the two files."""
        if self.figures:
            yield figure_table(self.title, self.figures, self.names or names)
        for part in self.parts:
            yield from [part] if isinstance(part, str) else part(rows)


def differences(first: Inspected, second: Inspected) -> Differences:
    """Everything that differs between two plans or profiles, or between a plan and a run of it.

    Of plans not seconds and rounds of the search, and notes; of profiles not notes and the times of single ops. Two
    profiles of one step differ in times, and always do unless one is a copy. A run differs from its plan where it left
    the plan, its budget or the bits of in-core steps: bytes and seconds never agree to the digit.

    Raises
    ------
    UsageError
        The files do not compare, or the run followed another plan.
    """
    match first, second:
        case Plan(), Plan():
            return _of_plans(first, second)
        case Profile(), Profile():
            return _of_profiles(first, second)
        case Plan(), RunRecord():
            return _of_run(first, second)
        case RunRecord(), Plan():
            return _of_run(second, first)
    raise UsageError(
        f"expected two plans, two profiles, or a plan and a run of it, found a {first.kind} and a {second.kind}"
    )


def _of_plans(first: Plan, second: Plan) -> Differences:
    is_same_step = _saved_and_used(first) == _saved_and_used(second)
    is_comparable = is_same_step and [one.name for one in first.values] == [one.name for one in second.values]
    figures, values = _figures(_plan_facts(first), _plan_facts(second)), _changed_values(first, second)
    points = _changed_points(first, second) if is_comparable else []
    parts: list[Section] = []
    if values:
        frame = pd.DataFrame(values)
        headings = {"change": "change", "values": "values", "size_bytes": "bytes"}
        changes = frame.assign(change=frame["first"] + " -> " + frame["second"])
        grouped = changes.groupby(["layer", "change"], sort=False)
        by_layer = grouped.agg(values=("name", "count"), size_bytes=("size_bytes", "sum")).reset_index("change")
        by_layer = by_layer.sort_values("size_bytes", ascending=False, kind="stable")
        parts.append(partial(first_rows, "Decisions that changed, by layer", by_layer, headings))
        headings = {"layer": "layer", "first": "A", "second": "B", "size_bytes": "bytes"}
        parts.append(partial(first_rows, "The largest of these values", frame.set_index("name"), headings))
    if points:
        parts.append(partial(_points_text, points))
    if not is_same_step:
        parts.append("The plans are for steps that save or use other values: their points do not compare.")
    elif not is_comparable:
        parts.append("The plans decide about other sources: their points do not compare.")
    data = {"same_step": is_same_step, "values": values, "points": points}
    return Differences(bool(figures or parts), "Plans", figures, parts, data)


def _saved_and_used(plan: Plan) -> tuple[list[str], list[str], list[int]]:
    """The names of the values that the step saves, that of each handle, and the handles used, all without sources."""
    handles = [number for number, value in enumerate(plan.handles) if not plan.values[value].source]
    place = {number: index for index, number in enumerate(handles)}
    packed = [plan.values[plan.handles[number]].name for number in handles]
    return [value.name for value in plan.saved], packed, [place[number] for number in plan.uses]


def _plan_facts(plan: Plan) -> list[Fact]:
    promised = plan.prediction
    return [
        *_common_facts(plan),
        ("profile", plan.profile_fingerprint, ""),
        ("device", plan.device, ""),
        ("budget", plan.budget_bytes, "bytes"),
        ("in-core peak", promised.in_core_peak_bytes, "bytes"),
        ("predicted peak", promised.peak_bytes, "bytes"),
        ("of the first step", promised.first_step_peak_bytes, "bytes"),
        ("in-core step", promised.in_core_step_s, "s"),
        ("predicted step", promised.step_s, "s"),
        ("overhead", promised.overhead, "share"),
        ("stall", promised.stall_s, "s"),
        ("replay", promised.replay_s, "s"),
        ("interference", promised.interference_s, "s"),
        ("the runtime itself", promised.runtime_s, "s"),
        ("bytes out", promised.out_bytes, "bytes"),
        ("bytes in", promised.in_bytes, "bytes"),
        ("host tier", promised.host_bytes, "bytes"),
        ("optimizer state there", promised.state_bytes, "bytes"),
        ("optimizer state's copies", promised.state_s, "s"),
        ("proven bound", plan.solve.bound_s, "s"),
        ("policy", plan.solve.policy, ""),
    ]


def _common_facts(found: Plan | Profile) -> list[Fact]:
    return [
        ("workload", found.workload, ""),
        ("model", found.model.fingerprint, ""),
        ("inputs", describe(found.inputs), ""),
        ("host", _text(found.host), ""),
        ("versions", _text(found.versions), ""),
        ("assumed", "; ".join(found.assumed), ""),
        ("rate out", found.link.out_bytes_per_s, "bytes/s"),
        ("rate in", found.link.in_bytes_per_s, "bytes/s"),
    ]


def _changed_values(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """The values that the plans decide about differently, the largest first."""
    ours, theirs = (
        {value.name: value for value in plan.values if not value.source or value.until >= 0} for plan in (first, second)
    )
    changed = [_change(ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    found = [value for value in changed if value["first"] != value["second"]]
    return sorted(found, key=lambda value: value["size_bytes"], reverse=True)


def _change(first: PlannedValue | None, second: PlannedValue | None) -> dict[str, Any]:
    """``"-"`` where a plan does not know the value; the larger size where sizes differ."""
    known = first or second
    assert known is not None, "a name is of a plan"
    return {
        "layer": known.layer or OUTSIDE,
        "name": known.name,
        "size_bytes": max(value.size_bytes for value in (first, second) if value is not None),
        "first": ABSENT if first is None else str(first.decision),
        "second": ABSENT if second is None else str(second.decision),
    }


def _changed_points(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """The points at which the plans do different things, in words, in the order of the clock."""
    ours = {(actions.at, actions.index): actions for actions in first.schedule}
    theirs = {(actions.at, actions.index): actions for actions in second.schedule}
    said = {("start", 0): ["record on" if plan.record_from_start else "nothing" for plan in (first, second)]}
    for place in sorted({*ours, *theirs}, key=lambda place: (place[0] == "use", place[1])):
        said[place] = [_words(ours.get(place), first), _words(theirs.get(place), second)]
    return [
        {"at": at, "number": number, "first": one, "second": other}
        for (at, number), (one, other) in said.items()
        if one != other
    ]


def _points_text(points: list[dict[str, Any]], rows: int) -> list[str]:
    lines = [f"Points at which the plans do different things ({min(rows, len(points))} of {len(points)}):"]
    lines += ["  {at} {number}: {first}\n    then: {second}".format(**point) for point in points[:rows]]
    return ["\n".join(lines)]


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


def _of_profiles(first: Profile, second: Profile) -> Differences:
    figures = _figures(_profile_facts(first), _profile_facts(second))
    op, layers = _first_op(first, second), _changed_layers(first, second)
    parts: list[Section] = []
    if op:
        parts.append(f"The steps part at {op}")
    if len(layers):
        headings = {"saved_bytes": "A saves", "then_bytes": "B saves", "step_s": "A takes", "then_s": "B takes"}
        parts.append(partial(first_rows, "Layers, by the change of their seconds", layers, headings))
    data = {"first_op": op, "layers": plain_rows(layers)}
    return Differences(bool(figures or parts), "Profiles", figures, parts, data)


def _profile_facts(profile: Profile) -> list[Fact]:
    times = profile.times
    saved_bytes = sum(value.size_bytes for value in profile.values if value.kind is Kind.ACTIVATION)
    return [
        *_common_facts(profile),
        ("mode", profile.mode, ""),
        ("device", profile.device.name, ""),
        ("threads", profile.device.threads, ""),
        ("in-core peak", profile.in_core_peak_bytes, "bytes"),
        ("in layer", profile.in_core_peak_layer, ""),
        ("saved for backward", saved_bytes, "bytes"),
        ("live all step long", sum(profile.static_bytes.values()), "bytes"),
        ("ops", len(profile.ops), ""),
        ("saves and uses", len(profile.points), ""),
        ("step", times.step_s, "s"),
        ("its spread", times.spread_s, "s"),
        ("forward", times.forward_s, "s"),
        ("backward", times.backward_s, "s"),
        ("optimizer", times.optimizer_s, "s"),
    ]


def _first_op(first: Profile, second: Profile) -> str:
    """Where the steps part: the first op that is another; empty where they dispatch the same."""
    for index, (ours, theirs) in enumerate(zip_longest(first.ops, second.ops)):
        if ours is None or theirs is None or (ours.name, ours.layer) != (theirs.name, theirs.layer):
            return f"op {index}: {_op_text(ours)}, then {_op_text(theirs)}"
    return ""


def _op_text(op: Op | None) -> str:
    return "no op" if op is None else f"{op.name} in {op.layer or 'the step, outside the model'} ({op.phase})"


def _changed_layers(first: Profile, second: Profile) -> pd.DataFrame:
    """Layers that differ, the largest change of seconds first: ``saved_bytes`` and ``step_s`` of the first profile,
    ``then_bytes`` and ``then_s`` of the second.
    """
    ours, theirs = (profile.to_frame("layers") for profile in (first, second))
    columns = {"saved_bytes": ours["saved_bytes"], "then_bytes": theirs["saved_bytes"]}
    columns |= {"step_s": ours["forward_s"] + ours["backward_s"], "then_s": theirs["forward_s"] + theirs["backward_s"]}
    frame = pd.concat(columns, axis=1).astype(float).fillna(0.0).rename_axis("layer")
    changed = frame[(frame["saved_bytes"] != frame["then_bytes"]) | (frame["step_s"] != frame["then_s"])]
    by_change = (changed["then_s"] - changed["step_s"]).abs().sort_values(ascending=False, kind="stable")
    return changed.loc[by_change.index]


def _of_run(plan: Plan, run: RunRecord) -> Differences:
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
    parts: list[Section] = []
    if run.departures:
        frame = pd.DataFrame([_departure_row(one) for one in run.departures]).set_index("point")
        columns = ("step", "layer", "planned", "found")
        parts.append(partial(first_rows, "Where steps left the plan", frame, columns, fold=True))
    parts += [f"Not followed: {reason}" for reason in run.fallback_reasons]
    parts += [f"Note: {what}" for what in (run.contradiction, run.difference) if what]
    data = {
        "over_budget": run.is_over,
        "departures": msgspec.to_builtins(run.departures),
        "reasons": list(run.fallback_reasons),
        "contradiction": run.contradiction,
        "difference": run.difference,
    }
    differ = bool(run.is_over or run.fallback_reasons or run.departures or run.difference)
    title = f"Plan and run of {run.workload}{': OVER THE BUDGET' if run.is_over else ''}"
    return Differences(differ, title, figures, parts, data, names=("promised", "found"))


def _departure_row(one: Departure) -> dict[str, str]:
    return {
        "point": f"{one.at} {one.index}",
        "step": str(one.step),
        "layer": (one.layer or OUTSIDE) if one.value else "-",
        "planned": f"{one.value}: {one.planned}" if one.value else one.planned,
        "found": one.found,
    }


def _figures(ours: Sequence[Fact], theirs: Sequence[Fact]) -> list[Figure]:
    """Those that differ, of the same facts of two files."""
    pairs = zip(ours, theirs, strict=True)
    return [Figure(name, first, second, unit) for (name, first, unit), (_, second, _) in pairs if first != second]


def _text(facts: msgspec.Struct | dict[str, str] | None) -> str | None:
    if facts is None:
        return None
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(facts).items())
