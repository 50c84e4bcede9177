"""What is as planned passes by one compiled call, which does what the engine of Python does there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan
from poochplan.runtime.devices.cpu import CallingThread, CpuDevice
from poochplan.runtime.engine.engine import Engine
from tests.runtime.nets import CASES, Case, Loop, Net, either_way, equal, followed, in_core, of, train
from tests.runtime.random_plans import random_plan
from tests.runtime.tapes import COMPILED

pytestmark = [pytest.mark.cpu_device, pytest.mark.parametrize("tape", [COMPILED], indirect=True)]

STEPS = 3


@pytest.fixture(name="calls")
def calls_of_python(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a hook's work was Python's."""
    found = Counter[str]()

    def counted(name: str) -> None:
        ordinary = getattr(Engine, name)

        def call(self: Engine, given: Any) -> Any:
            found[name] += 1
            return ordinary(self, given)

        monkeypatch.setattr(Engine, name, call)

    counted("_pack")
    counted("_unpack")
    return found


def keeping(case: Case) -> Plan:
    """A plan that keeps all values."""
    return random_plan(case.profile(), 0, (1, 0, 0))


@pytest.mark.parametrize("name", CASES)
def test_only_the_first_and_the_last_save_of_a_step_that_keeps_all_are_pythons(name: str, calls: Counter[str]) -> None:
    case = CASES[name]
    plan = keeping(case)
    in_core(case, STEPS)
    case.profile()
    calls.clear()
    followed(case, plan, STEPS, meter="never", arena="off")
    unusual = sum(not value.dtype.startswith(("float", "bfloat")) for value in plan.values)
    assert calls["_pack"] <= STEPS * (3 + unusual) < STEPS * len(plan.handles)
    assert calls["_unpack"] <= 2 * STEPS < STEPS * len(plan.uses)


@pytest.mark.parametrize("weights", [(6, 1, 1), (1, 3, 3), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("name", ["attention", "residual", "autocast", "recurrent"])
def test_what_leaves_among_values_that_stay_passes_by_that_call_too_and_comes_back(
    name: str, weights: tuple[int, int, int], calls: Counter[str]
) -> None:
    case = CASES[name]
    plan = random_plan(case.profile(), 1, weights)
    in_core(case, STEPS)
    calls.clear()
    followed(case, plan, STEPS, meter="never", arena="off")
    unusual = sum(not value.dtype.startswith(("float", "bfloat")) for value in plan.values)
    assert calls["_pack"] <= STEPS * (3 + unusual) < STEPS * len(plan.handles)
    assert calls["_unpack"] <= 2 * STEPS < STEPS * len(plan.uses)


def test_a_step_that_departs_amid_values_that_stay_gives_the_right_gradients() -> None:
    """Another network shares the first half of the planned one's saves."""

    def net(stops: bool) -> Case:
        def body(self: Any, rows: torch.Tensor) -> torch.Tensor:
            for number in range(6):
                rows = torch.tanh(self.layers[number](rows))
                if stops and number == 3:
                    return rows.exp() * rows.sin()
            return rows

        def build() -> nn.Module:
            return Net(body, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(6)))

        return of(build, 4, 8)

    plan, other = keeping(net(stops=False)), net(stops=True)
    found, report = train(other, STEPS, plan, meter="never")
    assert equal(found, in_core(other, STEPS))
    assert report is not None
    assert report.total.fallbacks == STEPS


def test_a_kept_value_that_is_written_in_place_ends_in_autograds_error_as_in_core() -> None:
    case = of(lambda: Net(lambda self, rows: self.layer(rows).exp(), layer=nn.Linear(8, 8)), 4, 8)
    plan = keeping(case)

    def use(model: nn.Module, step: Any, session: Any) -> None:
        rows = torch.ones(4, 8)
        made = model(rows)
        made.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()

    either_way(case, plan, use, is_followed=False, meter="never")


def test_nothing_is_held_behind_the_step_and_the_session() -> None:
    case = CASES["residual"]
    loop = Loop(case)
    with poochplan.apply(keeping(case), loop.model, meter="never") as session:
        for _ in range(STEPS):
            loop.step()
        assert session.report().total.fallbacks == 0
        assert not session._attachment.engine.segment.left_over_storages()


def test_a_handle_that_outlives_its_session_gives_back_what_was_saved() -> None:
    case = CASES["attention"]
    plan = keeping(case)
    model, step, _ = case.fresh()
    torch.manual_seed(1)
    step().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    again, step, _ = case.fresh()
    torch.manual_seed(1)
    with poochplan.apply(plan, again, meter="never"):
        loss = step()
    loss.backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(wanted, again.parameters(), strict=True))


def test_each_value_belongs_to_the_stream_on_which_it_was_saved() -> None:
    def build() -> nn.Module:
        return Net(
            lambda self, rows: self.last(self.first(rows).exp()).exp().sin().cos(), first=linear(), last=linear()
        )

    def linear() -> nn.Linear:
        return nn.Linear(8, 8)

    case = of(build, 4, 8)
    plan, (model, step, _) = keeping(case), case.fresh()
    device = CpuDevice()
    streams = device.compute, CallingThread()
    model.last.register_forward_pre_hook(lambda *_: setattr(device, "compute", streams[1]))  # type: ignore[union-attr]
    with poochplan.apply(plan, model, meter="never", device=lambda: device) as session:
        loss = step()
        records = session._attachment.engine.tape.registered()
        values = [record.value() for record in records if record.value is not None]
        homes = {
            value.index: [value.home is one for one in streams].index(True) for value in values if value is not None
        }
        loss.backward()  # type: ignore[no-untyped-call]
    assert [homes[index] for index in sorted(homes)] == [0, 0, 1, 1, 1]


def test_hooks_take_the_time_that_they_report() -> None:
    _, report = train(CASES["attention"], STEPS, keeping(CASES["attention"]), meter="never")
    assert report is not None
    assert 0 < report.total.hooks_s < 1
