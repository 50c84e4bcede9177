"""What differs between two plans: what they are for, what they promise, what they decide, and when they act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from poochplan.formats.plan import Plan, PlannedValue, PointActions
from poochplan.formats.plan_set import describe
from poochplan.formats.queries import OUTSIDE

from .figures import Figure, figure_data, those_that_differ

ABSENT = "-"
_ACTIONS = ("swap_out", "release", "prefetch", "replay")


class ChangedValue(NamedTuple):
    """A saved value that the plans decide about differently; ``"-"`` where a plan does not know it."""

    layer: str
    name: str
    size_bytes: int
    """The larger one, where sizes differ."""
    first: str
    second: str


class ChangedPoint(NamedTuple):
    """A point at which the plans do different things, in words."""

    at: str
    number: int
    first: str
    second: str


@dataclass(frozen=True)
class PlanDifferences:
    """Empty throughout where the plans are the same but for how long they were searched for."""

    figures: list[Figure]
    values: list[ChangedValue]
    """The largest first."""
    points: list[ChangedPoint]
    """In the order of the clock; empty where the plans are for other steps, whose points are others."""
    same_step: bool

    def __bool__(self) -> bool:
        return bool(self.figures or self.values or self.points) or not self.same_step

    def by_layer(self) -> pd.DataFrame:
        """Bytes of the changed values by layer and change, the most first: columns ``change``, ``values``, ``bytes``.

        The index is the layer.
        """
        columns = ["layer", "name", "size_bytes", "first", "second"]
        frame = pd.DataFrame([tuple(value) for value in self.values], columns=columns)
        frame["change"] = frame["first"] + " -> " + frame["second"]
        grouped = frame.groupby(["layer", "change"], sort=False)
        found = grouped.agg(values=("name", "count"), size_bytes=("size_bytes", "sum")).reset_index("change")
        return found.sort_values("size_bytes", ascending=False, kind="stable")

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "same_step": self.same_step,
            "figures": figure_data(self.figures),
            "values": [value._asdict() for value in self.values],
            "points": [point._asdict() for point in self.points],
        }


def plan_differences(first: Plan, second: Plan) -> PlanDifferences:
    """Everything that differs but seconds and rounds of the search, and notes."""
    same_step = [value.name for value in first.values] == [value.name for value in second.values] and (
        first.handles,
        first.uses,
    ) == (second.handles, second.uses)
    return PlanDifferences(
        figures=those_that_differ(_figures(first, second)),
        values=_changed_values(first, second),
        points=_changed_points(first, second) if same_step else [],
        same_step=same_step,
    )


def _figures(first: Plan, second: Plan) -> list[Figure]:
    a, b = first.prediction, second.prediction
    return [
        Figure("workload", first.workload, second.workload),
        Figure("model", first.model.fingerprint, second.model.fingerprint),
        Figure("inputs", describe(first.inputs), describe(second.inputs)),
        Figure("profile", first.profile_fingerprint, second.profile_fingerprint),
        Figure("device", first.device, second.device),
        Figure("host", _host_text(first), _host_text(second)),
        Figure("versions", _versions_text(first), _versions_text(second)),
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
        Figure("rate out", first.link.out_bytes_per_s, second.link.out_bytes_per_s, "bytes/s"),
        Figure("rate in", first.link.in_bytes_per_s, second.link.in_bytes_per_s, "bytes/s"),
        Figure("proven bound", first.solve.bound_s, second.solve.bound_s, "s"),
        Figure("policy", first.solve.policy, second.solve.policy),
    ]


def _changed_values(first: Plan, second: Plan) -> list[ChangedValue]:
    ours = {value.name: value for value in first.values}
    theirs = {value.name: value for value in second.values}
    changed = [_change(ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    found = [value for value in changed if value is not None]
    return sorted(found, key=lambda value: value.size_bytes, reverse=True)


def _change(first: PlannedValue | None, second: PlannedValue | None) -> ChangedValue | None:
    known = first or second
    assert known is not None, "a name is of a plan"
    if first is not None and second is not None and first.decision is second.decision:
        return None
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
    order = sorted({*ours, *theirs}, key=lambda place: (place[0] == "use", place[1]))
    start = ("start", 0, _record(first.record_from_start), _record(second.record_from_start))
    changed = [ChangedPoint(*start)] if start[2] != start[3] else []
    for place in order:
        a, b = _words(ours.get(place), first), _words(theirs.get(place), second)
        if a != b:
            changed.append(ChangedPoint(*place, a, b))
    return changed


def _record(is_on: bool) -> str:
    return "record on" if is_on else "nothing"


def _words(actions: PointActions | None, plan: Plan) -> str:
    """What happens at a point, values by their names."""
    if actions is None:
        return "nothing"
    done = [
        f"{what.replace('_', ' ')} {', '.join(plan.values[index].name for index in getattr(actions, what))}"
        for what in _ACTIONS
        if getattr(actions, what)
    ]
    return "; ".join([*done, *([f"record {actions.record}"] if actions.record else [])])


def _versions_text(plan: Plan) -> str:
    return ", ".join(f"{name} {version}" for name, version in plan.versions.items())


def _host_text(plan: Plan) -> str | None:
    if plan.host is None:
        return None
    return ", ".join(str(part) for part in msgspec.structs.astuple(plan.host))
