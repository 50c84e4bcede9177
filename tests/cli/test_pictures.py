"""Pictures of memory and decisions: what they show is what plan, simulator and meter say, and verbs write them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

import poochplan
from poochplan.errors import OutputExistsError
from poochplan.formats.occupancy import COMPUTE, STEP, Bar, MemoryCurve, StepTrace
from poochplan.formats.profile import Profile
from poochplan.peak import explain_peak
from poochplan.planner.sweep import sweep
from poochplan.report.frontier import draw_frontier, frontier_of
from poochplan.report.pictures import draw_decisions, draw_peak, draw_step_memory, step_memory_of, write_picture
from poochplan.report.timeline import predicted_trace
from tests.cli.conftest import Pooch, outside


@pytest.fixture(scope="module")
def profile(profile_path: Path) -> Profile:
    return Profile.load(profile_path)


@pytest.fixture(scope="module")
def plan(plan_path: Path) -> poochplan.Plan:
    return poochplan.Plan.load(plan_path)


def slower(trace: StepTrace, factor: float) -> StepTrace:
    """The same step, every phase longer, the first one most: what a measured one is to a predicted one."""
    begins = [bar.start_s for bar in trace.bars if bar.row == STEP]
    found = [*begins, trace.step_s]
    longer = np.cumsum([0.0, *(np.diff(found) * [2 * factor, *[factor] * (len(begins) - 1)])])
    phases = [bar.what for bar in trace.bars if bar.row == STEP]
    bars = [Bar(STEP, *bar) for bar in zip(phases, longer[:-1].tolist(), longer[1:].tolist(), strict=True)]
    memory = MemoryCurve(np.interp(trace.memory.times_s, found, longer), trace.memory.size_bytes)
    return StepTrace(trace.workload, "measured", trace.budget_bytes, float(longer[-1]), tuple(bars), memory)


def figures(profile: Profile, plan: poochplan.Plan) -> dict[str, Figure]:
    measured = slower(predicted_trace(profile, plan), 3.0)
    return {
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
    labels = memory.get_legend_handles_labels()[1]
    for start in ("in-core peak", "budget", "predicted, peak", "measured, peak"):
        assert any(label.startswith(start) for label in labels), start
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


def test_everything_in_the_pictures_is_inside_them(profile: Profile, plan: poochplan.Plan) -> None:
    for name, figure in figures(profile, plan).items():
        labels = [label for axes in figure.axes for label in axes.get_yticklabels()]
        labels += figure.axes[0].get_xticklabels() if "decisions" in name else []
        assert outside(figure, *(label for label in labels if label.get_text())) == [], name


def test_each_verb_draws_its_picture(pooch: Pooch, small: str, profile_path: Path, plan_path: Path) -> None:
    for verb in (
        f"show {profile_path}",
        f"show {plan_path}",
        f"plan {profile_path} --budget 90% --policy greedy -o p.json",
        f"simulate {profile_path} {plan_path}",
        f"run {small} --plan {plan_path} --profile {profile_path} --steps 2 --timed 1",
    ):
        assert "Wrote picture.png" in pooch.ok(verb, "--picture picture.png").out
        assert Path("picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        Path("picture.png").unlink()


def test_a_picture_goes_over_no_file(plan: poochplan.Plan, tmp_path: Path) -> None:
    path = tmp_path / "mine.png"
    path.write_text("mine")
    with pytest.raises(OutputExistsError):
        write_picture(draw_decisions(plan), path)
    assert path.read_text() == "mine"


def test_a_sweep_from_python_is_drawn_in_two_calls(profile: Profile) -> None:
    budgets = [int(0.8 * profile.in_core_peak_bytes), profile.in_core_peak_bytes]
    found = frontier_of(profile, sweep(profile, budgets, ["greedy", "swap-all"], processes=1))
    assert (found.policies, list(found.budgets)) == (("greedy", "swap-all"), budgets)
    assert found.smallest_budget_bytes == poochplan.smallest_budget(profile)
    labels = draw_frontier(found).axes[0].get_legend_handles_labels()[1]
    assert any(label.startswith("greedy") for label in labels)
