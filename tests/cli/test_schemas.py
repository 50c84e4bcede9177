"""The published JSON Schemas are those of the types, and real files keep to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from poochplan.formats.json_schema import FILES, json_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas"


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PUBLISHED / name).read_bytes())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


@pytest.mark.parametrize("name", list(FILES))
def test_what_is_published_is_up_to_date(name: str) -> None:
    hint = "run python -m poochplan.formats.json_schema docs/schemas"
    assert (PUBLISHED / name).read_bytes() == json_schema(FILES[name]), hint


def test_nothing_else_is_published() -> None:
    assert sorted(path.name for path in PUBLISHED.iterdir()) == sorted(FILES)


def test_a_real_profile_and_a_real_plan_validate(profile_path: Path, plan_path: Path) -> None:
    jsonschema.validate(json.loads(profile_path.read_bytes()), schema("profile.schema.json"))
    jsonschema.validate(json.loads(plan_path.read_bytes()), schema("plan.schema.json"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("ops"),
        lambda data: data.update(kind="plan"),
        lambda data: data["ops"][0].update(phase="sideways"),
        lambda data: data["values"][0].update(size_bytes="much"),
    ],
)
def test_a_profile_with_a_wrong_field_does_not(profile_path: Path, spoil: Callable[[Any], None]) -> None:
    data = json.loads(profile_path.read_bytes())
    spoil(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema("profile.schema.json"))


def test_a_plan_is_no_profile(plan_path: Path) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(plan_path.read_bytes()), schema("profile.schema.json"))
