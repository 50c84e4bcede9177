"""``pooch profile --inference``: a forward pass alone, shown, written, and told from a training step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import OUTSIDE
from poochplan.runtime.arena.library import why_unavailable

Pooch = Any
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "inference.schema.json"
with_allocator = pytest.mark.skipif(bool(why_unavailable()), reason="no compiled allocator can be built here")


@pytest.fixture
def pass_path(pooch: Pooch, workloads: Path) -> Path:
    result = pooch("profile", f"{workloads}:small", "--inference", "-o", "pass.json", "--iterations", "2")
    assert result.code == 0, result.err
    return Path("pass.json")


@with_allocator
def test_the_table_says_peaks_arena_and_what_there_is_to_compare(pooch: Pooch, workloads: Path) -> None:
    out = pooch("profile", f"{workloads}:small", "--inference").out
    assert "Forward pass of small" in out
    for row in ("peak, with that", "one by one", "caching allocator", "arena", "saved by the arena"):
        assert f"\n{row} " in out
    assert "Wrote small.pass.json" in out
    assert PassProfile.load("small.pass.json").iterations == 5


@with_allocator
def test_the_file_keeps_to_its_schema_and_is_shown(pooch: Pooch, pass_path: Path) -> None:
    jsonschema.validate(json.loads(pass_path.read_bytes()), json.loads(SCHEMA.read_bytes()))
    shown = pooch("show", pass_path)
    assert shown.code == 0, shown.err
    assert "Forward pass of small" in shown.out
    assert "2 iterations" in shown.out


@with_allocator
def test_with_json_the_figures_are_those_of_the_file(pooch: Pooch, workloads: Path) -> None:
    data = json.loads(pooch("profile", f"{workloads}:small", "--inference", "-o", "pass.json", "--json").out)
    found = PassProfile.load("pass.json")
    assert data.pop("profile") == "pass.json"
    assert data == json.loads(json.dumps(found.data()))
    inside = [block for block in found.blocks if block.offset != OUTSIDE]
    assert (
        data["separate_bytes"] == sum(-(-block.size_bytes // 512) * 512 for block in inside) > data["arena_bytes"] > 0
    )


@with_allocator
@pytest.mark.parametrize("verb", [("plan", "--budget", "60%"), ("sweep",), ("simulate", "plan.json")])
def test_what_plans_training_steps_says_in_one_line_that_nothing_is_to_be_planned(
    pooch: Pooch, pass_path: Path, verb: tuple[str, ...]
) -> None:
    name, *options = verb
    result = pooch(name, pass_path, *options)
    assert result.code == 1
    line = result.error
    assert "found a forward pass alone, of which nothing has to be moved" in line
    assert "poochplan.arena(model) serves it" in line


@pytest.mark.parametrize(
    "option", [("--mode", "fake"), ("--mode", "swap-all"), ("--throttle", "1GB/s"), ("--accumulate",), ("--top", "3")]
)
def test_an_option_of_training_steps_is_refused_in_one_line(
    pooch: Pooch, workloads: Path, option: tuple[str, ...]
) -> None:
    result = pooch("profile", f"{workloads}:small", "--inference", *option)
    assert result.code == 2
    assert result.error.startswith(option[0])
    assert "with --inference" in result.error
