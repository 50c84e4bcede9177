"""Tables for the terminal: rows of a name and a value, data frames, and figures of two files side by side; and the
content of a file of any kind of this package, as rows of text and as data for ``--json``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pandas as pd
from rich.table import Table

from poochplan.errors import InputFileError
from poochplan.formats.files import one_line, read_data, write_atomic
from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.plan_set import describe
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE, writers_by_value
from poochplan.formats.run_record import RunRecord
from poochplan.peak import simulate_plan
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.streams import Lane
from poochplan.units import format_bytes, format_rate, format_seconds

Unit = Literal["", "bytes", "s", "share", "bytes/s"]
Columns = Mapping[str, str] | Iterable[str]
"""Names of columns, with or without their headings."""
_FORMATS = {"bytes": format_bytes, "s": format_seconds, "share": "{:+.2%}".format, "bytes/s": format_rate}
DECISIONS = tuple(str(decision) for decision in Decision)
UNKNOWN = "not written in this file"
Inspected = Profile | PassProfile | Plan | RunRecord
KINDS: dict[str, type[Inspected]] = {
    "profile": Profile,
    "inference": PassProfile,
    "plan": Plan,
    "run": RunRecord,
}


def table(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]], *, text: Collection[str] = ()) -> Table:
    """A table with headings. The first column and those of ``text`` are left-aligned, and their long cells wrap. The
    others are right-aligned, on one line.
    """
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for place, heading in enumerate(headings):
        is_text = heading in text
        justify: Literal["left", "right"] = "left" if is_text or place == 0 else "right"
        made.add_column(heading, justify=justify, no_wrap=not is_text, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def summary_table(title: str, rows: Mapping[str, str]) -> Table:
    """A title above rows of a name and a value."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows.items():
        made.add_row(*row)
    return made


def frame_table(title: str, frame: pd.DataFrame, columns: Columns, *, fold: bool = False) -> Table:
    """The frame with its index as first column, then these columns, with their headings or their names without units.

    Columns whose name ends in ``_bytes`` or ``_s``, and bytes of decisions, are written with their unit. With ``fold``
    long text wraps.
    """
    named = ((one, one.removesuffix("_bytes").removesuffix("_s")) for one in columns)
    headings = columns if isinstance(columns, Mapping) else dict(named)
    index = str(frame.index.name or "")
    rows = [[str(name), *(_cell(column, row[column]) for column in headings)] for name, row in frame.iterrows()]
    folded = [index, *(headings.values() if fold else ())]
    return table(title, [index, *headings.values()], rows, text=folded)


def first_rows(
    title: str, frame: pd.DataFrame, columns: Columns, rows: int, *, of: str = "", fold: bool = False
) -> list[Table]:
    """A table of the first rows of a frame, with their number in the title; none of an empty frame."""
    count = f"{min(rows, len(frame))} of {len(frame)}{of}"
    return [] if frame.empty else [frame_table(f"{title} ({count})", frame.head(rows), columns, fold=fold)]


def _cell(column: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value == 0:
        return "-"
    if not math.isfinite(value):
        return "n/a"
    unit = "bytes" if column in ("keep", "swap", "recompute") else column.rpartition("_")[2]
    if unit in ("bytes", "s"):
        return _FORMATS[unit](value)
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def write_csv(frame: pd.DataFrame, path: str | Path, *, force: bool = False) -> Path:
    """Writes the frame without its index, never over a file unless ``force``."""
    return write_atomic(path, frame.to_csv(index=False).encode(), force=force)


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows for JSON, including the index. Numbers that are not finite become None."""
    rows = frame.reset_index().to_dict("records")
    return [
        {str(name): None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        for row in rows
    ]


class Figure(NamedTuple):
    """One figure of two files: text, or a number in ``unit``. None if a file does not have it."""

    name: str
    first: str | int | float | None
    second: str | int | float | None
    unit: Unit = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The name, both figures as text, and the relative change, except for shares."""
        first, second = self.first, self.second
        change = ""
        if isinstance(first, int | float) and isinstance(second, int | float) and first and self.unit != "share":
            change = f"{second / first - 1:+.1%}"
        return self.name, self._text(first), self._text(second), change

    def _text(self, value: str | int | float | None) -> str:
        if value is None:
            return "-"
        return str(value) if isinstance(value, str) or not self.unit else _FORMATS[self.unit](value)


def figure_table(title: str, figures: Iterable[Figure], names: tuple[str, str]) -> Table:
    """One row per figure; ``names`` are those of the two files."""
    return table(title, ["", *names, "change"], [figure.cells for figure in figures], text=names)


def decisions_by_layer(plan: Plan) -> pd.DataFrame:
    """Saved bytes per layer, in columns ``keep``, ``swap`` and ``recompute``.

    Layers with most bytes not kept come first.
    """
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(DECISIONS, 0.0))
    for value in plan.saved:
        rows[value.layer or OUTSIDE][value.decision] += value.size_bytes
    frame = _frame(rows, DECISIONS, by="keep", counts=DECISIONS)
    return frame.loc[(frame["swap"] + frame["recompute"]).sort_values(ascending=False, kind="stable").index]


def _frame(
    rows: dict[str, dict[str, float]], columns: Iterable[str], *, by: str, counts: Iterable[str]
) -> pd.DataFrame:
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(columns)).rename_axis("layer")
    return frame.astype(dict.fromkeys(counts, "int64")).sort_values(by, ascending=False, kind="stable")


def overhead_by_layer(profile: Profile, plan: Plan) -> pd.DataFrame:
    """The plan's seconds in addition to the step that keeps everything: one row per layer that has any, the most
    expensive first.

    Columns: ``swap`` and ``recompute`` (bytes), ``stall_s`` (waits for copies of the layer's values), ``replay_s``
    (its values' replays), ``interference_s`` (compute slowed beside copies), ``runtime_s`` (the runtime's own work) and
    ``overhead_s``, their sum. The last two causes belong to no layer, and have the rows ``(beside copies)`` and ``(the
    runtime)``.
    """
    problem = Problem.of(profile, plan)
    simulation = simulate_plan(problem, plan)
    layer_of = {value.name: value.layer or OUTSIDE for value in plan.values}
    writers, numbers, ops = writers_by_value(profile), problem.replay.value_of, problem.profile.ops
    written_s = [sum(ops[op].duration_s for op in writers[number]) for number in numbers]
    seconds = dict(zip(problem.names, written_s, strict=True))
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
    beside_copies_s = simulation.step_s - problem.in_core_s - attributed_s - simulation.runtime_s
    if simulation.interference_s and beside_copies_s > 0:
        rows["(beside copies)"]["interference_s"] = beside_copies_s
    if simulation.runtime_s:
        rows["(the runtime)"]["runtime_s"] = simulation.runtime_s
    frame = _frame(rows, columns, by="swap", counts=("swap", "recompute"))
    frame["overhead_s"] = frame[["stall_s", "replay_s", "interference_s", "runtime_s"]].sum(axis="columns")
    return frame.sort_values("overhead_s", ascending=False, kind="stable")


def _shares(seconds: dict[str, float], label: str) -> dict[str, float]:
    """Share of a replay's seconds for each value that it brings back; ``label`` has their names."""
    part = {name: seconds[name] for name in label.split(", ")}
    total_s = sum(part.values())
    return {name: part_s / total_s if total_s else 1 / len(part) for name, part_s in part.items()}


class _AnyFile(msgspec.Struct):
    kind: str = ""


def load_any(path: str | Path) -> Inspected:
    """The profile (of a step or of a forward pass), plan or run in the file.

    Raises ``UsageError`` if there is no such file, and ``InputFileError`` if it is none of these or is invalid.
    """
    missing = "no such file; name one that pooch profile, plan or run -o wrote"
    data = read_data(Path(path), "a profile, a plan or a run", missing)
    try:
        kind = msgspec.json.decode(data, type=_AnyFile).kind
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputFileError(
            f"{path}: truncated or not JSON of this package ({one_line(error)}); expected a profile, a plan or a run"
        ) from None
    if kind not in KINDS:
        raise InputFileError(
            f"{path}: expected a file of pooch profile, pooch plan or pooch run -o, found "
            f"{f'kind {one_line(repr(kind))}' if kind else 'one that does not say its kind'}; name one of those"
        )
    return KINDS[kind].load(path)


def file_rows(found: Inspected) -> dict[str, str]:
    """The purpose of the file, its origin, and its figures."""
    if isinstance(found, RunRecord):
        rows = {"for": f"plan {found.plan_fingerprint}"}
    else:
        first = found.model.tensors[0] if found.model.tensors else OUTSIDE
        rows = {"for": f"a model of {len(found.model.tensors)} parameters and buffers, the first {first}"}
        rows["inputs"] = describe(found.inputs)
    host = found.host
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in found.versions.items()) or UNKNOWN
    rows["host"] = UNKNOWN if host is None else f"{host.processor} ({host.system}, {host.cores} cores)"
    if not isinstance(found, Plan):
        return rows | found.rows()
    rows["for"] += f", on {found.device}"
    if found.estimate:
        rows["estimate"] = "its times were not measured on the device that it is for"
    moved = sum(1 for actions in found.schedule if actions.swap_out or actions.prefetch or actions.replay)
    points = f"{len(found.saved)} saves and {len(found.uses)} uses; copies or replays begin at {moved}"
    host_tier = f"{format_bytes(found.prediction.host_bytes)} of values"
    return rows | found.rows() | {"points": points, "host tier": host_tier}


def file_data(found: Inspected) -> dict[str, Any]:
    """The file's data without single ops, values, points and blocks; plans and profiles by layer, in bytes."""
    if isinstance(found, Plan):
        kept = _without(found, "values", "handles", "uses", "schedule", "record_from_start", "layout")
        layers = plain_rows(decisions_by_layer(found))
        return kept | {"fingerprint": found.fingerprint, "decisions": decision_data(found), "layers": layers}
    if isinstance(found, Profile):
        kept = _without(found, "ops", "values", "handles", "points", "layer_times")
        counts = {"ops": len(found.ops), "values": len(found.values), "points": len(found.points)}
        return kept | {"counts": counts, "layers": plain_rows(found.to_frame("layers"))}
    return _without(found, *(("blocks", "model") if isinstance(found, PassProfile) else ()))


def decision_data(plan: Plan) -> dict[str, dict[str, int]]:
    """Number and bytes of the values of each decision."""
    return {str(one): {"values": len(sizes), "bytes": sum(sizes)} for one, sizes in plan.decided().items()}


def set_frame(plans: Sequence[Plan]) -> pd.DataFrame:
    """One row per plan of a set; the index is its inputs."""
    rows = {
        describe(plan.inputs): {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": max(plan.prediction.peak_bytes, plan.prediction.first_step_peak_bytes),
            "step_s": plan.prediction.step_s,
            "overhead": f"{plan.prediction.overhead:+.1%}",
        }
        for plan in plans
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("inputs")


def _without(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(struct, name)) for name in struct.__struct_fields__ if name not in names}
