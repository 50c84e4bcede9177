"""Segments of a running loop are served from one arena once they follow plans: bitwise, whole, and told."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile import Memory
from poochplan.online import auto_messages, background
from poochplan.runtime.active_plan import MOST_PLANS
from poochplan.runtime.arena import library
from tests.online.runs import Run, bytes_of, opened, run_plain
from tests.online.trainings import (
    CLASSES,
    ROWS,
    WIDTH,
    Training,
    accumulation,
    dropout_and_batch_norm,
    evaluated_between,
    outputs_held,
)
from tests.runtime.served import arenas_mapped, needs_compiler

pytestmark = [pytest.mark.cpu_device, needs_compiler]
PLANNED_AT, LEARNED_AT, TURNS = 24, 32, 44
"""Turns: by then all kinds of segments are profiled; are served; and the end."""
UNPLANNED_BYTES = 64 << 10


class Served:
    """A training under ``auto``. State: its session while it runs, and what each turn added to the session's total."""

    def __init__(self, make: Callable[[], Training], cache: Path, **options: object) -> None:
        torch.manual_seed(0)
        self.training = make()
        self.losses: list[list[float]] = []
        self.served_bytes: list[int] = []
        self.unserved_bytes: list[int] = []
        self.planned: list[bool] = []
        """Whether a plan was in force when the turn ended."""
        self.arenas: list[int] = []
        """Mapped beside those of before: once it has learned, and at the end."""
        self.session = opened(self.training, cache, **options)

    def turns(self, first: int, last: int) -> None:
        total = self.session.total
        for number in range(first, last):
            before = total.served_bytes, total.unserved_bytes
            self.losses.append(list(self.training.turn(number)))
            self.session._attachment.settle()
            self.served_bytes.append(total.served_bytes - before[0])
            self.unserved_bytes.append(total.unserved_bytes - before[1])
            self.planned.append(bool(self.session.plans))

    def run(self) -> Run:
        gc.collect()  # arenas of sessions before go
        before = arenas_mapped()  # a plan may come before all kinds are profiled, and its arena with it
        with self.session:
            self.turns(0, PLANNED_AT)
            self.session.wait_until_planned(120)
            self.turns(PLANNED_AT, LEARNED_AT)
            self.arenas.append(arenas_mapped() - before)
            self.turns(LEARNED_AT, TURNS)
        self.arenas.append(arenas_mapped() - before)
        return Run(self.losses, bytes_of(self.training.state()), [])


@pytest.mark.parametrize("make", [dropout_and_batch_norm, evaluated_between, outputs_held, accumulation])
def test_segments_are_bitwise_what_they_were_and_served_whole_from_one_arena_within_the_budget_once_they_are_learned(
    make: Callable[[], Training], tmp_path: Path
) -> None:
    served = Served(make, tmp_path)
    assert served.run().equals(run_plain(make, TURNS))
    whole = [size_bytes for size_bytes in served.served_bytes[LEARNED_AT:] if size_bytes > UNPLANNED_BYTES]
    assert len(whole) >= TURNS - LEARNED_AT - 3  # behind a forward that nobody used comes another kind of segment
    assert served.unserved_bytes[LEARNED_AT:] == [0] * (TURNS - LEARNED_AT)
    before_plan = served.served_bytes[: served.planned.index(True)]
    assert before_plan
    assert not any(before_plan)  # segments that are studied, or wait for their plan
    assert served.arenas == [1, make is not accumulation]  # kinds take it by turns; gradients that stay hold it
    session = served.session
    assert session.total.fallbacks == 0
    assert not [one for one in session.arena.unserved if one.size_bytes >= UNPLANNED_BYTES]
    assert {profile.memory for profile in session.profiles.values()} == {Memory.ALLOCATED}
    plans = list(session.plans.values())
    assert len(plans) > (make is accumulation)
    for plan in plans:
        assert plan.layout is not None
        assert plan.prediction.arena_peak_bytes <= plan.budget_bytes
    assert session.total.peak_bytes <= max(plan.budget_bytes for plan in plans)


@pytest.mark.parametrize("longer", [False, True])
def test_an_output_that_the_loop_holds_has_a_place_if_it_is_gone_when_the_next_step_begins(
    longer: bool, tmp_path: Path
) -> None:
    served = Served(lambda: outputs_held(until="next" if longer else "turn"), tmp_path, budget="75%")
    with served.session as session:
        served.turns(0, PLANNED_AT)
        assert session.wait_until_planned(120)
        served.turns(PLANNED_AT, LEARNED_AT)
    (layout,) = (plan.layout for plan in session.plans.values())
    held = [ROWS * WIDTH * 4, ROWS * CLASSES * 4] if longer else []
    assert [one.size_bytes for one in layout.places if one.offset == OUTSIDE] == held
    assert served.served_bytes[-1] > UNPLANNED_BYTES


@pytest.mark.parametrize("time_limit_s", [0.5, 0.01])
def test_a_loop_that_lets_go_earlier_than_the_profiled_one_gets_plans_until_an_arena_has_room(
    time_limit_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Served(lambda: outputs_held(until="next"), tmp_path, budget="75%", time_limit_s=time_limit_s)
    with first.session as session:
        first.turns(0, PLANNED_AT)
        assert session.wait_until_planned(120)
        first.turns(PLANNED_AT, PLANNED_AT + 2)
    del first, session
    gc.collect()  # what that loop holds is not to live beside the next one
    second = Served(outputs_held, tmp_path, budget="75%", quiet=False, time_limit_s=time_limit_s)
    with second.session as session:
        for number in range(1 + MOST_PLANS):  # the first other plan has other decisions, whose arena may lack room, too
            second.turns(number * PLANNED_AT, (number + 1) * PLANNED_AT)
            assert session.wait_until_planned(120)
    said = capsys.readouterr().err
    assert 1 <= said.count("another plan is made that has room for it") <= MOST_PLANS
    assert second.served_bytes[0] == 0
    assert second.served_bytes[-1] > UNPLANNED_BYTES, (second.served_bytes, second.session.arena, said)
    assert second.unserved_bytes[-1] == 0
    assert session.total.peak_bytes <= max(plan.budget_bytes for plan in session.plans.values())


def test_a_run_that_goes_on_from_a_checkpoint_is_served_and_bitwise_the_one_that_was_not_left(tmp_path: Path) -> None:
    half, cache, file = 16, tmp_path / "cache", tmp_path / "checkpoint"
    first = Served(dropout_and_batch_norm, cache)
    with first.session:
        first.turns(0, half - 1)
        first.session.wait_until_planned(120)
        first.turns(half - 1, half)
    losses, parts = first.losses, [first.training.model, *first.training.optimizers]
    torch.save([*(part.state_dict() for part in parts), torch.get_rng_state()], file)
    del first, parts
    gc.collect()  # what that run has left is not to live beside the next one
    second = Served(dropout_and_batch_norm, cache)
    *states, generator = torch.load(file)
    for part, state in zip([second.training.model, *second.training.optimizers], states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(generator)
    del states, state
    with second.session:
        second.turns(half, TURNS)
        assert second.session._source.loop.kinds == {}  # the plan is of the first run
    found = Run(losses + second.losses, bytes_of(second.training.state()), [])
    assert found.equals(run_plain(dropout_and_batch_norm, TURNS))
    assert second.unserved_bytes[-4:] == [0] * 4
    assert min(second.served_bytes[-4:]) > UNPLANNED_BYTES


def test_off_serves_nothing_and_plans_for_the_peak_alone(tmp_path: Path) -> None:
    served = Served(dropout_and_batch_norm, tmp_path, arena="off")
    assert served.run().equals(run_plain(dropout_and_batch_norm, TURNS))
    assert served.session.arena is None
    assert served.session.total.served_bytes == 0
    again = Served(dropout_and_batch_norm, tmp_path, arena="on")
    with again.session as session:
        again.turns(0, 2)
        assert session.plans == {}  # what was planned without an arena is another plan


def test_on_without_an_allocator_is_one_line_and_auto_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_failure", "no C++ compiler; install one")
    with pytest.raises(UsageError) as told:
        Served(dropout_and_batch_norm, tmp_path, arena="on")
    assert (
        str(told.value)
        == 'arena: "on" is not possible: no C++ compiler; install one; take "auto" to train without an arena'
    )
    with Served(dropout_and_batch_norm, tmp_path).session as session:
        assert session.arena is None


def test_that_the_allocator_is_built_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("is_built", "is_loaded"):
        monkeypatch.setattr(background, name, lambda: False)
    Served(dropout_and_batch_norm, tmp_path, quiet=False)
    assert capsys.readouterr().err == f"poochplan: {auto_messages.BUILDING}\n"
    Served(dropout_and_batch_norm, tmp_path)
    assert capsys.readouterr().err == ""
