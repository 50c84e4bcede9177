"""``pooch profile --inference``: a forward pass alone, shown, written, and told from a training step."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import OUTSIDE
from tests.cli.conftest import Pooch
from tests.runtime.served import needs_compiler

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "inference.schema.json"
pytestmark = needs_compiler


@pytest.fixture
def pass_path(pooch: Pooch, small: str) -> Path:
    pooch.ok(f"profile {small} --inference -o pass.json --iterations 2")
    return Path("pass.json")


def test_the_table_says_peaks_arena_and_what_there_is_to_compare(pooch: Pooch, small: str) -> None:
    out = pooch(f"profile {small} --inference").out
    assert "Forward pass of small" in out
    for row in ("peak, with that", "one by one", "caching allocator", "arena", "saved by the arena"):
        assert f"\n{row} " in out
    assert "Wrote small.pass.json" in out
    assert PassProfile.load("small.pass.json").iterations == 5


def test_the_file_keeps_to_its_schema_and_is_shown(pooch: Pooch, pass_path: Path) -> None:
    jsonschema.validate(json.loads(pass_path.read_bytes()), json.loads(SCHEMA.read_bytes()))
    shown = pooch.ok("show pass.json").out
    assert "Forward pass of small" in shown
    assert "2 iterations" in shown


def test_with_json_the_figures_are_those_of_the_file(pooch: Pooch, small: str) -> None:
    data = pooch.json(f"profile {small} --inference -o pass.json")
    assert data.pop("profile") == "pass.json"
    written = json.loads(Path("pass.json").read_bytes())
    blocks = PassProfile.load("pass.json").blocks
    assert data == {name: value for name, value in written.items() if name not in ("blocks", "model")}
    inside_bytes = sum(-(-block.size_bytes // 512) * 512 for block in blocks if block.offset != OUTSIDE)
    assert data["separate_bytes"] == inside_bytes > data["arena_bytes"] > 0


@pytest.mark.parametrize("verb", ["plan pass.json --budget 60%", "sweep pass.json", "simulate pass.json plan.json"])
def test_what_plans_training_steps_says_in_one_line_that_nothing_is_to_be_planned(
    pooch: Pooch, pass_path: Path, verb: str
) -> None:
    line = pooch.refused(verb, code=1)
    assert "found a forward pass alone, of which nothing has to be moved" in line
    assert "poochplan.arena(model) serves it" in line
