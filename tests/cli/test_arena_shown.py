"""The arena on the command line: what its budget is on, what was served, and what to do where nothing can be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import poochplan
from poochplan.formats.profile import Memory
from poochplan.runtime.arena import library
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_compiler


def rows(text: str) -> dict[str, str]:
    """The rows of a summary by name, lines that were folded put together."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        head, gap, rest = line.partition("  ")
        if head and gap:
            name, found[head] = head, rest.strip()
        elif name and line.startswith("  "):
            found[name] += f" {line.strip()}"
    return found


@needs_compiler
def test_a_plan_says_what_its_budget_is_on_what_its_arena_takes_and_which_budget_keeps_everything(pooch: Pooch) -> None:
    shown = rows(pooch(f"plan {pooch.profile} --budget 90% -o on.json").out)
    plan = poochplan.Plan.load("on.json")
    assert plan.prediction.arena_peak_bytes is not None
    assert plan.prediction.arena_peak_bytes <= plan.budget_bytes
    assert shown["budget is on"] == "one arena for the step, and what lies outside it"
    assert re.fullmatch(r"\S+ \w+ allocated, \S+ \w+ live", shown["predicted peak"])
    assert re.fullmatch(r".* above its live peak; \S+ \w+ with what lies outside", shown["arena"])
    assert "no allocator" not in shown
    asked = re.fullmatch(r"--budget (\S+%): the same step from one arena of (\S+ \w+)", shown["everything kept"])
    assert asked is not None
    found = pooch.json(f"plan {pooch.profile} --budget {asked[1]} -o kept.json")
    assert found["arena_within_budget"] is True
    assert found["arena_peak_bytes"] == found["kept_arena_peak_bytes"] <= found["budget_bytes"]
    assert {name for name, row in found["decisions"].items() if row["values"]} == {"keep"}
    assert rows(pooch("show kept.json").out)["arena"].startswith(asked[2])


@needs_compiler
def test_without_an_arena_the_smallest_budget_is_the_smallest_peak(pooch: Pooch, profile: poochplan.Profile) -> None:
    on, off = (poochplan.smallest_budget(profile, arena=arena) for arena in ("on", "off"))
    assert on >= off
    for arena, smallest in (("on", on), ("off", off)):
        made = pooch.json(f"plan {pooch.profile} --evaluations 50 --min --arena {arena} -o {arena}.json")
        assert made["budget_bytes"] == smallest
    swept = pooch.json(f"sweep {pooch.profile} --policies ilp --points 2 --arena off -o swept.csv")
    assert swept["smallest_budget_bytes"] == off


def test_a_plan_from_live_bytes_as_where_no_allocator_can_be_built_says_what_to_install(
    pooch: Pooch, profile: poochplan.Profile
) -> None:
    ops = tuple(msgspec.structs.replace(op, blocks=(), workspace_bytes=0) for op in profile.ops)
    msgspec.structs.replace(profile, ops=ops, memory=Memory.LIVE).save("live.profile.json")
    shown = rows(pooch.ok("plan live.profile.json --budget 90% -o live.json").out)
    assert "install g++ or clang++" in shown["no allocator"]
    assert "allocated" not in shown["predicted peak"]


@needs_compiler
def test_a_run_says_what_was_served_and_its_file_has_it(pooch: Pooch) -> None:
    shown = rows(pooch(f"run {pooch.small} --plan {pooch.plan} --timed 3 --check -o run.json --arena on").out)
    served = re.fullmatch(r"(\d+) blocks, .* a step, from one arena of \S+ \w+", shown["served from the arena"])
    assert served is not None
    assert shown["gradients bitwise equal"].startswith("yes")
    record = json.loads(Path("run.json").read_text())
    assert record["served_blocks"] == int(served[1]) > 0
    assert record["served_arena_bytes"] <= record["arena_bytes"] + record["budget_bytes"] - record["arena_peak_bytes"]
    assert record["unserved_blocks"] >= len(record["unserved"])
    assert (record["why_not_served"], record["bitwise_equal"]) == ("", True)
    assert f"{served[1]} blocks" in rows(pooch("show run.json").out)["served from the arena"]


def test_a_run_without_an_arena_says_why(pooch: Pooch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"run {pooch.small} --plan {pooch.plan} --steps 1 --timed 1"
    assert rows(pooch(run, "--arena", "off").out)["served from the arena"] == "nothing: --arena off"
    monkeypatch.setenv("CXX", "nonesuch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for state in ("_library", "_failure"):  # as in a process that has not loaded it
        monkeypatch.setattr(library, state, None)
    assert "install g++ or clang++" in rows(pooch(run).out)["served from the arena"]
    assert 'arena: "on" is not possible: CXX=nonesuch' in pooch.refused(run, "--arena", "on")
