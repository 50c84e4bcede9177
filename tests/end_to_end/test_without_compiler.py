"""With a compiler that fails each way in says so once, in one line, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.online.caches import costs_are_known
from tests.planner.random_profiles import unet_like
from tests.processes import python, stderr_of

EVALUATOR = "could not build the evaluator: part.cpp:1:1: error: no such header"
ALLOCATOR = "could not build the allocator: part.cpp:1:1: error: no such header"

ASKS_FOR_A_PLAN = """
    import sys
    from poochplan.formats.profile import Profile
    from poochplan.planner.planning import plan
    profile = Profile.load(sys.argv[1])
    for _ in range(2):
        plan(profile, "70%", evaluations=20, arena="off")
"""
CALLS_POOCH = """
    import sys
    from poochplan.cli import main
    sys.exit(main(sys.argv[1:]))
"""
TRAINS = """
    import sys, torch, poochplan
    from torch import nn
    def trained(is_planned):
        torch.manual_seed(0)
        inner = [nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)]
        model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), *inner, nn.Linear(64, 4))
        optimizer, found = torch.optim.AdamW(model.parameters()), []
        session = poochplan.auto(model, optimizer, budget="85%", cache=sys.argv[1], time_limit_s=0.5, quiet=QUIET)
        def loop(after):
            for _ in range(30):
                optimizer.zero_grad()
                loss = model(torch.randn(1500, 48)).square().mean()
                loss.backward()
                found.extend([loss.detach(), *(one.grad.clone() for one in model.parameters())])
                optimizer.step()
                after(len(found))
        if not is_planned:
            loop(lambda _: None)
            return found
        with session:
            loop(lambda count: count > 60 and session.wait_until_planned(60))
            report = session.report()
        assert report.steps_followed >= 5, report
        assert session.total.peak_bytes <= session.plan.budget_bytes
        return found
    torch.set_num_threads(1)
    assert all(map(torch.equal, trained(True), trained(False)))
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """A folder, and the variables of a process that has a compiler that fails and no caches."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'part.cpp:1:1: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    costs_are_known()
    unet_like(2).save(tmp_path / "step.profile.json")
    return tmp_path, {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "caches"), "OMP_NUM_THREADS": "1"}


def test_plan_says_once_why_plans_are_found_more_slowly(told: tuple[Path, dict[str, str]]) -> None:
    folder, environment = told
    said = stderr_of(ASKS_FOR_A_PLAN, folder / "step.profile.json", **environment)
    assert said.count(EVALUATOR) == said.count("without it plans are found about a hundred times more slowly") == 1


def test_pooch_plan_and_the_doctor_say_it_once(told: tuple[Path, dict[str, str]]) -> None:
    folder, environment = told
    call = "plan", folder / "step.profile.json", "--budget", "70%", "--evaluations", "20", "--arena", "off"
    lines = stderr_of(CALLS_POOCH, *call, **environment).splitlines()
    (line,) = [line for line in lines if EVALUATOR in line]
    assert line.startswith("pooch: warning: poochplan: ")
    assert "without it plans are found about a hundred times more slowly; set CXX to another compiler" in line
    findings = json.loads(python(CALLS_POOCH, "doctor", "--json", **environment))["findings"]
    (found,) = [one for one in findings if EVALUATOR in one["found"]]
    assert (found["name"], found["status"]) == ("evaluator", "warning")
    assert found["advice"].endswith("without it plans are found about a hundred times more slowly")


def test_auto_says_it_once_for_each_part_and_trains_with_the_same_bits_within_the_budget(
    told: tuple[Path, dict[str, str]],
) -> None:
    folder, environment = told
    said = stderr_of(TRAINS.replace("QUIET", "True"), folder / "plans", **environment)
    assert said.count(EVALUATOR) == said.count(ALLOCATOR) == 1
    assert said.count("without it budgets cover live tensors and not the memory inside ops") == 1
