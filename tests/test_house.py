"""Imports run one way, in no circles; folders are small; a name means one thing."""

from __future__ import annotations

import pytest

from tests.depth import IN_TURN_FILES, LONGEST, OF_TESTS_ROOMS, REST_FILES, THIRDS, turn
from tests.house import circle, files_per_folder, graph, modules, room_of, twice
from tests.packaging.folders import listed_packages, package_folders

BELOW = {
    "errors": set[str](),
    "units": {"errors"},
    "formats": {"errors", "units"},
    "native": {"formats", "errors"},
    "guard": {"errors"},
    "torch_private": set(),
    "tensors": {"torch_private", "guard", "errors", "units"},
    "planner": {"formats", "native", "errors", "units"},
    "runtime": {"formats", "native", "tensors", "torch_private", "guard", "errors", "units"},
    "profiler": {"planner", "runtime", "formats", "native", "tensors", "torch_private", "guard", "errors", "units"},
}
"""What each room may import, beside itself. All other modules may import any of these, and each other."""
MOST_FILES = 15


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    allowed = BELOW[room] | {room, ""}  # "": other packages
    wrong = [
        f"{name} -> {target}"
        for name, targets in graph().items()
        if room_of(name) == room
        for target in sorted(targets)
        if room_of(target) not in allowed
    ]
    assert not wrong


def test_no_library_code_imports_the_command_line_or_the_reports() -> None:
    display = {"cli", "report", "__main__"}
    wrong = [
        f"{name} -> {target}"
        for name, targets in graph().items()
        if room_of(name) not in display
        for target in sorted(targets)
        if room_of(target) in display
    ]
    assert not wrong


@pytest.mark.parametrize("room", ["planner", "formats"])
def test_planning_needs_no_torch(room: str) -> None:
    assert [name for name, targets in graph().items() if room_of(name) == room and "torch" in targets] == []


@pytest.mark.parametrize(
    ("room", "others", "knower"),
    [
        ("poochplan.runtime.compiled.", "poochplan.compiling.", "poochplan.runtime.compiled_hooks"),
        ("poochplan.integrations.onnx.", "poochplan.integrations.onnx.", "poochplan.integrations"),
    ],
)
def test_one_module_outside_imports_or_names(room: str, others: str, knower: str) -> None:
    naming = {name for name, path in modules().items() if f'"{room[:-1]}' in path.read_text()}
    importing = {name for name, targets in graph().items() if any(f"{one}.".startswith(room) for one in targets)}
    assert {one for one in naming | importing if not f"{one}.".startswith((room, others))} == {knower}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(graph()) == []


def test_no_folder_holds_more_files_than_one_sees_at_a_glance() -> None:
    assert {folder: count for folder, count in files_per_folder().items() if count > MOST_FILES} == {}


def test_no_two_modules_have_one_name() -> None:
    assert twice() == []


def test_every_file_that_the_suite_names_is_there() -> None:
    named = {*REST_FILES, *IN_TURN_FILES, *OF_TESTS_ROOMS, *LONGEST}
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize("count", range(1, 8))
def test_each_day_has_a_third_of_the_cases_and_some_days_have_all(count: int) -> None:
    days = [turn(range(count), day) for day in range(739_949, 739_949 + THIRDS)]
    assert sorted({case for day in days for case in day}) == list(range(count))
    assert all(0 < len(day) <= -(-count // min(count, THIRDS)) for day in days)


def test_pyproject_lists_exactly_the_folders() -> None:
    listed, folders = set(listed_packages()), set(package_folders())
    assert len(listed) == len(listed_packages())
    missing, gone = sorted(folders - listed), sorted(listed - folders)
    assert not missing, f"pyproject.toml: add {', '.join(missing)} to packages of [tool.setuptools], or `make packages`"
    assert not gone, f"pyproject.toml: drop {', '.join(gone)} from packages of [tool.setuptools], or `make packages`"
