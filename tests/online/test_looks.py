"""How often a loop looks at all of Python's objects and has garbage collected; that nothing is missed by that; and what
is foreseen of what grows.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from poochplan.profiler.live import after_capture
from poochplan.profiler.live.segment_observer import PackHook, UnpackHook
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.metering import watch
from poochplan.runtime.metering.census import Growth, census_bytes, foreseen_bytes, left_free, live, one_moment
from tests.online.runs import Run, run_auto
from tests.online.trainings import (
    Losses,
    Training,
    adam,
    batch,
    blocks,
    dropout_and_batch_norm,
    with_lbfgs,
)
from tests.runtime.served import needs_compiler

LARGE = 1 << 20
GARBAGE = "values that only Python's garbage collector frees"


class Cycle:
    """Dies with the next collection, with what it is given."""

    def __init__(self, held: object = None) -> None:
        self.own, self.held = self, held


@needs_compiler
def test_what_no_plan_fits_is_told_once_refused_at_once_by_the_next_run_and_measured_anew_a_day_later(
    expected: Run, tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was profiled wrongly for a budget would else be refused for ever. Both runs look seldom."""
    monkeypatch.setattr(watch, "CENSUS_SHARE", 1e-9)  # else a slow machine's looks come by the second

    def studies(most_looks: int, most_collections: int) -> bool:
        calls.clear()
        with pytest.warns(RuntimeWarning, match="no plan fits") as told:
            found = run_auto(dropout_and_batch_norm, 100_000, tmp_path)
        assert len([one for one in told if "poochplan" in str(one.message)]) == 1
        assert found.equals(expected)
        assert calls["get_objects"] <= most_looks
        assert calls["collect"] <= most_collections
        return bool(found.session._source.loop.kinds)

    assert studies(7, 2)
    assert not studies(3, 0)
    for kept in tmp_path.rglob("profile.json"):
        os.utime(kept, (0, time.time() - 25 * 3600))
    assert studies(7, 2)


def test_a_refusal_that_hangs_on_what_lives_beside_is_not_kept(tmp_path: Path) -> None:
    def run(*beside: torch.Tensor) -> bool:
        session = run_auto(dropout_and_batch_norm, 2_000_000, tmp_path).session
        return session.plan is not None

    with pytest.warns(RuntimeWarning, match="no plan fits"):
        assert not run(torch.ones(LARGE))
    gc.collect()
    assert run()


def test_who_looks_in_one_moment_sees_the_same_less_what_has_died(calls: Counter[str]) -> None:
    gc.collect()
    before_bytes = census_bytes("cpu")
    kept = torch.ones(LARGE, dtype=torch.uint8)
    let_go = Cycle(torch.ones(LARGE, dtype=torch.uint8))
    calls.clear()
    with one_moment():
        assert census_bytes("cpu") == before_bytes + 2 * LARGE
        del let_go
        assert census_bytes("cpu", before_bytes + 2 * LARGE) == before_bytes + 2 * LARGE
        assert census_bytes("cpu", before_bytes + LARGE) == before_bytes + LARGE
        assert not live(torch.optim.LBFGS)
    assert calls == {"get_objects": 1, "collect": 1}
    del kept
    assert census_bytes("cpu") == before_bytes


@pytest.mark.filterwarnings("ignore:poochplan")
@pytest.mark.parametrize("is_cycle", [True, False])
def test_what_only_the_collector_frees_of_a_captured_step_is_told(tmp_path: Path, *, is_cycle: bool) -> None:
    """What the loop holds at the end of its step is not."""
    model = blocks(4)
    optimizer, (data, _) = adam(model), batch()

    def turn(_: int) -> Losses:
        held = Cycle()
        held.held = output = model(data)
        loss = output.square().mean()
        loss.backward()
        if is_cycle:
            del held, output
        optimizer.step()
        if not is_cycle:
            held.own = None  # type: ignore[assignment]
        optimizer.zero_grad()
        return [loss.item()]

    session = run_auto(lambda: Training(model, [optimizer], turn), "90%", tmp_path).session
    assert any(note.startswith(GARBAGE) for note in session.profile.notes) is is_cycle


def test_what_is_foreseen_of_lbfgs_is_what_its_history_comes_to_take() -> None:
    training, together = with_lbfgs(batch(64), max_iter=4, history_size=9), set[int]()
    for number in range(6):
        training.turn(number)
        foreseen = foreseen_bytes(training.optimizers, "cpu")
        assert foreseen > 0 or together
        together.add(census_bytes("cpu") + foreseen)
    assert foreseen == 0
    assert max(together) - min(together) <= 512 * 9  # numbers of which some are not there yet
    assert foreseen_bytes([torch.optim.Adam(training.model.parameters())], "cpu") == 0


def test_only_what_has_become_more_twice_in_a_row_grows() -> None:
    growth = Growth()
    for number, size_bytes in ((1, 1000), (2, 1000), (10, 9000)):
        growth.saw(number, size_bytes)
    assert growth.steady_bytes_per_segment == 0
    assert growth.latest_bytes_per_segment == 1000
    growth.saw(12, 10000)
    assert growth.steady_bytes_per_segment == 500
    growth.saw(13, 10000)
    assert growth.steady_bytes_per_segment == growth.latest_bytes_per_segment == 0


@pytest.mark.parametrize(("ahead_bytes", "room_bytes", "left_bytes"), [(0, 100, 0), (100, 100, 100), (101, 100, 50)])
def test_growth_is_left_all_that_it_takes_or_half_of_the_room(
    ahead_bytes: int, room_bytes: int, left_bytes: int
) -> None:
    assert left_free(ahead_bytes, room_bytes) == left_bytes


def test_what_observes_a_step_looks_at_each_save_and_use_though_the_step_follows_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: dict[after_capture.PhaseTiming, Counter[str]] = defaultdict(Counter)

    class Looking(after_capture.PhaseTiming):
        def pack(self, tensor: torch.Tensor, pack: PackHook) -> SavedHandle:
            looks[self]["packs"] += 1
            return super().pack(tensor, pack)

        def unpack(self, handle: SavedHandle, unpack: UnpackHook) -> torch.Tensor:
            looks[self]["unpacks"] += 1
            return super().unpack(handle, unpack)

    monkeypatch.setattr(after_capture, "PhaseTiming", Looking)
    run_auto(dropout_and_batch_norm, "70%", tmp_path, is_metered=False)  # the meter is a mode, which all look at
    follow = [one for one in looks if one.policy is not None and one.policy.instructions is not None]
    assert follow
    for one in follow:
        assert one.policy is not None
        assert one.policy.instructions is not None
        assert looks[one]["packs"] >= len(one.policy.instructions.handles) - 1  # the first one begins the step
        assert looks[one]["unpacks"] >= len(one.policy.instructions.uses)
