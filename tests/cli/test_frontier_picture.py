"""The picture and the table of a sweep say what its points say."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from poochplan.planner.planning import ILP
from poochplan.planner.policies import policy_names
from poochplan.planner.sweep import CellStatus, SweepPoint, all_policies
from poochplan.report.frontier import Frontier, draw_frontier, frontier_frame, frontier_table
from poochplan.report.pictures import write_picture
from tests.cli.conftest import outside

MIB = 1 << 20
BUDGETS = (50 * MIB, 60 * MIB, 80 * MIB, 100 * MIB)


def point(policy: str, budget_bytes: int, overhead: float | None, bound: float | None = None) -> SweepPoint:
    feasible = overhead is not None
    return SweepPoint(
        policy=policy,
        budget_bytes=budget_bytes,
        feasible=feasible,
        peak_bytes=budget_bytes if feasible else 90 * MIB,
        step_s=None if overhead is None else 1 + overhead,
        overhead=overhead,
        bound_overhead=bound,
        status=CellStatus.FITS if feasible else CellStatus.INFEASIBLE,
    )


def frontier(overheads: dict[str, tuple[float | None, ...]]) -> Frontier:
    points = [
        point(policy, budget, overhead, overhead * 0.9 if policy == ILP and overhead else None)
        for policy, values in overheads.items()
        for budget, overhead in zip(BUDGETS, values, strict=True)
    ]
    return Frontier("a network", "in-core: 100 MiB\nlink: pcie3", 100 * MIB, 60 * MIB, tuple(points))


@pytest.fixture
def swept() -> Frontier:
    overheads: dict[str, tuple[float | None, ...]] = dict.fromkeys(all_policies(), (None, 0.5, 0.3, 0.2))
    return frontier(
        overheads
        | {"ilp": (None, 0.1, 0.01, 0.0), "vdnn": (None, None, 0.4, 0.3), "keep-all": (None, None, None, 0.0)}
        | {"swap-all-on-demand": (None, 3.5, 3.5, 3.5), "recompute-all": (None, None, None, None)}
    )


def lines(figure: Figure) -> dict[str, list[float]]:
    return {str(line.get_label()): [float(y) for y in line.get_ydata()] for line in figure.axes[0].get_lines()}  # type: ignore[union-attr]


def test_each_policy_is_a_line_through_its_overheads(swept: Frontier) -> None:
    drawn = lines(draw_frontier(swept))
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


def test_everything_in_the_picture_is_inside_it_and_labels_do_not_touch(swept: Frontier) -> None:
    axes = (figure := draw_frontier(swept)).axes[0]
    assert outside(figure, *axes.get_yticklabels(), axes.yaxis.label, axes.xaxis.label) == []
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert not any(left.overlaps(right) for index, left in enumerate(boxes) for right in boxes[index + 1 :])
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
