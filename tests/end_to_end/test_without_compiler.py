"""With a compiler that fails each way in says so once, in one line, and training goes on."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from poochplan.formats.plan import Plan
from tests.online.caches import costs_are_known
from tests.planner.random_profiles import unet_like
from tests.processes import python, stderr_of
from tests.runtime.served import plan_of

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
    import hashlib, json, os, sys, warnings, torch, poochplan
    from torch import nn
    from tests.live_bytes import outside_meter
    torch.set_num_threads(1)

    def made():
        torch.manual_seed(0)
        inner = [nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)]
        model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), *inner, nn.Dropout(0.2), nn.Linear(64, 4))
        return model, torch.optim.AdamW(model.parameters())

    def loop(model, optimizer, after=lambda number: None):
        torch.manual_seed(1)
        found = []
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(1500, 48)).square().mean()
            loss.backward()
            results = [loss.detach(), *(one.grad for one in model.parameters())]
            found += [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in results]
            del loss, results
            optimizer.step()
            after(number)
        return found

    def under(meter, session, model, optimizer):
        planned = []
        def after(number):
            if not planned and (session.plans or (number > 8 and session.wait_until_planned(60))):
                planned.append(number)
                meter.restart()
        with session:
            if session.plans:
                planned.append(-1)
            meter.restart()
            found = loop(model, optimizer, after)
            followed = session.report().steps_followed
        assert STEPS - planned[0] - 1 <= followed <= STEPS - max(0, planned[0]), (followed, planned)
        assert session.total.peak_bytes <= session.plan.budget_bytes
        assert meter.peak <= session.plan.budget_bytes, (meter.peak, session.plan.budget_bytes)
        moved = session.last.out_bytes, session.last.replayed_values
        assert max(moved) > 0
        return found, [count > 0 for count in moved]

    def auto(meter, **options):
        model, optimizer = made()
        given = dict(budget="85%", cache=sys.argv[1], time_limit_s=0.5)
        return under(meter, poochplan.auto(model, optimizer, **given, **options), model, optimizer)

    def apply(meter, link=None, **options):
        model, optimizer = made()
        step = lambda: model(torch.randn(1500, 48)).square().mean()
        profile = poochplan.profile(step, model=model, optimizer=optimizer, link=link)
        session = poochplan.apply(poochplan.plan(profile, "85%", time_limit_s=0.5), model, **options)
        return under(meter, session, model, optimizer)

    plain = loop(*made())
"""
ENDS = """
    with outside_meter() as meter:
        found, moved = RUN
    assert found == plain
"""
MEETS_NOTHING = """
    import sys, traceback
    from poochplan.formats.profile import Link, LinkDirection, RuntimeCost
    from poochplan.profiler.trials import machine_facts
    own = RuntimeCost(handle_s=1e-5, swap_s=1e-4, record_s=5e-6, replay_s=5e-6, unpack_s=5e-6, fetch_s=5e-5)
    machine_facts.known_cost = lambda _: machine_facts.Measured(own, 1e-6)  # there is no folder to keep it in
    told = []
    warnings.simplefilter("always")
    warnings.showwarning = lambda text, *_, **__: told.append(str(text))
    sys.excepthook = lambda *error: traceback.print_exception(*error, file=sys.stdout)
    CLOSED
    moved = []
    with outside_meter() as meter:
        for rate in (1e12, 1e3):
            way = LinkDirection(latency_s=0.0, bandwidth_bytes_per_s=rate)
            link = Link(name="given", outward=way, inward=way)
            found, ways = RUN(meter, link=link)
            assert found == plain
            moved.append(ways)
    print(json.dumps([told, moved]))
"""
FROM_A_FILE = """
    import sys, poochplan
    from poochplan.formats.plan import Plan
    from tests.runtime.nets import CASES
    model, step, _ = CASES["residual"].fresh()
    for _ in range(2):
        with poochplan.apply(Plan.load(sys.argv[1]), model, meter="never", quiet=True):
            step().backward()
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


def said_by(run: str, folder: Path, environment: dict[str, str], before: str = "") -> list[str]:
    """What a loop says that trains with the same bits, and within its budget from the plan on."""
    code = textwrap.dedent(before) + textwrap.dedent(TRAINS + ENDS).replace("RUN", run).replace("STEPS", "30")
    return stderr_of(code, folder, **environment).splitlines()


def test_auto_says_it_once_for_each_part_and_trains_on(told: tuple[Path, dict[str, str]]) -> None:
    folder, environment = told
    said = "".join(said_by("auto(meter, quiet=True)", folder / "plans", environment))
    assert said.count(EVALUATOR) == said.count(ALLOCATOR) == 1
    assert said.count("without it budgets cover live tensors and not the memory inside ops") == 1


NOWHERE = {"XDG_CACHE_HOME": "/proc/nowhere"}
"""A folder that nobody can make."""
NO_COMPILER = {"PATH": "/nonexistent", "CXX": ""}
NO_HOME = """
    import os, pathlib
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    def home():
        raise RuntimeError("Could not determine home directory.")
    pathlib.Path.home = home
"""
LACKING: dict[str, tuple[str, dict[str, str], str, str]] = {
    "no compiler": ("auto(meter, before_plan='swap')", NO_COMPILER, "", "expected a C++ compiler, found none of c++"),
    "no folder": ("auto(meter, arena='off')", NOWHERE, "", "cannot be made"),
    "no compiler, apply": ("apply(meter)", NO_COMPILER, "", "expected a C++ compiler, found none of c++, g++, clang++"),
    "no folder, apply": ("apply(meter, arena='off')", NOWHERE, "", "cannot be made"),
    "no home, apply": ("apply(meter, on_over_budget='error')", {}, NO_HOME, "cannot be made"),
}


@pytest.mark.parametrize("kind", LACKING)
def test_a_loop_without_an_allocator_follows_its_plan_and_one_line_names_the_cause(
    kind: str, told: tuple[Path, dict[str, str]]
) -> None:
    folder, environment = told
    run, changed, before, cause = LACKING[kind]
    lines = said_by(run, folder / "plans", environment | changed, before)
    (line,) = [line for line in lines if "without it budgets cover live tensors" in line]
    assert cause in line


def test_a_plan_from_a_file_whose_arena_cannot_be_had_says_it_once_without_a_meter(
    told: tuple[Path, dict[str, str]],
) -> None:
    folder, environment = told
    plan_of("residual").save(folder / "step.plan.json")
    assert Plan.load(folder / "step.plan.json").layout is not None
    nothing_built = environment | NO_COMPILER | {"XDG_CACHE_HOME": str(folder / "empty")}
    said = stderr_of(FROM_A_FILE, folder / "step.plan.json", **nothing_built)
    assert said.count("expected a C++ compiler, found none") == said.count("budgets cover live tensors") == 1


@pytest.mark.parametrize(("run", "closed"), [("auto", "os.close(2)"), ("apply", "sys.stderr = None")])
def test_in_a_bare_container_a_loop_swaps_and_replays_within_its_budget_and_one_line_names_each_lack(
    run: str, closed: str, told: tuple[Path, dict[str, str]]
) -> None:
    """Without a compiler, a home, and a stderr. ``tests/packaging/machine.sh`` takes more away."""
    environment = told[1]
    code = textwrap.dedent(NO_HOME) + textwrap.dedent(TRAINS + MEETS_NOTHING).replace("RUN", run)
    code = code.replace("STEPS", "60").replace("CLOSED", closed)
    lines, moved = json.loads(python(code, NOWHERE["XDG_CACHE_HOME"], **environment | NO_COMPILER))
    assert moved == [[True, False], [False, True]]
    (line,) = [line for line in lines if "without it budgets cover live tensors" in line]
    assert "expected a C++ compiler, found none" in line
    assert all(lines.count(one) <= len(moved) for one in lines), "once for each session"
