"""Ctrl-C while ``pooch plan`` searches: the best plan is written, and the exit code says that it could be better."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

from poochplan.cli.plan import progress_line
from poochplan.formats.plan import Plan
from poochplan.planner import smallest_budget
from poochplan.planner.search.allowance import Progress
from tests.planner.checker import check
from tests.planner.random_profiles import transformer_like
from tests.processes import ROOT

POOCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from poochplan.cli import main
sys.exit(main())
"""
SEARCHING = b"slower than any possible plan"


def interrupted(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``pooch`` that is interrupted when its progress line tells of a plan."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-c", POOCH, *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
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
        if SEARCHING in said and not is_sent:
            running.send_signal(signal.SIGINT)
            is_sent = True
    os.close(ours)
    out, _ = running.communicate()
    return running.returncode, out.decode(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())


def test_an_interrupt_writes_the_best_plan_says_so_in_one_line_and_prints_its_data(tmp_path: Path) -> None:
    profile = transformer_like(16)
    profile.save(tmp_path / "large.profile.json")
    smallest = smallest_budget(profile)
    budget = smallest + (profile.in_core_peak_bytes - smallest) // 10
    given = ["--budget", str(budget), "--gap", "1e-12", "--time-limit", "600", "--json"]
    files = [str(tmp_path / "large.profile.json"), "-o", str(tmp_path / "plan.json")]
    code, out, said = interrupted(["plan", *files, *given])
    assert code == 4
    made = Plan.load(tmp_path / "plan.json")
    assert made.solve.status == json.loads(out)["solve"]["status"] == "interrupted"
    assert check(profile, made).peak_bytes <= made.budget_bytes
    (line,) = (line for line in said.replace("\r", "\n").split("\n") if line.startswith("pooch:"))
    assert line.startswith("pooch: error: an interrupt ended the search")
    assert str(tmp_path / "plan.json") in line
    assert "Traceback" not in said
    assert "Wrote" in said


def test_the_progress_line_says_how_far_it_is() -> None:
    progress = Progress(step_s=1.1, bound_s=1.0, overhead=0.1234, gap=0.0567, left=12.3, is_counted=False)
    assert progress_line(progress) == "best so far +12.34%, at most 5.67% slower than any possible plan, 12 s left"
    counted = Progress(step_s=1.1, bound_s=1.0, overhead=0.1234, gap=0.0567, left=12345, is_counted=True)
    assert progress_line(counted).endswith("12,345 simulations left")
