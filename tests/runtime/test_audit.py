"""Writes that no version counter shows and that begin late: told within the bound, and gradients are right then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import AuditError
from poochplan.formats.plan import Decision, Plan
from tests.runtime.nets import Case, Loop, of, our_warnings, train
from tests.runtime.random_plans import decided, random_plan

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]

Write = Callable[[torch.Tensor], object]
SWAP, REPLAY = (0, 1, 0), (0, 0, 1)
BEGINS = 3


class Late(nn.Module):
    """``write`` is called with an activation behind its save, or with fresh zeros before any, once it is not None."""

    write: Write | None = None

    def __init__(self, *, before: bool = False) -> None:
        super().__init__()
        self.layers, self.before = nn.ModuleList(nn.Linear(24, 24) for _ in range(3)), before

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.softmax(layer(batch), -1)
            fresh = torch.zeros_like(hidden)
            if self.write is not None:
                self.write(fresh if self.before else hidden)
            batch = torch.sin(hidden * 8 + batch) * torch.exp(0.1 * fresh)
        return batch


def _data_copy(tensor: torch.Tensor) -> object:
    return tensor.data.copy_(tensor.round(decimals=1) + 0.25)


def _data_sub(tensor: torch.Tensor) -> object:
    return tensor.data.sub_(0.5)


def _numpy(tensor: torch.Tensor) -> object:
    return np.add(tensor.detach().numpy(), 0.25, out=tensor.detach().numpy())


def _numpy_rows(tensor: torch.Tensor) -> object:
    return tensor.detach().numpy().__iadd__(0.25)


def _dlpack(tensor: torch.Tensor) -> object:
    return torch.from_dlpack(tensor.detach()).add_(0.5)


def _foreach(tensor: torch.Tensor) -> object:
    return torch._foreach_add_([tensor.data], 0.5)


def _memset(tensor: torch.Tensor) -> object:
    return ctypes.memset(tensor.data_ptr() + 8, 0x3D, tensor.nbytes - 8)


def _a_few_bytes(tensor: torch.Tensor) -> object:
    return ctypes.memset(tensor.data_ptr() + 49, 0x3D, 3)


LIBRARY = torch.library.Library("poochaudit", "DEF")
LIBRARY.define("lies(Tensor x) -> Tensor")
LIBRARY.impl("lies", lambda x: (np.add(x.numpy(), 0.5, out=x.numpy()), x.new_zeros(1))[1], "CPU")


def _lying(tensor: torch.Tensor) -> object:
    return torch.ops.poochaudit.lies(tensor.detach())


RECORDED = _data_copy, _data_sub, _foreach
"""The recorder sees these: a replay writes them again, as long as it is on."""
WRITES = [_data_copy, _data_sub, _numpy, _dlpack, _foreach, _memset, _a_few_bytes, _lying]


def gradients_of(
    case: Case, steps: int, write: Write | None, plan: Plan | None, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[list[torch.Tensor]], Any, list[str]]:
    """What each step gives, with a write from step ``BEGINS`` on; the report, and what was said."""
    begun = 0

    def late(place: str) -> None:
        nonlocal begun
        begun += place == "step"
        for kind in (Late, Parts):
            patch.setattr(kind, "write", staticmethod(write) if write is not None and begun > BEGINS else None)

    with our_warnings() as said:
        seen, report = train(case, steps, plan, late, **options)
    return seen, report, said


def differing(case: Case, steps: int, write: Write, plan: Plan, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The steps whose own gradients differ from those of in-core, each from the planned loop's weights; and the rest.

    Weights that differ once differ for ever, so these networks do not learn.
    """
    wanted, _, _ = gradients_of(case, steps, write, None, patch)
    seen, report, said = gradients_of(case, steps, write, plan, patch, **options)
    wrong = [
        number
        for number, (left, right) in enumerate(zip(wanted, seen, strict=True))
        if not all(map(torch.equal, left, right))
    ]
    return wrong, report, said


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


CASES = {
    "after the save": of(Late, 20, 24, optimizer=_still),
    "before the save": of(lambda: Late(before=True), 20, 24, optimizer=_still),
}


class Gates(nn.Module):
    """Parts of one storage, each written in its own time: that of an LSTM's cell on the CPU, and one by hand."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.cell, self.widen, self.by_hand = nn.LSTMCell(24, 24), nn.Linear(24, 72), by_hand

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:
            state = None
            for _ in range(3):
                state = self.cell(batch, state)
            return state[0]  # type: ignore[index, no-any-return]
        first, second, third = self.widen(batch).unsafe_chunk(3, 1)
        return first.sigmoid_() * torch.exp(second.mul_(0.5)) + third.tanh_()


GATES = {"cell": of(lambda: Gates(by_hand=False), 20, 24), "by hand": of(lambda: Gates(by_hand=True), 20, 24)}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("way", [SWAP, REPLAY])
@pytest.mark.parametrize("has_room", [True, False])
def test_what_forward_writes_beside_a_saved_part_of_a_storage_is_no_difference(
    kind: str, way: tuple[float, float, float], has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = random_plan(GATES[kind].profile(), 0, way)
    options: dict[str, Any] = {"arena": "off"} if has_room else {"meter": "never"}
    wanted, _, _ = gradients_of(GATES[kind], 24, None, None, monkeypatch)
    seen, report, said = gradients_of(GATES[kind], 24, None, plan, monkeypatch, **options)
    assert all(torch.equal(*both) for steps in zip(wanted, seen, strict=True) for both in zip(*steps, strict=True))
    assert said == []
    assert report.total.audited_values >= 24
    assert report.total.audit_differences == 0


@pytest.mark.parametrize("kind", GATES)
def test_nor_is_it_one_in_a_step_that_swaps_without_a_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(GATES[kind].profile(), 0, SWAP)
    larger = of(lambda: Gates(by_hand=kind == "by hand"), 30, 24)
    _, report, said = gradients_of(larger, 24, None, plan, monkeypatch)
    assert report.total.fallbacks > 0
    assert report.total.audited_values > 0
    assert (report.total.audit_differences, [text for text in said if "the audit" in text]) == (0, [])


def released(plan: Plan) -> int:
    return sum(value.decision is not Decision.KEEP for value in plan.values)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("where", CASES)
@pytest.mark.parametrize("way", [SWAP, REPLAY])
@pytest.mark.parametrize("has_room", [True, False])
def test_a_late_write_is_told_within_the_bound_and_then_right(
    write: Write, where: str, way: tuple[float, float, float], has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[where]
    plan = random_plan(case.profile(), 0, way)
    bound = released(plan)
    # without room, and under an arena, checksums are compared
    options: dict[str, Any] = {"arena": "off"} if has_room else {"meter": "never"}
    wrong, report, said = differing(case, BEGINS + bound + 4, write, plan, monkeypatch, **options)
    is_exact = where == "before the save" if way == SWAP else write in RECORDED
    if is_exact:  # the copies have what was written, or replays write it again
        assert (wrong, said) == ([], [])
        return
    assert report.total.audit_differences > 0
    assert any("the audit found other bytes" in text for text in said)
    used = "backward has used the right ones" if has_room else "this step's gradients, and perhaps earlier ones, differ"
    assert any(used in text for text in said)
    assert len(wrong) < bound
    assert wrong == list(range(BEGINS, BEGINS + len(wrong)))


class Parts(nn.Module):
    """Three parts of one storage are saved one behind the other. A write comes to the last one, behind its save or
    between the saves.
    """

    write: Write | None = None

    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.widen, self.between = nn.Linear(24, 72), between

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first, second, third = self.widen(batch).chunk(3, 1)
        found = first.sin()
        if self.write is not None and self.between:
            self.write(third)
        found = found * second.sin() + third.sin()
        if self.write is not None and not self.between:
            self.write(third)
        return found.exp()  # a save while forward still holds the parts


PARTS = {
    "behind": of(lambda: Parts(between=False), 20, 24, optimizer=_still),
    "between": of(lambda: Parts(between=True), 20, 24, optimizer=_still),
}


@pytest.mark.parametrize(("where", "way"), [("behind", SWAP), ("behind", REPLAY), ("between", REPLAY)])
@pytest.mark.parametrize("has_room", [True, False])
def test_so_is_one_to_another_part_of_a_storage_than_was_saved_first(
    where: str, way: tuple[float, float, float], has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = PARTS[where]
    plan = random_plan(case.profile(), 0, way)
    assert any(value.decision is not Decision.KEEP and value.size_bytes == 20 * 72 * 4 for value in plan.values)
    options: dict[str, Any] = {"arena": "off"} if has_room else {"meter": "never"}
    wrong, report, said = differing(case, BEGINS + released(plan) + 4, _numpy_rows, plan, monkeypatch, **options)
    assert report.total.audit_differences > 0
    assert any("the audit found other bytes" in text for text in said)
    assert wrong == list(range(BEGINS, BEGINS + len(wrong)))
    assert len(wrong) < released(plan)


def test_without_it_steps_stay_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["before the save"]
    plan = random_plan(case.profile(), 0, REPLAY)
    wrong, report, said = differing(case, 30, _numpy, plan, monkeypatch, on_audit="off")
    assert wrong == list(range(BEGINS, 30))
    assert (report.total.audited_values, said) == (0, [])


@pytest.mark.parametrize("way", [SWAP, REPLAY])
def test_without_late_writes_nothing_is_said(way: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["after the save"]
    plan = random_plan(case.profile(), 0, way)
    wanted, _, _ = gradients_of(case, 8, None, None, monkeypatch)
    seen, report, said = gradients_of(case, 8, None, plan, monkeypatch)
    assert all(torch.equal(*both) for steps in zip(wanted, seen, strict=True) for both in zip(*steps, strict=True))
    assert said == []
    assert report.total.audited_values >= 8
    assert report.total.audit_differences == 0


@pytest.mark.parametrize("write", [_numpy, _memset])
@pytest.mark.parametrize(
    ("where", "way"), [("after the save", SWAP), ("after the save", REPLAY), ("before the save", REPLAY)]
)
def test_the_step_that_looks_for_all_that_is_wrong_is_told_once_if_it_is_above_the_budget(
    where: str, way: tuple[float, float, float], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[where]
    plan = random_plan(case.profile(), 0, way)
    _, report, _ = gradients_of(case, 3, None, msgspec.structs.replace(plan, budget_bytes=1 << 30), monkeypatch)
    tight = msgspec.structs.replace(plan, budget_bytes=report.total.peak_bytes)
    _, _, said = gradients_of(case, BEGINS + released(plan) + 4, write, tight, monkeypatch, arena="off")
    assert sum("kept every value beside to find all that is wrong, and took" in text for text in said) == 1


def test_it_can_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["before the save"]
    plan = random_plan(case.profile(), 0, REPLAY)
    with pytest.raises(AuditError, match="recomputed"):
        gradients_of(case, BEGINS + released(plan) + 1, _numpy, plan, monkeypatch, on_audit="error")


def test_a_plan_made_from_the_profile_keeps_what_has_differed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["before the save"]
    profile = case.profile()
    plan = decided(profile, [Decision.RECOMPUTE])
    loop, plans = Loop(case), []
    with poochplan.apply(plan, loop.model, profile=profile, arena="off") as session, our_warnings() as said:
        for number in range(BEGINS + released(plan) + 3):
            monkeypatch.setattr(Late, "write", staticmethod(_numpy) if number >= BEGINS else None)
            loop.step()
            plans.append(session.plan)
    assert plans[0] is plan
    assert "another plan is made that does so" in said[0]
    wrong = {value.name for value in plan.values if value.name in said[0]}
    assert wrong
    assert all(one.decision is Decision.KEEP for one in plans[-1].values if one.name in wrong)
    assert session.report().last_step.audit_differences == 0


def test_where_no_plan_can_keep_it_steps_go_on_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["before the save"]
    profile = case.profile()
    budget_bytes = poochplan.smallest_budget(profile) // 2
    plan = msgspec.structs.replace(decided(profile, [Decision.RECOMPUTE]), budget_bytes=budget_bytes)
    steps = BEGINS + released(plan) + 4
    options: dict[str, Any] = {"profile": profile, "arena": "off", "meter": "never"}
    wrong, report, said = differing(case, steps, _numpy, plan, monkeypatch, **options)
    told = [text for text in said if "the audit found" in text]
    assert told
    assert all("and steps may exceed the budget: if they are kept, " in text for text in told)
    assert report.total.audit_differences > 0
    assert all(number < steps - 3 for number in wrong)


def test_what_steps_swap_without_their_plan_is_audited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(CASES["after the save"].profile(), 0, SWAP)
    larger = of(Late, 30, 24, optimizer=_still)
    wrong, report, said = differing(larger, 90, _data_copy, plan, monkeypatch)
    assert report.total.fallbacks > 0
    assert report.total.audit_differences > 0
    assert any("of those that a step without a plan swaps" in text for text in said)
    assert wrong
    assert max(wrong) < 70
