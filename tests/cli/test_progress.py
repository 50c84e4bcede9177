"""Work that takes long shows a bar on a terminal's stderr, and nothing anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from poochplan.cli.plan import share_done
from poochplan.planner.search.allowance import Progress
from poochplan.profiler.request import STAGES, stage_share
from tests.cli.conftest import Pooch

BAR = "━"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # what rich asks in place of isatty
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("terminal")
def test_a_sweep_shows_a_bar_on_a_terminal_and_its_data_stays_on_stdout(pooch: Pooch, profile_path: Path) -> None:
    sweep = (
        "sweep",
        profile_path,
        "-o",
        "s.csv",
        "--points",
        "2",
        "--policies",
        "swap-all,keep-all",
        "--processes",
        "1",
    )
    result = pooch(*sweep, "--processes", "1", "--json")
    assert result.code == 0
    assert BAR in result.err
    assert BAR not in result.out
    assert "4 of 4 done, last keep-all within" in result.err


@pytest.mark.usefixtures("terminal")
def test_profiling_and_planning_show_one_too(pooch: Pooch, workloads: Path) -> None:
    profiled = pooch("profile", f"{workloads}:small", "--iterations", "1", "-o", "p.json", "--force")
    assert profiled.code == 0
    assert BAR in profiled.err
    planned = pooch("plan", "p.json", "--budget", "90%", "--evaluations", "50", "-o", "plan.json")
    assert planned.code == 0
    assert BAR in planned.err


def test_there_is_none_where_stderr_is_no_terminal(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "90%", "--policy", "greedy", "-o", "p.json")
    assert (result.code, result.err) == (0, "")


def test_the_stages_of_profiling_come_one_after_another() -> None:
    told = ["warming up (2 steps)", "capturing one step", "measuring the link", "timing 5 steps", "verifying replays"]
    shares = [stage_share(text) for text in told]
    assert shares == sorted({share for share in shares if share is not None})
    assert len({*shares}) == len(told) <= len(STAGES)
    assert stage_share("mode auto chose run: it fits") is None


def test_the_share_of_a_search_is_what_it_has_used_of_what_it_may() -> None:
    progress = Progress(step_s=1.0, bound_s=0.9, overhead=0.1, gap=0.1, left=25.0, is_counted=True)
    assert share_done(progress, 100) == 0.75
    assert share_done(progress, 10) == 0.0
