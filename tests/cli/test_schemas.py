"""The published JSON Schemas are those of the types, and real files keep to them."""

from __future__ import annotations

import json
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


def test_a_real_profile_and_a_real_plan_validate_and_one_with_a_wrong_field_does_not(
    profile_path: Path, plan_path: Path
) -> None:
    of_profiles = schema("profile.schema.json")
    profile, plan = (json.loads(path.read_bytes()) for path in (profile_path, plan_path))
    jsonschema.validate(profile, of_profiles)
    jsonschema.validate(plan, schema("plan.schema.json"))
    for spoilt in (
        plan,
        {name: value for name, value in profile.items() if name != "ops"},
        profile | {"kind": "plan"},
        profile | {"ops": [profile["ops"][0] | {"phase": "sideways"}]},
        profile | {"values": [profile["values"][0] | {"size_bytes": "much"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoilt, of_profiles)
