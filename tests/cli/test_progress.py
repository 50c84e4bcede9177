"""Work that takes long shows a bar on a terminal's stderr, and its data stay on stdout."""

from __future__ import annotations

import pytest

from poochplan.cli.plan import share_done
from poochplan.planner.search.allowance import Progress
from poochplan.profiler.request import STAGES, stage_share
from tests.cli.conftest import Pooch

BAR = "━"


def test_on_a_terminal_long_work_shows_a_bar_and_none_is_among_the_data(
    pooch: Pooch, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # what rich asks in place of isatty
    monkeypatch.setenv("COLUMNS", "200")
    for work in (
        f"profile {small} --iterations 1 -o p.json",
        "plan p.json --budget 90% --evaluations 50 -o plan.json",
        "sweep p.json -o s.csv --points 2 --policies swap-all,keep-all --processes 1",
    ):
        result = pooch.ok(work, "--json")
        assert BAR in result.err
        assert BAR not in result.out
    assert "4 of 4 done, last keep-all within" in result.err


def test_the_stages_of_profiling_come_one_after_another() -> None:
    told = ["warming up (2 steps)", "capturing one step", "measuring the link", "timing 5 steps", "verifying replays"]
    shares = [stage_share(text) for text in told]
    assert shares == sorted({share for share in shares if share is not None})
    assert len({*shares}) == len(told) <= len(STAGES)
    assert stage_share("mode auto chose run: it fits") is None


def test_the_share_of_a_search_is_what_it_has_used_of_what_it_may() -> None:
    progress = Progress(step_s=1.0, bound_s=0.9, overhead=0.1, gap=0.1, left=25.0, is_counted=True)
    assert (share_done(progress, 100), share_done(progress, 10)) == (0.75, 0.0)
