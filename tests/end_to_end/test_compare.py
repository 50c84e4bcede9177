"""The comparison with other methods tells who keeps gradients and budgets, and who does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.against import turns
from benchmarks.against.asking import COMPILED, IN_CORE, OURS, Ask
from benchmarks.against.campaign import Campaign, wanted_rows
from benchmarks.against.compare_table import BEGIN, END, bits, put_into_page, table, verdicts
from benchmarks.against.methods import BROKEN_CHECKPOINT, CHECKPOINT, SAC
from benchmarks.against.rows import Effort, Wanted, as_in_core, changes_gradients, first_difference, is_honest
from benchmarks.against.turns import RefusedError, asked
from tests.forks import forked
from tests.runtime.served import needs_compiler

SHARES = ["50%", "5%"]
ONE_PAIR = {"pairs": 1, "threads": 1, "time_limit_s": 1.0}
pytestmark = [needs_compiler, pytest.mark.cpu_device]


@pytest.fixture(scope="module", autouse=True)
def _processes_begin_with_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "PYTHON", forked())
        yield


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """Checkpointing, and ours at one budget, on a small network with dropout."""
    folder = tmp_path_factory.mktemp("compare")
    found = Campaign(Effort(**ONE_PAIR, folder=str(folder)), str(folder / "found.json"), {}, "")  # type: ignore[arg-type]
    for method, at in ((CHECKPOINT, ""), (OURS, "50%")):
        found.take(Wanted("tiny-mlp", method, at))
    return found


def row(campaign: Campaign, method: str) -> dict[str, Any]:
    return next(row for row in campaign.found["rows"] if row["method"] == method)


def metered(network: str, method: str, folder: Path) -> dict[str, Any]:
    """Steps of a process of their own."""
    return asked(Ask(what="metered", network=network, method=method, folder=str(folder)), 1)


def test_ours_and_checkpointing_take_less_than_in_core_with_its_gradients(campaign: Campaign) -> None:
    for one in (row(campaign, CHECKPOINT), row(campaign, OURS)):
        assert one["gradients"] == one["buffers"] == one["parameters"] == "equal"
        assert one["peak_bytes"] < 0.8 * one["in_core_peak_bytes"]
        assert one["time"]["pairs"] == len(one["pairs_s"]) == 1
        assert is_honest(one)
    ours = row(campaign, OURS)
    assert ours["peak_bytes"] <= ours["budget_bytes"]
    assert ours["allocator"] == "arena"


def test_rows_of_the_file_are_not_taken_again(campaign: Campaign) -> None:
    known = row(campaign, CHECKPOINT)
    assert campaign.take(Wanted("tiny-mlp", CHECKPOINT)) is known
    written = json.loads(Path(str(campaign._output)).read_text(encoding="utf-8"))
    assert [one["method"] for one in written["rows"]] == [CHECKPOINT, OURS]


def test_who_exceeds_a_budget_is_named(campaign: Campaign) -> None:
    assert "EXCEEDS" not in table(campaign.found)
    known = row(campaign, OURS)
    less = known | {"budget_bytes": known["peak_bytes"] - 1}
    assert "**EXCEEDS**" in table(campaign.found | {"rows": [less]})


def test_the_fastest_other_is_one_that_meets_the_budget(campaign: Campaign) -> None:
    half, least = [line for line in verdicts(campaign.found, SHARES) if line.startswith("* tiny-mlp")]
    assert f"fastest other {CHECKPOINT}" in half
    assert "no other method meets it" in least


def test_a_checkpoint_that_draws_other_dropout_masks_is_named(campaign: Campaign, tmp_path: Path) -> None:
    in_core = campaign.found["bases"]["tiny-mlp"][IN_CORE]
    found = {"method": BROKEN_CHECKPOINT, "time": {}}
    found |= as_in_core(metered("tiny-mlp", BROKEN_CHECKPOINT, tmp_path), in_core)
    assert found["gradients"] == "differ from step 1"
    assert changes_gradients(found)
    assert not is_honest(found)
    assert bits(found).startswith("**CHANGED**")


def test_checkpointing_batch_norm_keeps_gradients_and_moves_running_statistics_twice(tmp_path: Path) -> None:
    found = as_in_core(metered("tiny-conv", CHECKPOINT, tmp_path), metered("tiny-conv", IN_CORE, tmp_path))
    assert not changes_gradients(found)
    assert bits(found) == "equal; buffers differ from step 1"


def test_a_memory_budget_of_the_compiler_takes_less_than_its_own_in_core(tmp_path: Path) -> None:
    in_core, budgeted = (metered("tiny-conv", name, tmp_path) for name in (COMPILED, "compile:0.1"))
    assert budgeted["peak_bytes"] < in_core["peak_bytes"]


def test_the_first_step_that_differs_is_told() -> None:
    steps = [{"gradients": "a"}, {"gradients": "b"}, {"gradients": "c"}]
    assert first_difference(steps, steps, "gradients") == "equal"
    assert first_difference(steps, [steps[0], steps[2], steps[2]], "gradients") == "differ from step 2"


def test_what_a_process_cannot_do_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"No module named 'rkgb\.core'"):
        metered("tiny-mlp", "rockmate", tmp_path)
    with pytest.raises(RefusedError, match="the process ended with 1: KeyError: 'no-such-network'"):
        metered("no-such-network", IN_CORE, tmp_path)


def test_ours_runs_at_each_budget_and_at_the_peaks_of_checkpointing_behind_them() -> None:
    rows = list(wanted_rows("gpt2", SHARES, ["greedy"], compiled=False))
    assert [one.at for one in rows if one.method == OURS] == [*SHARES, CHECKPOINT, SAC]
    assert rows.index(Wanted("gpt2", CHECKPOINT)) < rows.index(Wanted("gpt2", OURS, CHECKPOINT))
    assert [one.at for one in rows if one.method == "greedy"] == SHARES


def test_the_table_goes_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n", encoding="utf-8")
    put_into_page(page, "new")
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\nnew\n{END}\nbehind\n"
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the lines"):
        put_into_page(page, "new")
