"""A share of each judge that nobody here wrote, another one each week: ``benchmarks/judges`` runs them whole."""

from __future__ import annotations

import datetime
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from benchmarks.judges import accelerate_scripts, architectures
from benchmarks.judges.others_bugs import BUGS, judged
from tests.depth import tries
from tests.runtime.served import needs_compiler

WEEK = datetime.date.today().isocalendar().week
RIGHT = ("equal", "unsteady", "not tried", "not buildable", "fails plain")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without what others' networks warn of, and steps that leave their plans."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def share_of_databases(count: int, auto: int, seed: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """To be run in a process of its own: torch's test modules forbid to set switches of its backends by name."""
    from benchmarks.judges import databases

    warnings.simplefilter("ignore")
    found, under_auto = databases.nothing_yet(), databases.nothing_yet()
    wrong = databases.run_share(databases.entries(), count, seed, found)
    wrong += databases.run_share(databases.entries(), auto, seed, under_auto, databases.judged_under_auto)
    return wrong, found, under_auto


@needs_compiler
def test_samples_of_torchs_databases_train_under_plans_as_without() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        wrong, found, under_auto = process.submit(share_of_databases, tries(16, 200), tries(3, 40), WEEK).result()
    assert wrong == [], found["named"] + under_auto["named"]
    assert found["served"] > 0
    assert under_auto["followed"] > 0


@needs_compiler
def test_architectures_of_transformers_train_under_plans_as_without() -> None:
    names = random.Random(WEEK).sample(architectures.LIBRARIES["transformers"].names(), tries(4, 30))
    found = {name: architectures.tried(name) for name in ["bert", *names]}
    assert {name: one for name, one in found.items() if one["status"] not in RIGHT} == {}
    assert found["bert"]["status"] == "equal"


@needs_compiler
@pytest.mark.parametrize("name", [*accelerate_scripts.SCRIPTS][-tries(1, 9) :])
def test_accelerates_own_scripts_train_in_a_session_as_without(name: str) -> None:
    found = accelerate_scripts.judged(name)
    assert found["status"] == "equal", found
    if "checkpointing" in name:
        assert all(one["followed"] for one in found["sessions"].values())


@needs_compiler
@pytest.mark.parametrize("name", BUGS)
def test_what_others_have_reported_does_not_happen_under_a_plan(name: str) -> None:
    row = judged(BUGS[name])
    assert row["right"], row["poochplan"]
