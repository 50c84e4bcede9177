"""What torch's own allocator reserves, beside the model of it and beside what plans say."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Plan
from poochplan.planner.arena.caching_allocator import LARGE_SEGMENT_BYTES, CachingAllocator
from poochplan.torch_private.cuda_internals import allocator_settings, set_allocator
from tests.nullgpu.test_on_null_gpu import CASE, WHERE, _budget

MIB = 1 << 20
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
            assert torch.cuda.memory_reserved(WHERE) - before_bytes == model.reserved_bytes


def _set() -> tuple[str, bool]:
    found = allocator_settings()
    return found["PYTORCH_CUDA_ALLOC_CONF"], found["expandable_segments"]


def _trained(plan: Plan, steps: int = 4, **options: object) -> tuple[poochplan.Report, list[str]]:
    model, step, optimizer = CASE.fresh()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with poochplan.apply(plan, model, **options) as session:  # type: ignore[arg-type]
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                step().backward()
                optimizer.step()
            report = session.report()
    return report, [str(one.message) for one in said if "poochplan: " in str(one.message)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    profile = CASE.profile()
    return poochplan.plan(profile, _budget(profile, 0.5), time_limit_s=2, on="allocated")


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
