"""Steps of tensors that are too small to count have a smallest budget and plans, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.cli import main
from poochplan.errors import UsageError
from poochplan.formats.profile import Memory, Profile
from poochplan.planner.sweep import default_budgets
from tests.runtime.nets import Net, taken
from tests.runtime.served import needs_compiler

Arena = Literal["auto", "on", "off"]


def tiny() -> tuple[nn.Module, torch.Tensor]:
    """Of three numbers: 12 bytes, where a block of less than 64 counts nothing."""
    weight = nn.Parameter(torch.ones(3))
    return Net(lambda its, batch: (its.weight * batch).tanh().exp().sum(), weight=weight), torch.ones(3)


def profile_of(mode: str) -> Profile:
    model, batch = tiny()
    return taken(lambda: model(batch), model, mode=mode)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of("run")


@pytest.mark.parametrize("arena", ["auto", "on", "off"])
@pytest.mark.parametrize("mode", ["run", "swap-all", "fake"])
def test_the_smallest_budget_has_a_plan_that_is_followed(mode: str, arena: Arena) -> None:
    profile, (model, batch) = profile_of(mode), tiny()
    live = msgspec.structs.replace(profile, memory=Memory.LIVE, in_core_peak_bytes=profile.in_core_live_peak_bytes)
    for found in (live, profile):
        plan = poochplan.plan(found, poochplan.smallest_budget(found, arena=arena), evaluations=10, arena=arena)
    with poochplan.apply(plan, model) as session:
        for _ in range(2):
            model(batch).backward()
    assert session.report().total.fallbacks == 0


@needs_compiler
def test_every_budget_above_nothing_has_one(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile.in_core_peak_bytes == 0 or profile.memory is Memory.LIVE
    for budget in ("60%", 0.5, 1, "1KiB", *default_budgets(profile)):
        plan = poochplan.plan(profile, budget, evaluations=10)
        assert plan.budget_bytes >= 1
        assert plan.prediction.peak_bytes <= plan.budget_bytes
    command = ["plan", str(profile.save(tmp_path / "profile.json")), "-o", str(tmp_path / "plan.json"), "--force"]
    for asked in (["--min"], ["--budget", "60%"], ["--budget", "1KiB"]):
        assert main([*command, *asked]) == 0
        assert "everything is kept" in capsys.readouterr().out


@pytest.mark.parametrize("budget", [0, "0", "0%", 0.0, "0GiB"])
def test_nothing_is_no_budget(profile: Profile, budget: str | float) -> None:
    with pytest.raises(UsageError, match=r"^budget: expected .*, found '0[^']*'; a budget is more than nothing$"):
        poochplan.plan(profile, budget)
