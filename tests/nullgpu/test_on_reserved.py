"""What torch's own allocator reserves, beside the model of it and beside what plans say."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import poochplan
from poochplan.cli import main
from poochplan.formats.plan import Plan
from poochplan.planner.arena.caching_allocator import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, CachingAllocator
from poochplan.planner.arena.reserved import On, in_core_bytes
from poochplan.runtime.engine.audit import RESULT_BYTES, SCRATCH_BYTES
from poochplan.torch_private.cuda_internals import allocator_settings, can_trace_memory, set_allocator
from tests.gpu.cases import CASES
from tests.nullgpu.test_on_null_gpu import CASE, PLANNED_BY, WHERE, _budget
from tests.runtime.nets import LINK

MIB = 1 << 20
OTHER_ORDER_BYTES = SMALL_SEGMENT_BYTES if torch.__version__.startswith("2.12.") else 0
"""Torch 2.12 takes free blocks of one size in another order than those before and after it."""
EXPANDING = pytest.mark.parametrize("is_expandable", [False, True], ids=["fixed segments", "expandable segments"])


@pytest.fixture
def segments(is_expandable: bool) -> Iterator[bool]:
    torch.cuda.empty_cache()
    set_allocator(f"expandable_segments:{is_expandable}")
    yield is_expandable
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:False")
    set_allocator("")


@EXPANDING
@pytest.mark.parametrize("seed", range(3))
def test_the_model_reserves_what_the_allocator_does(segments: bool, seed: int) -> None:
    """On a stream of its own, whose blocks no other stream gets, so that its segments are empty at first."""
    draw, model, held = random.Random(seed), CachingAllocator(is_expandable=segments), []
    before_bytes = torch.cuda.memory_reserved(WHERE)
    with torch.cuda.stream(torch.cuda.Stream(WHERE)):
        for _ in range(600):
            if held and draw.random() < 0.5:
                tensor, piece = held.pop(draw.randrange(len(held)))
                del tensor
                model.free(piece)
            else:
                size_bytes = draw.choice((draw.randint(1, MIB), draw.randint(MIB, 90 * MIB), draw.randint(1, 4096)))
                held.append((torch.empty(size_bytes, dtype=torch.uint8, device=WHERE), model.allocate(size_bytes)))
            found_bytes = torch.cuda.memory_reserved(WHERE) - before_bytes
            assert abs(found_bytes - model.reserved_bytes) <= OTHER_ORDER_BYTES


def _set() -> tuple[str, bool]:
    found = allocator_settings()
    return found["PYTORCH_CUDA_ALLOC_CONF"], found["expandable_segments"]


def _trained(
    plan: Plan, steps: int = 4, between: Callable[[int], None] = lambda number: None, **options: object
) -> tuple[poochplan.Report, list[str]]:
    model, step, optimizer = CASE.fresh()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with poochplan.apply(plan, model, **options) as session:  # type: ignore[arg-type]
            for number in range(steps):
                between(number)
                optimizer.zero_grad(set_to_none=True)
                step().backward()
                optimizer.step()
            report = session.report()
    return report, [str(one.message) for one in said if "poochplan: " in str(one.message)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    profile = CASE.profile()
    return poochplan.plan(profile, _budget(profile, 0.5), time_limit_s=2, on="allocated")


def test_a_profile_knows_in_which_order_an_op_takes_its_blocks() -> None:
    by_name = {op.name: op for op in CASES["residual"].profile().ops if op.workspace_bytes and op.outputs}
    assert any(one.output < 0 for op in by_name.values() for one in op.blocks), "memory that the op gives back inside"
    assert any(one.output >= 0 for op in by_name.values() for one in op.blocks)
    assert can_trace_memory(), "the trace has ended"


def test_a_trace_of_the_users_goes_on_and_then_blocks_are_not_known() -> None:
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        assert not any(op.blocks for op in CASE.new_profile().ops)
        assert not can_trace_memory()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_segments_expand_within_a_session_and_not_after_it(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    before = _set()
    with poochplan.apply(plan, CASE.fresh()[0]):
        assert _set() == ("expandable_segments:True", True)
    assert _set() == before == ("", False)
    assert "is taken in expandable segments within this session" in capsys.readouterr().err


@pytest.mark.parametrize("theirs", ["expandable_segments:False", "max_split_size_mb:64", "expandable_segments:True"])
def test_what_the_user_has_set_stays(plan: Plan, theirs: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_allocator(theirs)
    try:
        before = _set()
        with poochplan.apply(plan, CASE.fresh()[0]):
            assert _set() == before
        assert _set() == before
        assert f"is taken as you have set it ({theirs})" in capsys.readouterr().err
    finally:
        set_allocator("expandable_segments:False")
        set_allocator("")


@EXPANDING
def test_a_plan_says_what_is_reserved(plan: Plan, segments: bool) -> None:
    """To one segment: of the step's tensors five fill one, and what the model has before lies in some."""
    report, _ = _trained(plan)
    assert report.memory is not None
    assert report.predicted_reserved_bytes == plan.prediction.reserved_with(segments)
    assert report.memory.reserved_bytes == pytest.approx(report.predicted_reserved_bytes, abs=LARGE_SEGMENT_BYTES)
    assert "predicted reserved" in str(report)
    assert "predicted reserved" in plan.rows()


def test_by_default_a_budget_covers_reserved_bytes_and_a_share_is_one_of_them(tmp_path: Path) -> None:
    profile = CASE.profile()
    plans = {on: poochplan.plan(profile, "80%", time_limit_s=1, on=on) for on in (None, "reserved", "allocated")}
    assert [plans[on].on for on in plans] == ["reserved", "reserved", "allocated"]
    assert plans[None].budget_bytes == plans["reserved"].budget_bytes
    assert plans["allocated"].budget_bytes == 8 * profile.in_core_peak_bytes // 10
    in_core = poochplan.plan(profile, 1 << 40).prediction.reserved_peak_bytes
    assert in_core is not None
    assert plans[None].budget_bytes == 8 * in_core // 10
    report, said = _trained(plans[None], steps=8)
    assert report.memory is not None
    assert report.memory.reserved_bytes <= plans[None].budget_bytes
    assert report.memory.retries == 0
    assert not said
    most_bytes, found = SCRATCH_BYTES + RESULT_BYTES * 8, plans[None].prediction
    assert report.total.audited_values > 0, "by checksums: a value beside may take the hole of a larger one"
    assert (report.total.peak_bytes or 0) <= max(found.peak_bytes, found.first_step_peak_bytes) + most_bytes
    profile.save(tmp_path / "profile.json")
    files = [str(tmp_path / "profile.json"), "-o", str(tmp_path / "plan.json"), "--force"]
    for on, given in ((None, []), ("reserved", ["--on", "reserved"]), ("allocated", ["--on", "allocated"])):
        assert main(["plan", *files, "--budget", "80%", "--time-limit", "1", *given]) == 0
        found = Plan.load(tmp_path / "plan.json")
        assert (found.on, found.budget_bytes) == (plans[on].on, plans[on].budget_bytes)


@pytest.mark.parametrize("on", [None, "allocated"])
def test_auto_keeps_to_reserved_bytes_unless_it_is_told_otherwise(on: On | None, tmp_path: Path) -> None:
    model, step, optimizer = CASE.fresh()
    options: dict[str, Any] = {"cache": tmp_path, "link": LINK, "time_limit_s": 0.5, "quiet": True}
    budget_bytes = 9 * in_core_bytes(CASE.profile(), on) // 10
    with poochplan.auto(model, optimizer, budget=budget_bytes, on=on, **options) as session:
        for number in range(PLANNED_BY + 8):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
            if number == PLANNED_BY:
                session.wait_until_planned(60)
        last = session.last
        assert session.plan is not None
        assert session.profile is not None
        assert session.plan.on == (on or "reserved")
        assert session.plan.budget_bytes == budget_bytes
        assert last.reserved_bytes is not None
        assert last.peak_bytes is not None
        assert (last.reserved_bytes if on is None else last.peak_bytes) <= session.plan.budget_bytes


def test_a_step_for_which_the_cache_was_emptied_is_told_and_planned_again_with_less() -> None:
    """What another stream has cached is in the way of a user's own cap."""
    profile = CASE.profile()
    plan = poochplan.plan(profile, "150%", time_limit_s=1)
    torch.cuda.empty_cache()
    cap_bytes = plan.budget_bytes - 2 * LARGE_SEGMENT_BYTES

    def between(number: int) -> None:
        if number == 2:
            torch.cuda.empty_cache()
            with torch.cuda.stream(torch.cuda.Stream(WHERE)):
                torch.empty(cap_bytes - torch.cuda.memory_reserved(WHERE) - MIB, dtype=torch.uint8, device=WHERE)

    options: dict[str, Any] = {"profile": profile, "cap_bytes": cap_bytes, "on_over_budget": "replan"}
    report, said = _trained(plan, 8, between, **options)
    told = [one for one in said if "its allocator emptied its cache and tried again" in one]
    assert told == said
    assert len(told) == 1
    assert "steps follow a plan that has room for" in told[0]
    assert report.memory is not None
    assert report.memory.retries > 0
    assert report.budget_bytes == plan.budget_bytes


def test_an_excess_of_reserved_bytes_is_told_once_and_planned_again(plan: Plan) -> None:
    """As a plan of another allocator's would: what it says is less than what the budget has."""
    less = msgspec.structs.replace(plan.prediction, reserved_peak_bytes=MIB)
    wrong = msgspec.structs.replace(plan, on="reserved", prediction=less)
    report, said = _trained(wrong)
    assert [one for one in said if "of the GPU's memory in a step that follows the plan" in one] == said
    assert len(said) == 1
    assert report.memory is not None
    assert report.memory.reserved_bytes > wrong.budget_bytes
    _, said = _trained(plan)
    assert not said
