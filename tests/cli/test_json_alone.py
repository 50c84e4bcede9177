"""Under ``--json`` the descriptor of stdout carries the data alone, whatever libraries write to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner import smallest_budget
from tests.planner.random_profiles import transformer_like
from tests.processes import ROOT

GREETING = "Running HiGHS 1.16.0"
POOCH = "import sys; from poochplan.cli import main; sys.exit(main())"
GREETS = f"""
import ctypes, sys
import highspy

class Greeting(highspy.Highs):
    def __init__(self):
        super().__init__()
        ctypes.CDLL(None).puts(b"{GREETING}")

highspy.Highs = Greeting
{POOCH}
"""
"""``pooch`` beside a HiGHS that greets on C's stdout, as 1.16 does and 1.15 did not."""
PLANS = f"""
import ctypes, sys
import highspy

class Greeting(highspy.Highs):
    def enableCallbacks(self):
        if self.getOptionValue("output_flag")[1]:
            ctypes.CDLL(None).puts(b"{GREETING}")
        super().enableCallbacks()

highspy.Highs = Greeting
import poochplan
poochplan.plan(poochplan.Profile.load(sys.argv[1]), int(sys.argv[2]), time_limit_s=2)
"""
"""A program beside a HiGHS that greets unless it was told before to be silent: what 1.16 does."""
WORKLOAD = """
import ctypes, os, sys, threading
import torch, poochplan

stdout = sys.stdout

def prints() -> poochplan.Workload:
    model, inputs = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), torch.randn(64, 8)
    ctypes.CDLL(None).puts(b"C, to its buffer")
    stdout.write("Python, to a stream of before")
    writer = threading.Thread(target=os.write, args=(1, b"a thread, to the descriptor"))
    writer.start()
    writer.join()
    return poochplan.Workload(model, lambda: model(inputs).square().mean())
"""


def run(code: str, *arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    call = [*launcher, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    return transformer_like(8).save(tmp_path / "p.json")


def budget_near_the_smallest(path: Path) -> int:
    """Bytes at which simple rules do not come near the bound, so that the solver is asked."""
    profile = Profile.load(path)
    smallest = smallest_budget(profile)
    return smallest + (profile.in_core_peak_bytes - smallest) // 10


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_what_the_solver_prints_is_not_among_the_data(profile_file: Path, verb: str, tmp_path: Path) -> None:
    budget = budget_near_the_smallest(profile_file)
    asked = ("--budget", budget) if verb == "plan" else ("--budgets", budget, "--policies", "ilp")
    done = run(GREETS, verb, profile_file, *asked, "--time-limit", 2, "--json", "-o", tmp_path / f"made.{verb}.json")
    assert done.returncode in (0, 4), done.stderr
    assert json.loads(done.stdout)
    assert GREETING in done.stderr


def test_in_python_the_solver_prints_nothing(profile_file: Path) -> None:
    done = run(PLANS, profile_file, budget_near_the_smallest(profile_file))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_a_workload_prints_is_not_among_the_data(tmp_path: Path) -> None:
    path, made = tmp_path / "loud.py", tmp_path / "p.json"
    path.write_text(WORKLOAD)
    done = run(POOCH, "profile", f"{path}:prints", "--mode", "fake", "--roofline", "v100", "--json", "-o", made)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["in_core_peak_bytes"] == Profile.load(made).in_core_peak_bytes
    for line in ("C, to its buffer", "Python, to a stream of before", "a thread, to the descriptor"):
        assert line in done.stderr


def test_stdout_is_stdout_again_behind_the_command(profile_file: Path) -> None:
    behind = "import os; print('Python'); sys.stdout.flush(); os.write(1, b'C')"
    done = run(f"{POOCH.replace('sys.exit(main())', 'main()')}; {behind}", "show", profile_file, "--json")
    assert done.stdout.endswith("}\nPython\nC")


def test_without_a_stdout_the_plan_is_made_all_the_same(profile_file: Path, tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    plan = ("plan", profile_file, "--budget", "90%", "--json", "--evaluations", 50, "-o", made)
    done = run(POOCH, *plan, launcher=("sh", "-c", 'exec "$0" "$@" >&-'))
    assert done.returncode == 0, done.stderr
    assert Plan.load(made).budget_bytes
