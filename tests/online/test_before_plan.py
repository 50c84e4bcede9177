"""Steps that have no plan: in-core while the device has room, swapped from where it has not; bitwise either way."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import poochplan
from poochplan.online import background, before_plan, planning_process
from poochplan.online.before_plan import SHARE_TAKEN, BeforePlan, Mode, Unplanned, free_bytes
from poochplan.planner.search.allowance import Progress
from poochplan.profiler.live.step_kinds import Loop
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.tensor_internals import in_backward
from tests.online.runs import QUICK, run_auto
from tests.online.trainings import batch, blocks, dropout_and_batch_norm, loss_of, plain
from tests.runtime.nets import LINK, equal, gradients

CPU = torch.device("cpu")


def unplanned(
    model: torch.nn.Module, way: Unplanned = Unplanned.IN_CORE, *optimizers: torch.optim.Optimizer
) -> BeforePlan:
    return BeforePlan(way, way, Loop(model, optimizers, CPU))


def first_step(cache: Path, budget: str = "60%", **options: Any) -> tuple[int, int]:
    """Bytes that left the device in the first step under ``auto``, whose gradients are the plain ones, and bytes that
    were saved.
    """
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, data = blocks(4), batch(64)
        auto = poochplan.auto(model, budget=budget, cache=cache, **QUICK, **options) if is_planned else nullcontext()
        with auto as session:
            loss_of(model, data).backward()
            segment = session._engine.segment if session is not None else None
            found.append(gradients(model))
    assert equal(found[:1], found[1:])
    return segment.report.out_bytes, segment.saved_bytes


def test_a_first_step_is_in_core_whatever_the_budget(tmp_path: Path) -> None:
    out_bytes, saved_bytes = first_step(tmp_path, budget="1000")
    assert out_bytes == 0 < saved_bytes


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SHARE_BETWEEN_LOOKS", 1e-9), ("HEADROOM", 0)):
        monkeypatch.setattr(f"poochplan.runtime.step_policies.step_policy.{name}", value)


@pytest.mark.usefixtures("looks_often")
def test_where_room_ends_within_the_step_it_swaps_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = iter([1 << 30] * 4 + [0] + [1 << 30] * 1000)
    monkeypatch.setattr(BeforePlan, "_room", lambda _: next(rooms))
    monkeypatch.setattr("poochplan.runtime.step_policies.step_policy.HEADROOM", 1)
    out_bytes, saved_bytes = first_step(tmp_path)
    assert 0 < out_bytes < 0.9 * saved_bytes


@pytest.mark.usefixtures("looks_often")
def test_where_room_ends_in_backward_what_was_kept_is_swapped_as_far_as_bytes_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for missing_bytes in (-1, 1, 1 << 30):
        room = lambda _, missing=missing_bytes: -missing if in_backward() else 1 << 30  # noqa: E731
        monkeypatch.setattr(BeforePlan, "_room", room)
        out_bytes, saved_bytes = first_step(tmp_path / str(missing_bytes))
        left.append(out_bytes / saved_bytes)
    assert 0 == left[0] < left[1] <= left[2] < 1  # the value in use stays


def test_the_largest_value_to_come_is_told_by_the_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5000, 8), torch.nn.Linear(8, 32), torch.nn.Linear(8, 1000))
    before = unplanned(model)

    def largest(*shape: int) -> int:
        tensor = torch.zeros(shape)
        return before._largest_at(SimpleNamespace(size_bytes=tensor.nbytes, geometry=Geometry.of(tensor)))  # type: ignore[arg-type]

    assert largest(3, 7, 8) == 3 * 7 * 1000 * 4
    assert largest(3, 1000) == 3 * 1000 * 4
    assert largest(3, 9) == 3 * 9 * 4
    assert largest() == 4
    del model[2]
    before.policy()
    assert largest(3, 7, 8) == 3 * 7 * 32 * 4, "a layer that was removed counts no longer"


@pytest.mark.parametrize("options", [{}, {"before_plan": "swap"}, {"on_over_budget": "error"}])
def test_it_swaps_all_where_there_is_no_room_or_that_is_asked_for_or_a_step_above_the_budget_is_an_error(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options:
        monkeypatch.setattr(before_plan, "free_bytes", lambda _: 0)
    out_bytes, saved_bytes = first_step(tmp_path, **options)
    assert 0.9 * saved_bytes < out_bytes <= saved_bytes  # what was there before the step stays


@pytest.mark.parametrize("way", ["in-core", "swap"])
def test_steps_that_no_plan_fits_go_on_as_asked(way: str, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no plan fits the budget of .*: the smallest possible is"):
        session = run_auto(lambda: plain(blocks(4)), 1000, tmp_path, 14, is_metered=False, on_refusal=way).session
    assert session.plan is None
    assert (session._engine.segment.report.out_bytes > 0) == (way == "swap")


def test_the_first_line_says_from_when_on_the_budget_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with poochplan.auto(blocks(1), budget="60%", cache=tmp_path, link=LINK):
        pass
    assert capsys.readouterr().err.startswith("poochplan: steps run in-core while they are measured")


def test_room_is_left_for_gradients_and_the_state_of_optimizers_until_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(before_plan, "free_bytes", lambda _: 1_000_000)
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    before = unplanned(model, Unplanned.IN_CORE, optimizer)
    found = []
    for _ in range(2):
        found.append(before._room())
        model(torch.ones(1, 100)).sum().backward()
        found.append(before._room())
        optimizer.step()
    found.append(before._room())
    taken = 1_000_000 * SHARE_TAKEN
    assert found == [taken - 3 * 40_000, taken - 2 * 40_000, taken, taken, taken]


def test_a_step_that_is_profiled_may_take_what_the_device_has_or_else_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(before_plan, "free_bytes", lambda _: 1 << 40)
    assert unplanned(torch.nn.Linear(2, 2), Unplanned.SWAP).room_of(1000) == 1000
    assert unplanned(torch.nn.Linear(2, 2)).room_of(1000) >= SHARE_TAKEN * (1 << 40)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_plan, "memory_left", lambda _: 1000)
    assert free_bytes(CPU) == 1000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(CPU) == 250


def test_overheads_are_beside_steps_that_were_timed_before_anything_was_given_up(tmp_path: Path) -> None:
    def profiled_s(way: Mode) -> list[float | None]:
        run = run_auto(dropout_and_batch_norm, "60%", tmp_path / way, 14, is_metered=False, before_plan=way)
        return [profile.times.plain_step_s for profile in run.session.profiles.values()]

    kept_s = profiled_s("in-core")
    assert kept_s
    assert all(kept_s)
    assert not any(profiled_s("swap"))


@pytest.mark.parametrize(("age_s", "steps"), [(5.0, []), (11.0, ["measure", "start"])])
def test_a_loop_that_has_paused_too_long_waits_with_the_machine_s_measurements_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, age_s: float, steps: list[str]
) -> None:
    for module in (background, before_plan):
        monkeypatch.setattr(module, "has_no_processor_to_spare", lambda: True)
    pauses, done = before_plan.PauseBudget(), list[str]()
    pauses._since_s -= age_s
    pauses._spent_s = 2.0

    class Planning:
        lacks_facts = True

        def measure(self, _: float) -> None:
            done.append("measure")

        def start(self) -> None:
            done.append("start")

    background.PlanQueue(pauses, measures_here=True)["kind"] = Planning()  # type: ignore[assignment]
    assert done == steps


@pytest.mark.parametrize(
    ("loop_s", "gap", "took_s", "is_over"),
    [
        (20.0, 0.03, 2.0, False),  # every search has three seconds
        (20.0, 0.03, 3.5, True),  # 3% of the loop's 20 s are 0.6 s
        (20.0, 0.30, 3.5, False),
        (3600.0, 0.03, 9.0, False),
        (3600.0, 0.001, 9.0, True),
    ],
)
def test_a_search_ends_once_it_cannot_save_what_it_takes_from_the_loop(
    monkeypatch: pytest.MonkeyPatch, loop_s: float, gap: float, took_s: float, is_over: bool
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    watch = planning_process.ends_when_it_gains_less_than_it_takes(loop_s)
    now_s += took_s
    progress = Progress(step_s=1.0 + gap, bound_s=1.0, overhead=0.5, gap=gap, left=1.0, is_counted=False)
    assert watch(progress) is is_over
    assert not watch(replace(progress, bound_s=0.0, gap=0.0)), "nothing is proven yet"
