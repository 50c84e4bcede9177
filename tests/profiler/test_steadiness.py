"""Timed steps that say nothing are timed again, and then refused; ordinary noise and tiny steps are left alone."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import torch

from poochplan.errors import StepError
from poochplan.formats.profile import LayerTimes, Phase, Profile
from poochplan.planner.whatif import for_machine
from poochplan.profiler.assembly.reconcile import PhaseSeconds, Reconciled, contradicted, is_doubted, reconcile, steady
from tests.runtime.nets import Residual, taken
from tests.runtime.served import needs_compiler

F, B, OPT = Phase


def steps(*milliseconds: float) -> list[PhaseSeconds]:
    """Steps of that many milliseconds, half of each in backward."""
    return [{F: 0.0004 * ms, B: 0.0005 * ms, OPT: 0.0001 * ms} for ms in milliseconds]


QUIET = steps(70, 71, 69, 70, 72)


@pytest.mark.parametrize(
    "noisy",
    [
        pytest.param((67, 70, 66, 68, 67), id="quiet"),
        pytest.param((67, 90, 66, 75, 95), id="ordinary noise"),
        pytest.param((67, 66, 979, 68, 67), id="one step that stumbled"),
        pytest.param((104, 100, 99, 101, 98), id="all of it slower by less than half"),
    ],
)
def test_steps_that_agree_are_taken_as_they_are(noisy: tuple[float, ...]) -> None:
    assert not is_doubted(steps(*noisy), QUIET)


def test_tiny_steps_are_never_doubted() -> None:
    assert not is_doubted(steps(0.5, 400, 0.6, 300, 0.4), steps(0.7))
    assert not is_doubted(steps(90), steps(19))


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(steps(979, 980, 975, 985, 979), id="steadily slow while nothing else was"),
        pytest.param(steps(67, 979, 68, 990, 985), id="now this, now that"),
        pytest.param(steps(979), id="one step"),
    ],
)
def test_a_doubted_round_is_replaced_by_a_steady_one(first: list[PhaseSeconds]) -> None:
    second = steps(67, 68, 67, 66, 70)
    assert is_doubted(first, QUIET)
    timed, notes = steady(first, second, QUIET)
    assert timed is second
    assert "those of the second round count" in notes[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((60, 130, 61, 140, 100), (62, 150, 60, 120, 110), id="they say the same"),
        pytest.param((979,), (300,), id="of one step each, which are never refused"),
    ],
)
def test_two_doubted_rounds_count_together_and_are_noted(first: tuple[float, ...], second: tuple[float, ...]) -> None:
    assert is_doubted(steps(*first), QUIET)
    timed, notes = steady(steps(*first), steps(*second), QUIET)
    assert timed == steps(*first, *second)
    assert "times are uncertain" in notes[0]


def test_two_rounds_that_contradict_each_other_are_refused_in_one_line() -> None:
    with pytest.raises(StepError) as caught:
        steady(steps(979, 980, 979), steps(400, 300, 390), QUIET)
    assert str(caught.value) == (
        "timed steps: expected about equal times, found medians of 390 ms and 979 ms in two rounds of 3, and "
        "70 ms with each op timed; the machine is busy with something else: profile again when it is quieter, or with "
        "more iterations"
    )


def test_later_steps_that_took_much_less_contradict_the_timed_ones() -> None:
    assert contradicted(steps(979, 980, 975), steps(70, 68)).startswith(
        "the timed steps took 979 ms, and later ones 68"
    )
    assert contradicted(steps(100, 99, 101), steps(70, 90)) == ""  # by less than half
    assert contradicted(steps(70, 71, 69), steps(979, 990)) == ""  # later ones do more, and may take any time
    assert contradicted(steps(29, 30, 29), steps(2, 3)) == ""  # tiny
    assert contradicted(steps(979), []) == ""


class Disturbed:
    """A step of 60 ms but where ``slow`` says otherwise, in seconds by the number of the call: something else ran."""

    def __init__(self, slow: dict[int, float]) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.calls = 0
        self._slow = slow

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        time.sleep(self._slow.get(self.calls, 0.06))
        loss: torch.Tensor = self.model(torch.ones(4, 8)).square().mean()
        return loss


@needs_compiler  # else the steps that are timed are others
def test_a_profile_of_a_machine_that_was_busy_for_a_while_is_timed_again() -> None:
    step = Disturbed({9: 0.6, 10: 0.7, 11: 0.6})  # all that are timed as planned steps run
    said: list[str] = []
    profile = taken(step, step.model, iterations=3, progress=said.append)
    assert "timed steps spread too much; timing 3 more" in said
    assert any("those of the second round count" in note for note in profile.notes)


@needs_compiler  # else the steps that are timed are others
def test_a_machine_that_was_busy_as_long_as_steps_were_timed_is_warned_about_and_noted() -> None:
    step = Disturbed({7: 0.5, 8: 0.5})  # the timed step, and the one with instruments
    with pytest.warns(UserWarning, match="later ones .* the machine was busy with something else"):
        profile = taken(step, step.model)
    assert any("all times are uncertain" in note for note in profile.notes)


PHASES, LAYERS = [F, F, B, OPT], ["one", "two", "one", ""]
RUNS = np.array([[1.0, 4.0, 10.0, 1.0], [2.0, 4.0, 20.0, 1.0], [3.0, 4.0, 30.0, 1.0]])
"""Three steps of four ops; interquartile ranges 1, 0, 10 and 0."""


def with_phases(forward_s: float, backward_s: float, runs: np.ndarray = RUNS) -> Reconciled:
    return reconcile(PHASES, LAYERS, runs, [{F: forward_s, B: backward_s, OPT: 1.0}] * 3)


def test_spreads_are_interquartile_ranges_to_which_a_gap_adds_nothing_and_what_is_scaled_down_scales() -> None:
    with_gap, scaled, once = with_phases(7.0, 25.0), with_phases(3.0, 20.0), with_phases(7.0, 25.0, RUNS[:1])
    assert (with_gap.durations_s, with_gap.spreads_s) == ([2.5, 4.5, 25.0, 1.0], [1.0, 0.0, 10.0, 0.0])
    assert (scaled.durations_s, scaled.spreads_s) == ([1.0, 2.0, 20.0, 1.0], [0.5, 0.0, 10.0, 0.0])
    assert (once.layer_times, once.spreads_s) == ((), [0.0] * 4)


def test_a_layer_s_spread_is_that_of_its_ops_together() -> None:
    runs = np.array([[1.0, 3.0, 1.0, 1.0], [2.0, 2.0, 2.0, 1.0], [3.0, 1.0, 6.0, 1.0]])
    measured = [{F: 5.0, B: 1.0, OPT: 1.0}] * 3
    seconds = reconcile([F, F, B, OPT], ["one", "one", "two", ""], runs, measured)
    assert seconds.spreads_s[:2] == [1.0, 1.0]
    assert seconds.layer_times == (
        LayerTimes(layer="one", forward_s=5.0),  # with the gap of 1 s; together its ops take the same in every step
        LayerTimes(layer="two", backward_s=1.0, backward_spread_s=1.25),  # half of what was timed
    )


def test_phases_have_spreads_of_their_own() -> None:
    measured = [{F: 1.0 + step, B: 2.0 + 4 * step, OPT: 1.0} for step in range(3)]
    times = reconcile(PHASES, LAYERS, RUNS, measured).times
    assert (times.forward_spread_s, times.backward_spread_s, times.optimizer_spread_s) == (1.0, 4.0, 0.0)
    assert times.spread_s == 5.0


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    model, images = Residual(), torch.randn(4, 8, 12, 12)
    return taken(lambda: model(images).square().mean(), model, torch.optim.AdamW(model.parameters()), iterations=4)


def test_every_layer_with_ops_in_forward_or_backward_has_its_times(profile: Profile) -> None:
    assert {times.layer for times in profile.layer_times} == {op.layer for op in profile.ops if op.phase is not OPT}
    assert any(op.spread_s > 0 for op in profile.ops)
    frame = profile.to_frame("layers")
    assert frame[["forward_median_s", "forward_spread_s", "backward_median_s"]].notna().all(axis=None)
    assert (frame["forward_median_s"] > 0).sum() == (frame["forward_s"] > 0).sum()


def test_a_faster_device_has_smaller_spreads(profile: Profile) -> None:
    faster = for_machine(profile, compute_scale=0.5)
    assert [op.spread_s for op in faster.ops] == [op.spread_s / 2 for op in profile.ops]
    assert faster.times.backward_spread_s == profile.times.backward_spread_s / 2
    assert faster.layer_times[0].forward_s == profile.layer_times[0].forward_s / 2


def reconciled(profile: Profile, **scales: float) -> Profile:
    times = msgspec.structs.replace(profile.times, forward_s=0.012, backward_s=0.02, optimizer_s=0.001)
    return msgspec.structs.replace(profile, times=msgspec.structs.replace(times, **scales))


def test_the_reconciliation_is_told_in_words_for_each_phase(profile: Profile) -> None:
    counts = {phase: sum(op.phase is phase for op in profile.ops) for phase in Phase}
    told = reconciled(profile, forward_scale=1.2, backward_scale=0.8, optimizer_scale=1.001)
    assert told.reconciliation(0.02) == {
        "forward": f"{counts[F]} ops take 10 ms timed one by one, 12 ms uninstrumented: "
        "the gap of 2 ms is spread over them",
        "backward": f"{counts[B]} ops take 25 ms timed one by one, 20 ms uninstrumented: scaled down by 20%",
    }
    assert list(told.reconciliation()) == ["forward", "backward", "optimizer"]
    rows = told.rows()
    assert rows["forward ops"] == told.reconciliation()["forward"]
    assert "optimizer ops" not in rows


def test_a_phase_without_ops_and_a_step_that_was_not_timed_have_none(profile: Profile) -> None:
    forward_alone = tuple(op for op in profile.ops if op.phase is F)
    told = reconciled(msgspec.structs.replace(profile, ops=forward_alone), forward_scale=1.2, optimizer_scale=9.0)
    assert list(told.reconciliation()) == ["forward"]
    assert reconciled(told, iterations=0).reconciliation() == {}
