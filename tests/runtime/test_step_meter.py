"""When steps are metered: all by an allocator that tells, elsewhere the first, those that grow, and one in fifty."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.messages import CallSite
from poochplan.runtime.metering import allocated
from poochplan.runtime.metering.census import LEAST_BYTES, census, leave_out
from poochplan.runtime.metering.holders import name_of
from poochplan.torch_private.tensor_internals import mode_stack, storage_identity
from tests.runtime.besides import BATCH, WIDTH, fresh, live, profiled, tight
from tests.runtime.nets import our_warnings
from tests.runtime.served import needs_compiler

pytestmark = pytest.mark.cpu_device


class Telling(CpuDevice):
    """A device with an allocator that tells what a step took."""

    def __init__(self, peaks: list[int]) -> None:
        super().__init__()
        self.peaks_of_steps = peaks
        self.begun = 0

    def start_step_peak(self) -> None:
        self.begun += 1

    def step_peak_bytes(self) -> int:
        return self.peaks_of_steps[min(self.begun, len(self.peaks_of_steps)) - 1]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tight(profiled(fresh(), None))


def step(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()


def metered(plan: Plan, count: int, after_each: Callable[[int], object] = int, **options: Any) -> list[int | None]:
    """The metered peaks of so many steps."""
    model, peaks = fresh(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with poochplan.apply(plan, model, **options) as session:
        for number in range(1, count + 1):
            step(model)
            optimizer.step()
            peaks.append(session.report().last_step.peak_bytes)
            after_each(number)
    return peaks


def test_an_allocator_that_tells_is_asked_in_every_step(plan: Plan) -> None:
    plan = msgspec.structs.replace(live(plan), budget_bytes=10 * plan.budget_bytes)
    peaks = [5, 6, 7, 8, plan.budget_bytes + 1, 9]
    device = Telling(peaks)
    with pytest.warns(RuntimeWarning, match=f"took {plan.budget_bytes + 1} bytes, more than its budget") as told:
        assert metered(plan, len(peaks), device=lambda: device) == peaks
    assert device.begun == len(peaks)
    assert len(told) == 1


@needs_compiler
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_without_the_allocator_a_plan_of_allocated_bytes_is_compared_with_what_its_ops_take_inside_as_predicted(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocated, "_counted", lambda: None)
    peaks = metered(plan, 4)
    assert peaks[2:] == [None, None], "nothing tells of steps whose ops are not metered"
    assert peaks[1] is not None
    assert 0.9 * plan.prediction.peak_bytes <= peaks[1] <= plan.prediction.peak_bytes


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_live_bytes_are_metered_in_the_first_two_steps_and_one_in_fifty(plan: Plan) -> None:
    peaks = metered(live(plan), 101)
    assert [number for number, peak in enumerate(peaks, 1) if peak is not None] == [1, 2, 50, 100]


@needs_compiler
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("is_live", "profiles", "told"), [(True, 8, 1), (True, 2, 0), (True, 0, 0), (False, 8, 0)])
def test_a_loop_that_is_profiled_in_every_step_hears_once_that_its_peaks_are_not_known_if_they_are_not(
    plan: Plan, is_live: bool, profiles: int, told: int
) -> None:
    with our_warnings() as said, ExitStack() as profiled:

        def begin_next(number: int) -> None:
            profiled.close()
            if number < profiles:
                profiled.enter_context(torch.profiler.profile())

        begin_next(0)
        peaks = metered(live(plan) if is_live else plan, 8, begin_next)
    assert sum("a profiler of yours runs in steps whose memory is to be metered" in text for text in said) == told
    assert (peaks[profiles:] + peaks[:1])[0] is not None or told


def test_allocated_bytes_are_metered_in_every_step(plan: Plan) -> None:
    for peak_bytes in metered(plan, 6):
        assert peak_bytes is not None
        assert 0.9 * plan.prediction.peak_bytes <= peak_bytes <= plan.prediction.peak_bytes


@pytest.mark.parametrize(
    ("is_live", "wanted"), [pytest.param(False, 11, marks=needs_compiler), (True, 50)], ids=["allocated", "live"]
)
def test_what_is_kept_is_told_of_once_a_census_has_seen_it_too(plan: Plan, is_live: bool, wanted: int) -> None:
    """And a meter that starts late knows what lives already."""
    kept: list[torch.Tensor] = []
    told_at: list[int] = []

    def after_each(number: int) -> None:
        told_at.extend(number for one in caught if "variable kept of " in str(one.message))
        caught.clear()
        if number == 9:
            kept.append(torch.zeros(BATCH, WIDTH))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metered(live(plan) if is_live else plan, wanted + 2, after_each)
    assert told_at == [wanted]


def test_a_census_finds_what_python_holds_whatever_its_class_and_leaves_out_what_is_asked_to() -> None:
    class Volume(torch.Tensor):
        pass

    plain = torch.zeros(LEAST_BYTES)
    view = plain[:3]
    subclass = torch.zeros(LEAST_BYTES).as_subclass(Volume)
    sparse = torch.eye(LEAST_BYTES).to_sparse()
    small = torch.zeros(3)
    copy = torch.zeros(LEAST_BYTES)
    leave_out([copy])
    found = census("cpu")
    assert {storage_identity(x.untyped_storage()) for x in (plain, view, subclass)} <= found.keys()
    assert storage_identity(sparse._values().untyped_storage()) in found
    assert storage_identity(small.untyped_storage()) not in found
    assert storage_identity(copy.untyped_storage()) not in found
    assert census("cuda") == {}


class Keeper:
    def __init__(self) -> None:
        self.cache = {"first": [torch.zeros(3)]}


def test_who_holds_a_tensor_is_named_by_the_nearest_name() -> None:
    def name_in_a_function(thing: torch.Tensor) -> str:
        return name_of([thing], [])

    keeper = Keeper()
    assert name_of([keeper.cache["first"][0]], []) == "Keeper.cache"
    assert name_in_a_function(torch.zeros(3)) == "variable thing of name_in_a_function()"


def test_a_place_is_left_when_its_function_has_ended() -> None:
    def enter() -> CallSite:
        place = CallSite.of_caller()
        assert not place.is_left
        return place

    places = [enter() for _ in range(2)]
    here = CallSite.of_caller()
    assert [place.is_left for place in places] == [True, True]
    assert not here.is_left


def test_an_optimizer_that_steps_in_backward_leaves_no_mode_of_ours_behind(plan: Plan) -> None:
    """Within a backward no mode can be taken off the stack: only once it is over."""
    model = fresh()
    last = next(model.parameters())
    optimizer = torch.optim.SGD([last], lr=0.1)
    last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = mode_stack()
    with poochplan.apply(plan, model, meter="always"):
        step(model)
    assert mode_stack() == before
