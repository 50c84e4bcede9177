"""``pooch`` in a process of its own: data alone on stdout, whatever libraries write to it, and Ctrl-C in a search."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poochplan.cli.plan import progress_line, share_done
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner import smallest_budget
from poochplan.planner.search.allowance import Progress
from tests.forks import forked
from tests.planner.checker import check
from tests.planner.random_profiles import transformer_like
from tests.processes import ROOT
from tests.runtime.served import needs_compiler

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


def begun(
    code: str, *arguments: object, launcher: tuple[str, ...] = (sys.executable,), **streams: Any
) -> subprocess.Popen[bytes]:
    shown = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "TERM": "xterm", "COLUMNS": "200"}
    call = [*launcher, "-c", code, *map(str, arguments)]
    return subprocess.Popen(call, env={**os.environ, **shown}, stdout=subprocess.PIPE, **streams)


def run(code: str, *arguments: object, ends_with: tuple[int, ...] = (0,), launcher: tuple[str, ...] = ()) -> list[str]:
    """What it printed on stdout and on stderr. By itself a fork: its streams are its own as a process's are."""
    running = begun(code, *arguments, launcher=launcher or tuple(forked()), stderr=subprocess.PIPE)
    out, err = (told.decode() for told in running.communicate())
    assert running.returncode in ends_with, err
    return [out, err]


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
    options = *asked, "--time-limit", 2, "--json", "-o", tmp_path / f"made.{verb}.json"
    out, err = run(GREETS, verb, profile_file, *options, ends_with=(0, 4))
    assert json.loads(out)
    assert GREETING in err


def test_in_python_the_solver_prints_nothing(profile_file: Path) -> None:
    assert run(PLANS, profile_file, budget_near_the_smallest(profile_file))[0] == ""


def test_what_a_workload_prints_is_not_among_the_data(tmp_path: Path) -> None:
    path, made = tmp_path / "loud.py", tmp_path / "p.json"
    path.write_text(WORKLOAD)
    fake = "--mode", "fake", "--roofline", "v100", "--json", "-o", made
    out, err = run(POOCH, "profile", f"{path}:prints", *fake)
    assert json.loads(out)["in_core_peak_bytes"] == Profile.load(made).in_core_peak_bytes
    for line in ("C, to its buffer", "Python, to a stream of before", "a thread, to the descriptor"):
        assert line in err


def test_stdout_is_stdout_again_behind_the_command(profile_file: Path) -> None:
    behind = "import os; print('Python'); sys.stdout.flush(); os.write(1, b'C')"
    out, _ = run(f"{POOCH.replace('sys.exit(main())', 'main()')}; {behind}", "show", profile_file, "--json")
    assert out.endswith("}\nPython\nC")


def test_without_a_stdout_the_plan_is_made_all_the_same(profile_file: Path, tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    plan = ("plan", profile_file, "--budget", "90%", "--json", "--evaluations", 50, "-o", made)
    run(POOCH, *plan, launcher=("sh", "-c", 'exec "$0" "$@" >&-', sys.executable))
    assert Plan.load(made).budget_bytes


def interrupted(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``pooch`` that is interrupted when its progress line tells of a plan."""
    ours, theirs = pty.openpty()
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {POOCH}"
    running = begun(code, *arguments, stderr=theirs)
    os.close(theirs)
    said, is_sent = b"", False
    while True:
        try:
            some = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not some:
            break
        said += some
        if b"slower than any possible plan" in said and not is_sent:
            running.send_signal(signal.SIGINT)
            is_sent = True
    os.close(ours)
    out, _ = running.communicate()
    return running.returncode, out.decode(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())


@needs_compiler
def test_an_interrupt_writes_the_best_plan_says_so_in_one_line_and_prints_its_data(tmp_path: Path) -> None:
    profile = transformer_like(16)
    file, plan = profile.save(tmp_path / "large.profile.json"), tmp_path / "plan.json"
    given = "--budget", budget_near_the_smallest(file), "--gap", "1e-12", "--time-limit", "600", "--json"
    code, out, said = interrupted("plan", file, "-o", plan, *given)
    assert code == 4
    made = Plan.load(plan)
    assert made.solve.status == json.loads(out)["solve"]["status"] == "interrupted"
    assert check(profile, made).peak_bytes <= made.budget_bytes
    (line,) = (line for line in said.replace("\r", "\n").split("\n") if line.startswith("pooch:"))
    assert line.startswith("pooch: error: an interrupt ended the search")
    assert str(plan) in line
    assert "Traceback" not in said
    assert "Wrote" in said


def test_the_progress_line_says_how_far_it_is() -> None:
    progress = Progress(step_s=1.1, bound_s=1.0, overhead=0.1234, gap=0.0567, left=12.3, is_counted=False)
    assert progress_line(progress) == "best so far +12.34%, at most 5.67% slower than any possible plan, 12 s left"
    counted = Progress(step_s=1.1, bound_s=1.0, overhead=0.1234, gap=0.0567, left=12345, is_counted=True)
    assert progress_line(counted).endswith("12,345 simulations left")
    assert (share_done(counted, 4 * 12345), share_done(counted, 12344)) == (0.75, 0.0), "used of what it may"
