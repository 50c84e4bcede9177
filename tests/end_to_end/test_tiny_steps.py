"""Steps of tensors that are too small to count have a smallest budget and plans, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.cli import main
from poochplan.errors import UsageError
from poochplan.formats.profile import Memory, Profile
from poochplan.planner.sweep import default_budgets
from tests.runtime.nets import LINK

Arena = Literal["auto", "on", "off"]


class Tiny(nn.Module):
    """Of three numbers: 12 bytes, where a block of less than 64 counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch).tanh().exp().sum()


def taken(mode: Any) -> Profile:
    model, batch = Tiny(), torch.ones(3)
    iterations = None if mode == "fake" else 1
    return poochplan.profile(lambda: model(batch), model=model, mode=mode, iterations=iterations, link=LINK)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return taken("run")


@pytest.mark.parametrize("arena", ["auto", "on", "off"])
@pytest.mark.parametrize("mode", ["run", "swap-all", "fake"])
def test_the_smallest_budget_has_a_plan_that_is_followed(mode: str, arena: Arena) -> None:
    profile, model, batch = taken(mode), Tiny(), torch.ones(3)
    live = msgspec.structs.replace(profile, memory=Memory.LIVE, in_core_peak_bytes=profile.in_core_live_peak_bytes)
    for found in (live, profile):
        plan = poochplan.plan(found, poochplan.smallest_budget(found, arena=arena), evaluations=10, arena=arena)
    with poochplan.apply(plan, model) as session:
        for _ in range(2):
            model(batch).backward()
    assert session.report().total.fallbacks == 0


def test_every_budget_above_nothing_has_one(profile: Profile) -> None:
    assert profile.in_core_peak_bytes == 0 or profile.memory is Memory.LIVE
    for budget in ("60%", 0.5, 1, "1KiB", *default_budgets(profile)):
        plan = poochplan.plan(profile, budget, evaluations=10)
        assert plan.budget_bytes >= 1
        assert plan.prediction.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("budget", [0, "0", "0%", 0.0, "0GiB"])
def test_nothing_is_no_budget(profile: Profile, budget: str | float) -> None:
    with pytest.raises(UsageError, match=r"^budget: expected .*, found '0[^']*'; a budget is more than nothing$"):
        poochplan.plan(profile, budget)


@pytest.mark.parametrize("asked", [["--min"], ["--budget", "60%"], ["--budget", "1KiB"]])
def test_pooch_plans_for_it(
    profile: Profile, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = profile.save(tmp_path / "profile.json")
    assert main(["plan", str(file), *asked, "-o", str(tmp_path / "plan.json")]) == 0
    assert "everything is kept" in capsys.readouterr().out


@pytest.mark.parametrize("budget", ["0%", "0", "0.0"])
def test_pooch_refuses_nothing_in_one_line(
    profile: Profile, budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = profile.save(tmp_path / "profile.json")
    assert main(["plan", str(file), "--budget", budget]) != 0
    *_, line = capsys.readouterr().err.splitlines()  # behind advice on the profile
    assert line.startswith("pooch: error: budget: ")
    assert line.endswith(f"found '{budget}'; a budget is more than nothing")
