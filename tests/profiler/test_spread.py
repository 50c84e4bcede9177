"""How far seconds spread over the timed steps, by op, layer and phase, and what was done to make them add up."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import poochplan
from poochplan.formats.profile import LayerTimes, Phase, Profile
from poochplan.planner.whatif import for_machine
from poochplan.profiler.assembly.reconcile import Reconciled, reconcile
from tests.runtime.nets import LINK, Residual

F, B, OPT = Phase
PHASES, LAYERS = [F, F, B, OPT], ["one", "two", "one", ""]
RUNS = np.array([[1.0, 4.0, 10.0, 1.0], [2.0, 4.0, 20.0, 1.0], [3.0, 4.0, 30.0, 1.0]])
"""Three steps of four ops; interquartile ranges 1, 0, 10 and 0."""


def with_phases(forward_s: float, backward_s: float, optimizer_s: float, runs: np.ndarray = RUNS) -> Reconciled:
    return reconcile(PHASES, LAYERS, runs, [{F: forward_s, B: backward_s, OPT: optimizer_s}] * 3)


def test_spreads_are_interquartile_ranges_and_a_gap_adds_none() -> None:
    seconds = with_phases(7.0, 25.0, 1.0)
    assert seconds.durations_s == [2.5, 4.5, 25.0, 1.0]
    assert seconds.spreads_s == [1.0, 0.0, 10.0, 0.0]


def test_spreads_are_scaled_down_with_the_durations() -> None:
    seconds = with_phases(3.0, 20.0, 1.0)
    assert seconds.durations_s == [1.0, 2.0, 20.0, 1.0]
    assert seconds.spreads_s == [0.5, 0.0, 10.0, 0.0]


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


def test_what_was_timed_once_has_no_spread() -> None:
    seconds = with_phases(7.0, 25.0, 1.0, RUNS[:1])
    assert seconds.spreads_s == [0.0] * 4
    assert seconds.layer_times == ()


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    model, images = Residual(), torch.randn(4, 8, 12, 12)
    return poochplan.profile(
        lambda: model(images).square().mean(),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        iterations=4,
        link=LINK,
    )


def test_every_layer_with_ops_in_forward_or_backward_has_its_times(profile: Profile) -> None:
    assert {times.layer for times in profile.layer_times} == {op.layer for op in profile.ops if op.phase is not OPT}
    assert any(op.spread_s > 0 for op in profile.ops)
    frame = profile.to_frame("layers")
    assert frame[["forward_median_s", "forward_spread_s", "backward_median_s"]].notna().all(axis=None)
    assert (frame["forward_median_s"] > 0).sum() == (frame["forward_s"] > 0).sum()


def test_the_peak_is_at_an_op_and_in_its_layer(profile: Profile) -> None:
    ops, layers = profile.to_frame("ops"), profile.to_frame("layers")
    assert ops["live_bytes"].max() == profile.in_core_peak_bytes
    assert layers["live_bytes"].max() == ops.loc[ops["phase"] != "optimizer", "live_bytes"].max()
    last = len(profile.ops) - 1
    raised = (*profile.ops[:last], msgspec.structs.replace(profile.ops[last], workspace_bytes=1 << 20))
    with_workspace = msgspec.structs.replace(profile, ops=raised).to_frame("ops")
    assert with_workspace.loc[last, "live_bytes"] - ops.loc[last, "live_bytes"] == 1 << 20


def test_a_faster_device_has_smaller_spreads(profile: Profile) -> None:
    faster = for_machine(profile, compute_scale=0.5)
    assert [op.spread_s for op in faster.ops] == [op.spread_s / 2 for op in profile.ops]
    assert faster.times.backward_spread_s == profile.times.backward_spread_s / 2
    assert faster.layer_times[0].forward_s == profile.layer_times[0].forward_s / 2


def test_a_profile_from_before_spreads_is_read_and_has_none(profile: Profile, tmp_path: Path) -> None:
    data = json.loads(profile.save(tmp_path / "new.json").read_bytes())
    del data["layer_times"], data["link"]["pageable_out"], data["link"]["pageable_in"]
    for phase in Phase:
        del data["times"][f"{phase}_spread_s"]
    for op in data["ops"]:
        op.pop("spread_s", None)
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = Profile.load(tmp_path / "old.json")
    assert (old.layer_times, old.link.pageable_in, old.times.forward_spread_s) == ((), None, 0.0)
    assert old.to_frame("ops")["spread_s"].sum() == 0
    assert old.to_frame("layers")[["forward_median_s", "backward_spread_s"]].isna().all(axis=None)


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
    times = msgspec.structs.replace(told.times, iterations=0)
    assert msgspec.structs.replace(told, times=times).reconciliation() == {}
