"""How much the suite tries: which of its two parts, and whether each claim once or with every seed and network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PART = os.environ.get("POOCH_PART", "")
"""``first`` in ``make test``, ``rest`` in ``make test-all``; both together where it is not set."""
DEEP = os.environ.get("POOCH_DEEP", "") not in ("", "0")
"""``make test-all DEEP=1``: the tests marked ``deep`` run too, and :func:`tries` gives its larger number."""


def tries(day: int = 1, deep: int = 20) -> int:
    """How many examples of one claim to try."""
    return deep if DEEP else day


def seeds(day: int = 1, deep: int = 20) -> range:
    """The seeds of one claim: from 0."""
    return range(tries(day, deep))


HERE = Path(__file__).parent
REST = {
    "cli": "arena_shown fake_and_compiled fit link on_ranks sweep",
    "compiling": "autocast caches compiling eager_graphs",
    "cuda_rules": "auto_on_cuda room_before_plan",
    "docs": "stacks",
    "end_to_end": "chunks_within_budget compare compiled_within_budget epochs long_loop resident_memory",
    "examples": "stacks",
    "gpu": "suite_dry_run",
    "integrations": "onnx_models",
    "judges": "judges",
    "online": "growth kinds_of_run ranks trainings",
    "packaging": "installed",
    "profiler": "swap_all",
    "runtime": "autograd_steps compiled copies_of_the_model deferred_unpacks mutants save_points third_party",
    "runtime/arena": "building_the_library",
    "runtime/inference": "outside_meter",
    "tensors": "malloc",
    ".": "hangs",
}
"""Files of tests that ``make test`` leaves to ``make test-all``: whole programs, compilers, networks, other processes.
What they claim of one step is claimed of a small network in the first part too.
"""
REST_FILES = {HERE / folder / f"test_{name}.py" for folder, names in REST.items() for name in names.split()}
COPYING = "exactness host_places replay_kinds served_steps unusual_tensors"
ON_THE_CPU_TOO = {HERE / "runtime" / f"test_{name}.py" for name in COPYING.split()}
"""What the adversarial device claims of a step by day, these claim on the CPU's device too; with ``DEEP=1`` all do."""
MARKED = HERE / "gpu"
"""Where single tests are marked ``rest``: their files have tests of both parts."""


LONGEST = {HERE / "online" / "test_ranks.py", HERE / "examples" / "test_stacks.py", HERE / "cli" / "test_on_ranks.py"}
"""These begin first, so that no worker runs one of them at the end while the others have nothing to do."""


def is_looked_at(path: Path) -> bool:
    """Whether a file may have tests of the part that runs now. Others are not imported, which takes half a minute."""
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
