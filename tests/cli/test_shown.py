"""Profiles, plans and reports show themselves in notebooks and on a terminal; files keep to the published schemas."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from IPython.lib.pretty import pretty

from poochplan.formats.files import html_table, text_table
from poochplan.formats.json_schema import FILES, json_schema
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.peak import explain_peak
from poochplan.runtime.run_report import MemoryPeaks, Report, StepReport
from poochplan.units import format_bytes
from tests.processes import python

HOSTILE = '<script>alert("x")</script> & more'


def cells(html: str) -> list[str]:
    """Every text of the table; fails where it is not well-formed."""
    return [text for text in ElementTree.fromstring(html).itertext() if text]


def test_a_profile_and_a_plan_are_some_lines_with_their_peaks_and_what_they_are_of(
    profile: Profile, plan: Plan
) -> None:
    for one, title, size_bytes in (
        (profile, "Profile of small", profile.in_core_peak_bytes),
        (plan, "Plan for small", plan.budget_bytes),
    ):
        html, lines = one._repr_html_(), pretty(one).splitlines()
        shown = cells(html)
        assert shown[0] == lines[0] == title
        assert any(text.startswith(format_bytes(size_bytes)) for text in shown)
        assert len(lines) == len(ElementTree.fromstring(html).findall("tr")) + 1, "not every value"
    decisions = shown[shown.index("decisions") + 1]
    assert all(decision in decisions for decision in ("keep", "swap", "recompute"))


def test_what_a_file_says_is_shown_as_text_and_never_as_html(profile: Profile, plan: Plan) -> None:
    said: dict[str, Any] = {"workload": HOSTILE, "notes": (HOSTILE,), "assumed": (HOSTILE,)}
    for shown in (
        msgspec.structs.replace(profile, **said)._repr_html_(),
        msgspec.structs.replace(plan, **said)._repr_html_(),
        explain_peak(msgspec.structs.replace(profile, in_core_peak_layer=HOSTILE))._repr_html_(),
        report(fallback_reasons=[HOSTILE])._repr_html_(),
        html_table(HOSTILE, [(HOSTILE, HOSTILE)], (HOSTILE, HOSTILE)),
    ):
        assert "<script" not in shown
    assert cells(html_table(HOSTILE, [(HOSTILE, HOSTILE)])) == [HOSTILE] * 3


def report(**total: Any) -> Report:
    moved: dict[str, Any] = {"out_bytes": 3 << 20, "in_bytes": 3 << 20, "stall_s": 1.5}
    return Report(
        last_step=StepReport(steps=1, out_bytes=1 << 20, in_bytes=1 << 20, stall_s=0.5),
        total=StepReport(**{"steps": 3, "peak_bytes": 3 << 20, **moved, **total}),
        predicted_peak_bytes=2 << 20,
        predicted_first_step_peak_bytes=1 << 20,
        budget_bytes=4 << 20,
    )


def test_a_report_prints_as_a_table_of_the_last_step_and_all_of_them() -> None:
    first, headings, *rows = str(report()).splitlines()
    assert first == "3 steps with a budget of 4.00 MiB"
    assert headings.split("  ")[-1] == "all steps"
    assert rows[0].split("  ", 1)[0] == "peak"
    assert "not metered" in rows[0]
    assert rows[0].endswith("3.00 MiB")
    start = headings.index("all steps")
    assert all(row[start - 2 : start] == "  " and row[start] != " " for row in rows)
    assert not any(row.endswith(" ") for row in rows)
    assert "because" not in str(report())


def test_a_report_says_what_is_over_the_budget_why_the_plan_was_left_and_what_was_reserved() -> None:
    shown = str(report(peak_bytes=5 << 20, fallbacks=2, fallback_reasons=["another batch size"]))
    assert "5.00 MiB (OVER THE BUDGET)" in shown
    assert "2 times" in shown
    assert "another batch size" in shown
    on_cuda = msgspec.structs.replace(report(), memory=MemoryPeaks(allocated_bytes=1 << 20, reserved_bytes=2 << 20))
    assert str(on_cuda).splitlines()[-1].split() == ["reserved", "2.00", "MiB"]


def test_columns_of_a_table_are_as_wide_as_their_longest_cell() -> None:
    assert text_table("t", [("a", "1"), ("long", "22")]) == "t\na     1\nlong  22"


@pytest.mark.parametrize("module", ["poochplan.formats.profile", "poochplan.formats.plan"])
def test_files_load_without_torch_pandas_and_matplotlib(module: str) -> None:
    heavy = "{'torch', 'pandas', 'matplotlib', 'rich'}"
    code = f"import sys, {module}; print(*{heavy} & sys.modules.keys())"
    assert python(code, is_fresh=True) == "\n"


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
