"""Frames with one row per layer: what a plan decides there, and where its overhead comes from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pandas as pd

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE, saved_values, writers_by_value
from poochplan.peak import simulate_plan
from poochplan.planner.simulator.streams import Lane
from poochplan.planner.whatif import as_followed

DECISIONS = tuple(str(decision) for decision in Decision)


def decisions_by_layer(plan: Plan) -> pd.DataFrame:
    """Bytes per layer, most that are not kept first: columns ``keep``, ``swap`` and ``recompute``."""
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(DECISIONS, 0.0))
    for value in plan.values:
        rows[value.layer or OUTSIDE][value.decision] += value.size_bytes
    frame = _frame(rows, DECISIONS, by="keep", counts=DECISIONS)
    return frame.loc[(frame["swap"] + frame["recompute"]).sort_values(ascending=False, kind="stable").index]


def decision_totals(plan: Plan) -> pd.DataFrame:
    """``values`` and ``size_bytes`` of each decision; the index is the decision."""
    rows = {str(one): {"values": len(sizes), "size_bytes": sum(sizes)} for one, sizes in plan.decided().items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def _frame(
    rows: dict[str, dict[str, float]], columns: Iterable[str], *, by: str, counts: Iterable[str]
) -> pd.DataFrame:
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(columns)).rename_axis("layer")
    return frame.astype(dict.fromkeys(counts, "int64")).sort_values(by, ascending=False, kind="stable")


def overhead_by_layer(profile: Profile, plan: Plan) -> pd.DataFrame:
    """What the plan costs beside the ops of the step that keeps everything: one row per layer that costs anything, the
    most expensive first.

    Columns: ``swap`` and ``recompute`` (bytes), ``stall_s`` (compute waits for copies of the layer's values),
    ``replay_s`` (its values' replays), ``interference_s`` (the rest of compute runs slower beside copies),
    ``runtime_s`` (what the runtime itself takes) and ``overhead_s``, their sum. The last two causes belong to no layer
    and have rows of their own, ``(beside copies)`` and ``(the runtime)``.
    """
    simulation = simulate_plan(profile, plan)
    layer_of = {value.name: value.layer or OUTSIDE for value in plan.values}
    seconds, in_core_s = _writing_seconds(profile), sum(op.duration_s for op in as_followed(profile, plan).ops)
    columns = ("swap", "recompute", "stall_s", "replay_s", "interference_s", "runtime_s")
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(columns, 0.0))
    for value in plan.values:
        if value.decision is not Decision.KEEP:
            rows[value.layer or OUTSIDE][value.decision] += value.size_bytes
    for span in simulation.trace:
        if span.lane is Lane.STALL:
            rows[layer_of[span.label]]["stall_s"] += span.end_s - span.start_s
        elif span.lane is Lane.REPLAY:
            for name, share in _shares(seconds, span.label).items():
                rows[layer_of[name]]["replay_s"] += share * (span.end_s - span.start_s)
    attributed_s = sum(row["stall_s"] + row["replay_s"] for row in rows.values())
    beside_copies_s = simulation.step_s - in_core_s - attributed_s - simulation.runtime_s
    if simulation.interference_s and beside_copies_s > 0:
        rows["(beside copies)"]["interference_s"] = beside_copies_s
    if simulation.runtime_s:
        rows["(the runtime)"]["runtime_s"] = simulation.runtime_s
    frame = _frame(rows, columns, by="swap", counts=("swap", "recompute"))
    frame["overhead_s"] = frame[["stall_s", "replay_s", "interference_s", "runtime_s"]].sum(axis="columns")
    return frame.sort_values("overhead_s", ascending=False, kind="stable")


def _writing_seconds(profile: Profile) -> dict[str, float]:
    """Seconds of the ops that write each saved value, by the value's name."""
    writers = writers_by_value(profile)
    return {
        profile.values[index].name: sum(profile.ops[op].duration_s for op in writers[index])
        for index in saved_values(profile)
    }


def _shares(seconds: dict[str, float], label: str) -> dict[str, float]:
    """Share of a replay that each of the values it brings back takes; ``label`` is their names."""
    part = {name: seconds[name] for name in label.split(", ")}
    total_s = sum(part.values())
    return {name: part_s / total_s if total_s else 1 / len(part) for name, part_s in part.items()}
