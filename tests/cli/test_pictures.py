"""Pictures and tables: what they show is what plan, simulator, meter and sweep say, and verbs write them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

import poochplan
from poochplan.errors import OutputExistsError
from poochplan.formats.occupancy import COMPUTE, STEP, Bar, MemoryCurve, StepTrace
from poochplan.formats.profile import Profile
from poochplan.peak import explain_peak
from poochplan.planner.planning import ILP
from poochplan.planner.policies import policy_names
from poochplan.planner.sweep import CellStatus, SweepPoint, all_policies, sweep
from poochplan.report.frontier import Frontier, draw_frontier, frontier_frame, frontier_of, frontier_table
from poochplan.report.pictures import draw_decisions, draw_peak, draw_step_memory, step_memory_of, write_picture
from poochplan.report.timeline import ROWS, draw_timeline, predicted_trace, timeline_of
from tests.cli.conftest import Pooch


def outside(figure: Figure, *labels: Artist) -> list[Artist]:
    """The texts, legends and labels of a figure that are not wholly inside it, once it is drawn."""
    FigureCanvasAgg(figure).draw()
    boxes = {one: one.get_window_extent() for one in (*figure.texts, *figure.legends, *labels)}
    width, height = figure.bbox.x1, figure.bbox.y1
    return [one for one, box in boxes.items() if not (0 <= box.x0 < box.x1 <= width and 0 <= box.y0 < box.y1 <= height)]


def slower(trace: StepTrace, factor: float) -> StepTrace:
    """The same step, every phase longer, the first one most: what a measured one is to a predicted one."""
    begins = [bar.start_s for bar in trace.bars if bar.row == STEP]
    found = [*begins, trace.step_s]
    longer = np.cumsum([0.0, *(np.diff(found) * [2 * factor, *[factor] * (len(begins) - 1)])])
    phases = [bar.what for bar in trace.bars if bar.row == STEP]
    bars = [Bar(STEP, *bar) for bar in zip(phases, longer[:-1].tolist(), longer[1:].tolist(), strict=True)]
    memory = MemoryCurve(np.interp(trace.memory.times_s, found, longer), trace.memory.size_bytes)
    return StepTrace(trace.workload, "measured", trace.budget_bytes, float(longer[-1]), tuple(bars), memory)


def starts_missing(axes: Any, *starts: str) -> list[str]:
    """Those with which no label of the legend begins."""
    labels = axes.get_legend_handles_labels()[1]
    return [start for start in starts if not any(label.startswith(start) for label in labels)]


def figures(profile: Profile, plan: poochplan.Plan) -> dict[str, Figure]:
    measured = slower(predicted_trace(profile, plan), 3.0)
    taken = {"measured_peak_bytes": plan.prediction.peak_bytes, "measured_overhead": 0.07}
    return {
        "timeline": draw_timeline(timeline_of(profile, plan, **taken)),  # type: ignore[arg-type]
        "memory": draw_step_memory(step_memory_of(profile, plan, measured)),
        "memory, predicted alone": draw_step_memory(step_memory_of(profile, plan)),
        "peak": draw_peak(explain_peak(profile, plan)),
        "in-core peak": draw_peak(explain_peak(profile)),
        "decisions": draw_decisions(plan),
        "decisions of two": draw_decisions([plan, plan]),
    }


def test_a_measured_step_is_held_against_the_predicted_one_phase_by_phase(
    profile: Profile, plan: poochplan.Plan
) -> None:
    predicted = predicted_trace(profile, plan)
    shown = step_memory_of(profile, plan, slower(predicted, 3.0))
    assert shown.measured is not None
    np.testing.assert_allclose(shown.measured.times_s, predicted.memory.times_s, atol=1e-12)
    assert shown.predicted.peak_bytes == shown.measured.peak_bytes == plan.prediction.peak_bytes
    assert shown.peak.measured_peak_bytes == plan.prediction.peak_bytes
    assert [name for name, _, _ in shown.phases] == ["forward", "backward", "optimizer"]


def test_where_both_steps_have_the_same_ops_each_is_where_it_was_predicted(
    profile: Profile, plan: poochplan.Plan
) -> None:
    predicted = predicted_trace(profile, plan)

    def later(second: float) -> float:
        return second**2 / predicted.step_s + 2 * second

    bars = [Bar(bar.row, bar.what, later(bar.start_s), later(bar.end_s), bar.label) for bar in predicted.bars]
    bars.insert(3, Bar(COMPUTE, "aten.set_", bars[3].start_s, bars[3].end_s))  # the runtime's own
    ops = [bar for bar in predicted.bars if bar.row == COMPUTE and bar.what not in ("stall", "replay")]
    memory = MemoryCurve(later(predicted.memory.times_s), predicted.memory.size_bytes)
    measured = StepTrace("w", "measured", predicted.budget_bytes, later(predicted.step_s), tuple(bars), memory)
    shown = step_memory_of(profile, plan, measured)
    assert shown.measured is not None
    begins = np.searchsorted(predicted.memory.times_s, [bar.start_s for bar in ops])
    np.testing.assert_allclose(shown.measured.times_s[begins], predicted.memory.times_s[begins], rtol=1e-9, atol=1e-12)


def test_the_picture_of_memory_has_budget_both_curves_and_the_holders(profile: Profile, plan: poochplan.Plan) -> None:
    memory, kinds, layers = figures(profile, plan)["memory"].axes
    assert starts_missing(memory, "in-core peak", "budget", "predicted, peak", "measured, peak") == []
    peak = explain_peak(profile, plan)
    factor = [patch.get_width() for patch in kinds.patches]
    assert factor == list(peak.by_kind().values())[: len(factor)]
    assert next(label.get_text() for label in layers.get_yticklabels()) == next(iter(peak.by_layer()))


def test_the_bars_of_the_peak_add_up_to_it(profile: Profile, plan: poochplan.Plan) -> None:
    for peak in (explain_peak(profile, plan), explain_peak(profile)):
        for layers in (2, 99):
            (axes,) = draw_peak(peak, layers=layers).axes
            unit = {"MiB": 1 << 20, "KiB": 1 << 10}[axes.get_xlabel()[-4:-1]]
            assert sum(bar.get_width() for bar in axes.patches) * unit == pytest.approx(peak.size_bytes)


def test_the_strip_is_as_wide_as_what_is_saved_and_coloured_by_decision(plan: poochplan.Plan) -> None:
    values = [msgspec.structs.replace(value, decision="swap") for value in plan.values]
    swapped = msgspec.structs.replace(plan, values=tuple(values))
    (axes,) = draw_decisions(swapped).axes
    total_bytes = sum(value.size_bytes for value in plan.saved)
    labels = axes.get_legend_handles_labels()[1]
    assert labels[0] == "keep 0 B"
    assert labels[1] == f"swap {poochplan.units.format_bytes(total_bytes)}"
    assert axes.get_xlim()[1] * (1 << 10) == pytest.approx(total_bytes)


def test_everything_in_the_pictures_is_inside_them(profile: Profile, plan: poochplan.Plan, swept: Frontier) -> None:
    for name, figure in {**figures(profile, plan), "frontier": draw_frontier(swept)}.items():
        labels = [label for axes in figure.axes for label in (*axes.get_yticklabels(), axes.yaxis.label)]
        labels += figure.axes[0].get_xticklabels() if "decisions" in name else []
        labels += [figure.axes[0].xaxis.label] if name == "frontier" else []
        assert outside(figure, *(label for label in labels if label.get_text())) == [], name


@pytest.mark.parametrize(("policy", "rows"), [("swap-all", ROWS), ("recompute-all", ("in-core", "compute"))])
def test_a_timeline_has_a_row_for_each_stream_and_names_the_budget(
    profile: Profile, policy: str, rows: tuple[str, ...]
) -> None:
    figure = figures(profile, poochplan.plan(profile, "99.9%", policy=policy))["timeline"]
    streams, memory = figure.axes
    assert tuple(label.get_text() for label in streams.get_yticklabels()[::-1]) == rows
    drawn = "in-core, peak", "budget", "planned, peak", "measured peak", "always live"
    assert starts_missing(memory, *drawn) == []
    assert any("measured +7.0%" in text.get_text() for text in figure.texts)


def test_each_verb_draws_its_picture(pooch: Pooch) -> None:
    for verb in (
        f"show {pooch.profile}",
        f"show {pooch.plan}",
        f"plan {pooch.profile} --budget 90% --policy greedy -o p.json",
        f"simulate {pooch.profile} {pooch.plan}",
        f"run {pooch.small} --plan {pooch.plan} --profile {pooch.profile} --steps 2 --timed 1",
    ):
        assert "Wrote picture.png" in pooch.ok(verb, "--picture picture.png").out
        assert Path("picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        Path("picture.png").unlink()


def test_a_picture_is_a_real_png_and_goes_over_no_file(profile: Profile, plan: poochplan.Plan, tmp_path: Path) -> None:
    figure = figures(profile, plan)["timeline"]
    data = (path := write_picture(figure, tmp_path / "plan.png")).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1600, 896)
    assert len(data) > 20_000
    with pytest.raises(OutputExistsError):
        write_picture(figure, path)
    assert path.read_bytes() == data


def test_a_sweep_from_python_is_drawn_in_two_calls(profile: Profile) -> None:
    budgets = [int(0.8 * profile.in_core_peak_bytes), profile.in_core_peak_bytes]
    found = frontier_of(profile, sweep(profile, budgets, ["greedy", "swap-all"], processes=1))
    assert (found.policies, list(found.budgets)) == (("greedy", "swap-all"), budgets)
    assert found.smallest_budget_bytes == poochplan.smallest_budget(profile)
    assert starts_missing(draw_frontier(found).axes[0], "greedy") == []


MIB = 1 << 20
BUDGETS = (50 * MIB, 60 * MIB, 80 * MIB, 100 * MIB)


def point(policy: str, budget_bytes: int, overhead: float | None) -> SweepPoint:
    bound = overhead * 0.9 if policy == ILP and overhead else None
    found = {"policy": policy, "budget_bytes": budget_bytes, "overhead": overhead, "bound_overhead": bound}
    if overhead is None:
        return SweepPoint(feasible=False, peak_bytes=90 * MIB, step_s=None, status=CellStatus.INFEASIBLE, **found)
    return SweepPoint(feasible=True, peak_bytes=budget_bytes, step_s=1 + overhead, status=CellStatus.FITS, **found)


def frontier(overheads: dict[str, tuple[float | None, ...]]) -> Frontier:
    points = [point(policy, *at) for policy, values in overheads.items() for at in zip(BUDGETS, values, strict=True)]
    return Frontier("a network", "in-core: 100 MiB\nlink: pcie3", 100 * MIB, 60 * MIB, tuple(points))


@pytest.fixture
def swept() -> Frontier:
    overheads: dict[str, tuple[float | None, ...]] = dict.fromkeys(all_policies(), (None, 0.5, 0.3, 0.2))
    return frontier(
        overheads
        | {"ilp": (None, 0.1, 0.01, 0.0), "vdnn": (None, None, 0.4, 0.3), "keep-all": (None, None, None, 0.0)}
        | {"swap-all-on-demand": (None, 3.5, 3.5, 3.5), "recompute-all": (None, None, None, None)}
    )


def test_each_policy_is_a_line_through_its_overheads(swept: Frontier) -> None:
    shown: list[Any] = draw_frontier(swept).axes[0].get_lines()
    drawn = {str(line.get_label()): [float(y) for y in line.get_ydata()] for line in shown}
    assert drawn["ilp"][1:] == [0.1, 0.01, 0.0]
    assert drawn["swap-all-on-demand"][1:] == [3.5, 3.5, 3.5]
    assert drawn["vdnn (from 80%)"][2:] == [0.4, 0.3]
    assert drawn["proven lower bound"] == pytest.approx([0.09, 0.009])
    assert "recompute-all: finds no plan" in drawn
    assert len(drawn) == len(all_policies()) + 1


def test_a_policy_looks_the_same_in_every_picture_and_no_two_look_the_same(swept: Frontier) -> None:
    alone = frontier({"greedy": (None, 0.5, 0.3, 0.2)})
    every, one = (
        {line.get_label(): (line.get_color(), str(line.get_marker()), str(line._dash_pattern)) for line in axes.lines}  # type: ignore[attr-defined]
        for axes in (draw_frontier(shown).axes[0] for shown in (swept, alone))
    )
    assert one["greedy"] == every["greedy"]
    assert len({*every.values()}) == len(every)


def test_labels_of_a_frontier_do_not_touch(swept: Frontier) -> None:
    axes = (figure := draw_frontier(swept)).axes[0]
    FigureCanvasAgg(figure).draw()
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert not any(left.overlaps(right) for left, right in itertools.combinations(boxes, 2))
    assert axes.get_window_extent().x1 < figure.legends[0].get_window_extent().x0


def test_a_sweep_in_which_nothing_fits_is_drawn_too(tmp_path: Path) -> None:
    path = write_picture(draw_frontier(frontier({"ilp": (None,) * 4})), tmp_path / "none.png")
    assert path.stat().st_size > 10_000


def printed(shown: Frontier, width: int) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(frontier_table(shown))
    return captured.get()


def test_the_table_names_the_best_other_policy_and_the_margin() -> None:
    shown = frontier(
        {"ilp": (None, 0.1, 0.01, -1e-12), "greedy": (None, 0.12, 0.2, 0.0), "vdnn": (None, None, 0.03, 0.0)}
    )
    rows = [row.split() for row in printed(shown, 140).splitlines()[2:]]
    assert rows[0] == ["50.0", "MiB", "50.0%", "-", "-", "-", "-", "-", "any"]
    assert rows[1] == ["60.0", "MiB", "60.0%", "+10.0%", "+9.00%", "greedy", "+12.0%", "2.00", "pt", "vdnn"]
    assert rows[2] == ["80.0", "MiB", "80.0%", "+1.00%", "+0.90%", "vdnn", "+3.00%", "2.00", "pt", "-"]
    assert rows[3][3] == "+0.00%"


def test_no_name_of_a_policy_is_broken_on_a_terminal_of_100_columns() -> None:
    names = [*policy_names(), "ilp"]
    overheads = dict.fromkeys(names, (None, None, None, 0.0)) | {"ilp": (None, 0.1, 0.1, 0.0)}
    table = printed(frontier(overheads), 100)
    words = table.replace(",", " ").split()
    assert all(words.count(name) >= 2 for name in names if name != "ilp")  # no plan from: the two budgets that ilp fits
    assert not any(line.lstrip().startswith(",") for line in table.splitlines())


def test_what_there_is_no_figure_for_is_empty_in_the_frame() -> None:
    frame = frontier_frame(frontier({"ilp": (None, 0.1, 0.0, 0.0)}))
    assert list(frame["out_bytes"].isna()) == [True] * 4
    assert list(frame["overhead"].isna()) == [True, False, False, False]
    assert frame["budget_share"].tolist() == [0.5, 0.6, 0.8, 1.0]
    assert frame.to_csv(index=False).splitlines()[1].startswith("ilp,52428800,0.5,False,94371840,,,")
