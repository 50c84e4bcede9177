"""A session is the same one, whoever has opened it: its members, its defaults, what it does where steps do not keep to
what was promised, and what it explains.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan import Plan, Session
from poochplan.errors import PoochError
from poochplan.formats.profile import preset_link
from poochplan.runtime.devices.cpu import CpuDevice, choose_spill_dir
from poochplan.units import format_bytes
from tests.online.runs import opened, run_auto, run_plain
from tests.online.trainings import Training, batch, blocks, dropout_and_batch_norm, loss_of, plain
from tests.runtime.besides import fresh, profiled, tight
from tests.runtime.nets import LINK

pytestmark = pytest.mark.cpu_device
MEMBERS = {
    *("plan", "plans", "profile", "profiles", "last", "total", "report", "arena", "explain_peak", "wait_until_planned"),
    *("step", "away", "close", "model"),
}


def test_apply_and_auto_give_one_class_with_the_members_of_the_page(tmp_path: Path) -> None:
    model = fresh()
    profile = profiled(model, None)
    given = poochplan.apply(tight(profile), model, profile=profile)
    studied = poochplan.auto(model, budget="60%", cache=tmp_path, quiet=True, link=LINK)
    assert type(given) is type(studied) is poochplan.Session
    assert {name for name in dir(given) if not name.startswith("_")} == MEMBERS
    page = (Path(__file__).parents[2] / "docs" / "session.md").read_text()
    assert [name for name in MEMBERS - {"model"} if f"`{name}" not in page] == []
    assert (given.plans, given.profiles) == ({"": given.plan}, {"": profile})
    assert given.profile is profile
    assert given.wait_until_planned()
    assert "predicted peak" in given.explain_peak()
    assert (studied.plan, studied.plans, studied.profile, studied.arena, studied.explain_peak()) == (
        *(None, {}, None, None, ""),
    )


class Telling(CpuDevice):
    """A device whose allocator tells of 64 KiB too much from the fourth metered step on, until it was heard."""

    budget_bytes = 1 << 60

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(choose_spill_dir(None))
        self.begun = 0

    def start_step_peak(self) -> None:
        self.begun += 1

    def step_peak_bytes(self) -> int:
        return Telling.budget_bytes + (1 << 16) if self.begun == 4 else 0


def test_a_studied_plan_that_was_broken_is_made_anew_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poochplan.online.auto.open_device", Telling)
    plans: list[Plan] = []

    def look(session: Session) -> None:
        if session.profile is not None:
            session.wait_until_planned(120)
        if session.plan is not None and all(session.plan is not one for one in plans):
            plans.append(session.plan)
            Telling.budget_bytes = session.plan.budget_bytes

    with pytest.warns(RuntimeWarning, match="another plan is made that has room for [0-9.]+ KiB more") as told:
        found = run_auto(lambda: plain(blocks()), "80%", tmp_path, 40, look=look, is_metered=False, arena="off")
    report = found.session.report()
    assert len([one for one in told if "another plan" in str(one.message)]) == 1
    first, second = plans
    assert second.static_bytes != first.static_bytes
    assert 0 < report.steps_followed < report.total.steps
    assert report.status == "partly followed"


class OutsideTorch(torch.autograd.Function):
    """Nothing can compute its result again, so a plan swaps it whatever the machine's times are."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(rows)
        result.numpy()[:] = rows.numpy().clip(0)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * (ctx.saved_tensors[0] > 0)


class Clipped(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> Any:
        return OutsideTorch.apply(rows)  # type: ignore[no-untyped-call]


def test_copies_slower_than_measured_are_told_and_planned_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def clipped() -> Training:
        return plain(blocks(6, Clipped))

    link = preset_link("nvlink2")
    options = {"link": link, "throttle": "8MB/s", "quiet": False, "arena": "off", "is_metered": False}
    found = run_auto(clipped, "45%", tmp_path, 30, **options)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "were predicted: copies" in line)
    assert "another plan is made" in said
    assert found.session.plan is not None
    slower = found.session.profile.link
    assert slower.outward.bandwidth_bytes_per_s < link.outward.bandwidth_bytes_per_s
    assert found.losses == run_plain(clipped, 30, is_metered=False).losses


def test_a_session_explains_the_in_core_peak_and_then_the_planned_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    training, texts = dropout_and_batch_norm(), []
    with opened(training, tmp_path) as session:
        assert session.explain_peak() == ""
        for number in range(30):
            training.turn(number)
            if session.profile is not None:
                texts.append(session.explain_peak())
                session.wait_until_planned()
    assert texts[0].startswith(f"predicted peak {format_bytes(session.profile.in_core_peak_bytes)} in-core: in ")
    first = texts[-1].splitlines()[0]
    assert f" of a budget of {format_bytes(session.plan.budget_bytes)}, measured " in first
    assert f"measured {format_bytes(session.total.peak_bytes)}: in " in first
    assert texts[-1] == session.explain_peak()


def test_a_report_before_there_is_a_plan_says_so(tmp_path: Path) -> None:
    model = blocks(2)
    with poochplan.auto(model, budget="60%", cache=tmp_path, quiet=True, link=LINK) as session:
        loss_of(model, batch(64)).backward()
        gc.collect()
        report = session.report()
    assert str(report).splitlines()[0] == "1 step without a plan so far"
    assert (report.budget_bytes, report.predicted_peak_bytes, report.steps_followed) == (0, 0, 0)


def test_errors_are_public() -> None:
    for name in ("BudgetExceededError", "DivergenceError", "InfeasibleError", "UsageError", "SpillError", "StepError"):
        assert issubclass(getattr(poochplan, name), PoochError)
