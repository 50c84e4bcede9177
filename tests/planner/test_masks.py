"""Bits: what a plan may hold in place of masks, in planner, simulators, bound and plan files."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from poochplan.errors import InputFileError, UsageError
from poochplan.formats.narrow import (
    NARROW,
    as_planned,
    bits_bytes,
    faster_masks,
    masks_of,
    widening_seconds,
    with_bits,
    with_smaller,
)
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import simulate, swap_all_on_demand
from poochplan.planner.writing import with_decisions
from tests.planner.form_profiles import fused, mask, mask_profile, of_bools, on_cuda
from tests.planner.plans import budget_at, held
from tests.planner.random_profiles import Recorder, link

KEEP, RECOMPUTE = Decision.KEEP, Decision.RECOMPUTE
SIZE = 65536


def dropout(written: bool = False, drawn_s: float = 1.0, size: int = SIZE, lost: bool = False) -> Profile:
    """A layer, its dropout, and a layer behind it."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096)], [size], seconds=1.0)
    made = mask(r, size, seconds=drawn_s)
    if lost:
        r.values[made].unreplayable = "it gave other bits"
    (out,) = r.op("mul", [stem, made], [size], saves=[made], seconds=0.3)
    if written:
        r.op("add_", [made], writes=[made], seconds=0.1, in_graph=False)
    r.op("linear", [out], [512], saves=[out], seconds=1.0)
    return r.finish(link(1e-3))


def fused_dropout(element_bytes: int = 4, saved: bool = False) -> Profile:
    """A quick layer, dropout of it that makes a mask of bools, and a layer behind it."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096)], [element_bytes * SIZE], seconds=0.1)
    out, _ = fused(r, stem, SIZE, seconds=1.0, saves=[stem] if saved else [], element_bytes=element_bytes)
    r.op("linear", [out], [512], saves=[out], seconds=1.0)
    return of_bools(r.finish(link(1e-3)))


def test_a_mask_of_bools_is_what_one_op_makes_and_its_bits_are_its_only_recipe() -> None:
    with_kernel = on_cuda(fused_dropout(), bits_kernel=True)
    for profile, moved in ((fused_dropout(), 2.25), (on_cuda(fused_dropout()), 5.25), (with_kernel, 2.25)):
        graph = build_problem(with_bits(profile)).replay
        assert graph.replays[0] is None
        assert graph.of(1).inputs == (0,)
        assert graph.of(1).seconds == pytest.approx(moved / 9)
        assert graph.recorded_by(1) == {1}
        assert graph.of(2).inputs == ()
        assert graph.of(2).seconds == pytest.approx(1.1)
        lives = graph.lives((0, 1, 2), {graph.value_of[1], graph.value_of[2]})
        assert [value for value, _, _ in lives].count(graph.value_of[1]) == 1  # dropout's own is freed at once
        renamed = tuple(msgspec.structs.replace(op, name=op.name.replace("native", "other")) for op in profile.ops)
        assert masks_of(msgspec.structs.replace(profile, ops=renamed)) == {}


def test_a_mask_that_dropout_makes_again_in_less_time_has_no_bits() -> None:
    """On CUDA dropout of 16 bits moves 5 bytes for each element, fewer than bits do; its input may add to that."""
    assert len(faster_masks(fused_dropout(2, saved=True))) == 1
    assert len(faster_masks(on_cuda(fused_dropout(4, saved=True)))) == 1
    assert faster_masks(on_cuda(fused_dropout(2, saved=True))) == {}
    assert len(faster_masks(on_cuda(fused_dropout(2, saved=True), bits_kernel=True))) == 1
    assert len(faster_masks(on_cuda(fused_dropout(2)))) == 1


@pytest.mark.parametrize("bits_kernel", [True, False])
def test_on_cuda_narrowing_takes_memory_where_a_mask_is_saved_and_a_table_lies_there(bits_kernel: bool) -> None:
    """A plan may run where the kernel is missing."""
    profile = on_cuda(fused_dropout(), bits_kernel=bits_kernel)
    planned = with_bits(profile)
    (narrowing,) = (op for op in planned.ops if op.name == NARROW)
    assert narrowing.workspace_bytes == SIZE + SIZE // 8
    assert planned.values[-1].size_bytes == 2048
    assert not any(op.workspace_bytes for op in with_bits(fused_dropout()).ops)
    problems = build_problem(profile), build_problem(planned)
    without, memory_bytes = (simulate(one, keep_all(one)).memory_bytes for one in problems)
    tick = int(problems[1].point_ticks[0]) - 1
    assert memory_bytes[tick] - without[tick] == 2048 + SIZE + SIZE // 8
    numbers = with_bits(on_cuda(dropout()))
    assert numbers.values[-1].size_bytes == 4 * 2048


def test_a_budget_that_narrowing_would_break_is_planned_for_without_bits() -> None:
    profile = on_cuda(last_in_forward())
    smallest = smallest_budget(profile)
    assert swap_all_on_demand(build_problem(with_bits(profile))).peak_bytes > smallest
    made = plan(profile, smallest, evaluations=50)
    assert made.prediction.peak_bytes <= smallest
    assert not any(value.bits for value in made.values)


def last_in_forward() -> Profile:
    """A step whose least memory is that of the moment where a mask is saved."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096)], [4 * SIZE], saves=[], seconds=1.0)
    (wide,) = r.op("linear", [stem], [4 * SIZE], seconds=1.0)
    out, _ = fused(r, wide, SIZE, seconds=1.0, saves=[])
    r.op("sum", [out, stem], [512], saves=[], seconds=1.0, in_graph=False)
    return of_bools(r.finish(link(1e-3)))


def test_a_mask_is_what_chance_fills_and_numbers_scale() -> None:
    profile = dropout()
    ((_, value),) = masks_of(profile).items()
    assert bits_bytes(profile, value) == SIZE // 32
    ops = tuple(msgspec.structs.replace(op, name=op.name.replace("bernoulli", "uniform")) for op in profile.ops)
    assert masks_of(msgspec.structs.replace(profile, ops=ops)) == {}
    integers = tuple(msgspec.structs.replace(one, dtype="int32") for one in profile.values)
    assert masks_of(msgspec.structs.replace(profile, values=integers)) == {}


def test_a_mask_that_is_written_later_or_small_or_quickly_drawn_has_no_bits() -> None:
    assert masks_of(dropout(written=True)) == {}
    assert masks_of(dropout(size=8192)) == {}
    assert faster_masks(dropout(drawn_s=1e-3)) == {}
    assert len(faster_masks(dropout(drawn_s=1e-3, lost=True))) == 1


def test_a_mask_is_widened_or_drawn_again() -> None:
    graph = build_problem(with_bits(dropout())).replay
    assert graph.of(1).inputs == (0,)
    assert graph.recorded_by(1) == {1, 2, 3}
    assert widening_seconds(dropout(), masks_of(dropout())[0], 4) == graph.of(1).seconds
    assert build_problem(with_bits(dropout(lost=True))).replay.replays[0] is None


def test_whether_a_plan_holds_bits_does_not_depend_on_whether_they_are_faster() -> None:
    profile, fast = dropout(), dropout(drawn_s=1e-3)
    made = held(profile, with_bits)
    assert as_planned(profile, made) == with_smaller(profile)
    slow = tuple(msgspec.structs.replace(op, duration_s=1.0) for op in profile.ops)
    for other in (fast, msgspec.structs.replace(profile, ops=slow)):
        assert len(as_planned(other, made).points) == len(fast.points) + 1
    assert made.rows()["bits of masks"] == "keep 1 (2.00 KiB)"


def test_without_narrow_a_plan_holds_no_bits() -> None:
    profile = mask_profile(0)
    budget_bytes = budget_at(profile, 0.5)
    assert any(value.bits for value in plan(profile, budget_bytes, evaluations=50).values)
    assert not any(value.bits for value in plan(profile, budget_bytes, evaluations=50, without=["narrow"]).values)
    with pytest.raises(UsageError, match="expected sources or narrow, found 'bits'"):
        plan(profile, budget_bytes, without=["bits"])


def test_a_plan_file_that_replays_bits_alone_is_refused(tmp_path: Any) -> None:
    made = held(dropout(), with_bits)
    drawn = with_decisions(dropout(), made, {made.values[0].name: "recompute"})
    actions = [msgspec.structs.replace(one, replay=(0, 1)) if one.replay else one for one in drawn.schedule]
    path = msgspec.structs.replace(drawn, schedule=tuple(actions)).save(tmp_path / "alone.json")
    with pytest.raises(InputFileError, match="expected no bits, which are never replayed but for their mask"):
        Plan.load(path)
