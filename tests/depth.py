"""How much the suite tries: which of its two parts, which cases today, and whether with every seed and network."""

from __future__ import annotations

import datetime
import functools
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

PART = os.environ.get("POOCH_PART", "")
"""``first`` in ``make test``, ``rest`` in ``make test-all``; both together where it is not set."""
DEEP = os.environ.get("POOCH_DEEP", "") not in ("", "0")
"""``make test-all DEEP=1``: the tests marked ``deep`` run too, and :func:`tries` gives its larger number."""
EVERYTHING = DEEP or not PART or os.environ.get("POOCH_ALL", "") not in ("", "0")
"""``make test-all ALL=1``, which ``.ci/run`` is: all cases and all tests of tests. So is a call that names no part."""
DAY = int(os.environ.setdefault("POOCH_DAY", str(datetime.date.today().toordinal())))
"""Which third of the cases of :data:`IN_TURN` runs. Workers inherit it, so that midnight does not part them."""
THIRDS = 3


def tries(day: int = 1, deep: int = 20) -> int:
    """How many examples of one claim to try."""
    return deep if DEEP else day


def seeds(day: int = 1, deep: int = 20) -> range:
    """The seeds of one claim: from 0."""
    return range(tries(day, deep))


Case = TypeVar("Case")


def turn(cases: Sequence[Case], day: int) -> list[Case]:
    """A third of them, another one the next day; at least one."""
    of = min(THIRDS, max(1, len(cases)))
    return [case for number, case in enumerate(cases) if number % of == day % of]


def todays(cases: Sequence[Case]) -> Sequence[Case]:
    """Those whose turn it is; all with ``ALL=1``, before a release, and where no part is named."""
    return cases if EVERYTHING else turn(cases, DAY)


HERE = Path(__file__).parent
REST = {
    "accelerator": "on_late",
    "cli": "arena_shown fake_and_compiled fit link on_ranks pictures sweep",
    "compiling": "autocast caches compiling eager_graphs profiled_graphs",
    "cuda_rules": "auto_on_cuda room_before_plan",
    "docs": "stacks",
    "end_to_end": "chunks_within_budget compare compiled_within_budget epochs long_loop physical_budget "
    "resident_memory without_compiler workloads_within_budget",
    "examples": "examples stacks",
    "gpu": "suite_dry_run",
    "integrations": "onnx_models",
    "judges": "judges",
    "online": "growth kinds_of_run logged random_paths ranks trainings",
    "packaging": "archives installed",
    "planner": "instances sweep",
    "profiler": "swap_all",
    "runtime": "autograd_steps compiled copies_of_the_model deferred_unpacks fault_injection launch_path save_points "
    "third_party",
    "runtime/arena": "building_the_library",
    "runtime/inference": "outside_meter",
    "tensors": "malloc",
    "workloads": "full_volume",
}
"""Files of tests that ``make test`` leaves to ``make test-all``: whole programs, compilers, networks, pictures, other
processes. What they claim of one step is claimed of a small network in the first part too.
"""
REST_FILES = {HERE / folder / f"test_{name}.py" for folder, names in REST.items() for name in names.split()}
IN_TURN = {
    "compiling": "eager_graphs",
    "cuda_rules": "allocator",
    "docs": "stacks",
    "end_to_end": "chunks_within_budget compiled_within_budget without_compiler workloads_within_budget",
    "examples": "stacks",
    "formats": "hostile_files",
    "gpu": "algorithms_on_gpu exactness_gpu flows_on_gpu second_gpu suite_dry_run",
    "integrations": "onnx_models",
    "judges": "judges",
    "online": "gradients inside kinds_of_run logged quiet random_paths resting served sizes_inside trainings "
    "unusual_loops unusual_modules",
    "planner": "bound branching checkers effort fitting oracle planning policies reserved search sources time_steps",
    "profiler": "fake late_writes op_bench replays_change_nothing sparse_and_nested static_bytes swap_all timed_steps",
    "programs": "programs",
    "runtime": "audit autograd_steps backward_without_modes compiled copies_of_the_model deferred_unpacks divergence "
    "exactness host_places late_buffers launch_path left_out many_steps memory_of_the_graph messages plan_set_steps "
    "recording replay_kinds rewriting save_points served_changes served_steps sources third_party unusual_tensors "
    "users_modes",
    "workloads": "hugging_face workloads",
}
"""Files of tests that claim the same of many seeds, networks or kinds of step: each day has a third of the cases of
each test, another one the next day, and ``ALL=1`` all. A test that is no one of several cases runs every day.
"""
IN_TURN_FILES = {HERE / folder / f"test_{name}.py" for folder, names in IN_TURN.items() for name in names.split()}
OF_TESTS = {
    "cuda_rules/test_cuda_mutants.py": ("runtime", "tests/cuda_rules", "tests/runtime/mutants.py"),
    "cuda_rules/test_rules.py": ("tests/cuda_rules",),
    "runtime/test_mutants.py": ("runtime", "src/poochplan/tensors", "tests/runtime"),
    "runtime/test_rules.py": ("runtime", "src/poochplan/tensors", "tests/runtime"),
    "test_hangs.py": ("tests/hangs.py", "tests/conftest.py", "tests/test_hangs.py", "pyproject.toml"),
}
"""Mutants and tests of tests, with the rooms that they are about: without a change there they say what they said."""
OF_TESTS_ROOMS = {HERE / name: rooms for name, rooms in OF_TESTS.items()}
COPYING = "exactness host_places replay_kinds served_steps unusual_tensors"
ON_THE_CPU_TOO = {HERE / "runtime" / f"test_{name}.py" for name in COPYING.split()}
"""What the adversarial device claims of a step by day, these claim on the CPU's device too; with ``DEEP=1`` all do."""
MARKED = HERE / "gpu"
"""Where single tests are marked ``rest``: their files have tests of both parts."""


LONGEST = {HERE / "online" / "test_ranks.py", HERE / "examples" / "test_stacks.py", HERE / "cli" / "test_on_ranks.py"}
"""These begin first, so that no worker runs one of them at the end while the others have nothing to do."""


@functools.cache
def changed() -> frozenset[str] | None:
    """Paths that differ from where this branch left main, committed or not. None without git or a main."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=True)
        return done.stdout

    for main in ("origin/main", "main"):
        try:
            since = git("merge-base", "HEAD", main).strip()
            names = git("diff", "--name-only", since) + git("ls-files", "--others", "--exclude-standard")
        except (OSError, subprocess.CalledProcessError):
            continue
        return frozenset(names.splitlines())
    return None


def is_changed(rooms: tuple[str, ...]) -> bool:
    """Whether something in these files or folders is; where nobody can tell, it may be."""
    paths = changed()
    return paths is None or any(path == room or path.startswith(f"{room}/") for path in paths for room in rooms)


def is_looked_at(path: Path) -> bool:
    """Whether a file may have tests of the part that runs now. Others are not imported, which takes half a minute."""
    if not EVERYTHING and path in OF_TESTS_ROOMS and not is_changed(OF_TESTS_ROOMS[path]):
        return False
    if PART == "first":
        return path not in REST_FILES
    both = path in ON_THE_CPU_TOO or (DEEP and HERE / "runtime" in path.parents)
    return PART != "rest" or path in REST_FILES or both or MARKED in path.parents


def is_in_part(item: pytest.Item) -> bool:
    """Whether the part of the suite that runs now has the test, on one device or on both."""
    if not PART or is_of_rest(item) == (PART == "rest"):
        return True
    return PART == "rest" and runs_on_two_devices(item) and (DEEP or item.path in ON_THE_CPU_TOO)


def is_of_rest(item: pytest.Item) -> bool:
    """Whether ``make test`` leaves it out; notebooks are all of the rest."""
    is_marked = item.get_closest_marker("rest") is not None
    return is_marked or item.path in REST_FILES or HERE not in item.path.parents


def runs_on_two_devices(item: pytest.Item) -> bool:
    """Whether it is a test of the runtime, which runs on the CPU's device and on the adversarial one."""
    return HERE / "runtime" in item.path.parents and item.get_closest_marker("cpu_device") is None


def not_today(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases of the tests of :data:`IN_TURN_FILES`, and notebooks, whose turn it is not: of each test one runs."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if HERE not in item.path.parents:
            cases["notebooks"].append(item)
        elif item.path in IN_TURN_FILES and hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    return {item for some in cases.values() for item in set(some) - set(todays(some))}
